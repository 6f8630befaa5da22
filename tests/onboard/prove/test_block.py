"""The prover says yes to what it has never seen, and no to what is almost right."""

import dataclasses

import pytest
import strange
import tiny
import torch
from odd_specs import NO_CHECKPOINT

from dayzero.onboard.candidates import Candidate, moe, site_of
from dayzero.onboard.candidates.evidence import literal
from dayzero.onboard.composition import load_reference, specification_of
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.oracle.reference import build, redraw, run
from dayzero.onboard.prove import block
from dayzero.onboard.prove.block import BOUND, attempt, errors, prove, relative_error
from dayzero.onboard.prove.model import prove_model
from dayzero.onboard.prove.proven import NotProven
from dayzero.onboard.report.layers import lifted
from dayzero.onboard.shrink.shrink import SEQUENCE

NORMS_LEFT = "the search ended at its bound of 1 candidates; 3 were left untried"
SMALL = {"vocab_size": 131, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 14}


def config_of(family, **changes):
    from transformers import AutoConfig

    name = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}[family]
    config = AutoConfig.for_model(family, **{**tiny.FAMILIES[family], **SMALL, "num_hidden_layers": 1, **changes})
    return {**config.to_dict(), "architectures": [name]}


def reference(family, **changes):
    model, _ = build(config_of(family, **changes))
    redraw(model, torch.Generator().manual_seed(0))
    return model


def ids_for(vocabulary):
    return torch.randint(3, vocabulary, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))


def proof(model):
    return prove_model(model, ids_for(131), torch.Generator().manual_seed(2))


def our_logits(model, proven):
    spec = specification_of(model, model.config, proven, list(range(len(proven.layers))), NO_CHECKPOINT, "x")
    ours = spec.build().double()
    load_reference(ours, model, proven)
    ids = ids_for(131)
    with torch.no_grad():
        logits = ours(ids.flatten(), torch.arange(0, ids.numel() + 1, SEQUENCE)).view(*ids.shape, -1)
    return logits, spec


# --- yes ------------------------------------------------------------------------------------------------------------


def test_a_model_that_nobody_knows_is_proven_from_what_it_computes():
    model = strange.build()
    redraw(model, torch.Generator().manual_seed(0))
    proven, attempts = proof(model)
    assert proven.rotaries[0].path == "spin"
    assert [part.unit.path for part in proven.layers[1].parts] == ["zig", "see", "zag", "do"]
    logits, spec = our_logits(model, proven)
    with torch.no_grad():
        assert relative_error(logits, run(model, ids_for(131))) <= 1e-12
    (kind,) = spec.layer_kinds
    assert spec.rotaries[0].arguments == {"dim": 14, "theta": 20000.0}
    assert kind.blocks["mixer_norm"].arguments == {"width": 48, "eps": 3e-6, "offset": 0.0}
    wanted = {"heads": 6, "kv_heads": 3, "head_dim": 14, "rotary": "half"}
    assert kind.blocks["mixer"].arguments.items() >= wanted.items()
    assert not kind.blocks["mixer"].arguments.keys() & {"qk_norm", "window", "clip"}  # the defaults: none of them
    assert kind.blocks["mixer"].arguments["scale"] == pytest.approx(14**-0.5, rel=1e-15)
    router, experts = (kind.blocks["ffn"].arguments[name].arguments for name in ("router", "experts"))
    assert router.items() >= {"experts": 10, "top_k": 3, "score": "sigmoid", "scored": "all", "scale": 1.75}.items()
    assert router["normalise"].arguments == {"eps": 1e-9}
    assert experts.items() >= {"experts": 10, "hidden": 48, "width": 34, "act": "silu"}.items()
    mixer = proven.layers[0].attempts["mixer"].candidate.parameters
    assert {ours: mixer[f"{ours}.weight"].name[:2] for ours in ("query", "key", "value", "output")} == {
        "query": "bb", "key": "cc", "value": "aa", "output": "dd",
    }  # fmt: skip
    assert all(attempt.error <= 1e-9 for tried in attempts.values() for attempt in tried if attempt.proven)


def test_what_is_proven_keeps_the_weights_of_the_reference():
    """Proofs redraw weights; they are put back."""
    model = reference("mixtral")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    proof(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_swapped_projections_are_told_apart_by_value():
    model = reference("llama")
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def crossed(*args, **kwargs):  # what is called k_proj makes the values, and the other way round
        attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj
        try:
            return forward(*args, **kwargs)
        finally:
            attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj

    attention.forward = crossed
    proven, _ = proof(model)
    parameters = proven.layers[0].attempts["mixer"].candidate.parameters
    assert parameters["key.weight"].name == "v_proj.weight"
    assert parameters["value.weight"].name == "k_proj.weight"


# --- no -------------------------------------------------------------------------------------------------------------


class Tilted(torch.autograd.Function):
    """The identity, whose gradient is off by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def first_token_zeroed(y, x):
    keep = torch.ones((*y.shape[:2], 1), dtype=y.dtype)
    keep[:, 0] = 0
    return y * keep


def larger_where_the_input_is_large(y, x):
    return torch.where(x > 60, y + y, y)


TAMPERED = {
    "output x(1+1e-7)": lambda y, x: y + y * torch.full((1,), 1e-7, dtype=y.dtype),
    "output + 1e-7": lambda y, x: y + torch.full((1,), 1e-7, dtype=y.dtype) * y.abs().mean(),
    "first token zeroed": first_token_zeroed,
    "gradient x(1+1e-6)": lambda y, x: Tilted.apply(y, 1 + 1e-6),
    "no gradient": lambda y, x: y.detach() + 0.0 * x.sum(),
    "large inputs": larger_where_the_input_is_large,
    "a constant that cancels": lambda y, x: y * 2.0 / 2.0,
    "a constant too small to see": lambda y, x: y + 1e-25,
    "a limit out of reach": lambda y, x: y.clamp(-1e6, 1e6),
    "a limit of infinity": lambda y, x: y.clamp(max=float("inf")),
    "a step that changes nothing": lambda y, x: y.abs() * y.sign(),
    "a branch at a large value": lambda y, x: torch.where(x > 1e9, y + y, y),
}
PLACES = {
    "norm": ("llama", "model.layers.0.input_layernorm"),
    "final norm": ("llama", "model.norm"),
    "attention": ("llama", "model.layers.0.self_attn"),
    "dense": ("llama", "model.layers.0.mlp"),
    "experts": ("mixtral", "model.layers.0.mlp"),
}


def tamper(module, change):
    forward = module.forward

    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        hidden = next(x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor) and x.is_floating_point())
        if isinstance(output, tuple):
            return (change(output[0], hidden), *output[1:])
        return change(output, hidden)

    module.forward = changed


@pytest.mark.parametrize(
    ("place", "change"),
    [
        pytest.param(place, change, marks=pytest.mark.slow if place in {"final norm", "dense"} else ())
        for place in PLACES
        for change in TAMPERED
        # Beside experts such a constant is the epsilon of their weights' sum, which no input tells apart.
        if (place, change) != ("experts", "a constant too small to see")
    ],
)
def test_a_tampered_module_is_not_proven(place, change):
    family, path = PLACES[place]
    model = reference(family)
    tamper(model.get_submodule(path), TAMPERED[change])
    with pytest.raises(NotProven) as error:
        proof(model)
    # A norm that gives one token nothing leaves the next part too little to be told by: that may be said as well.
    (item,) = [item for item in error.value.unproven if item.where == path]
    if change.startswith("gradient"):
        assert any("gradient" in line and "1.0e-06" in line for line in item.tried), item
    if change == "a constant too small to see":
        assert any("1e-25" in line for line in item.tried), item
    if change == "a limit out of reach":
        assert any("input x3e+06" in line or "reference only: step clamp" in line for line in item.tried), item
    if change == "a limit of infinity":
        assert any("reference only: step clamp" in line for line in item.tried), item
    if change == "a branch at a large value":
        assert any("reference only: step gt" in line for line in item.tried), item


def test_a_router_without_gradient_is_not_proven():
    """Its forward pass is exact."""
    model = reference("mixtral")
    gate = model.model.layers[0].mlp.gate
    forward = gate.forward
    gate.forward = lambda *args: tuple(part.detach() for part in forward(*args))
    with pytest.raises(NotProven) as error:
        proof(model)
    (item,) = error.value.unproven
    assert item.where == "model.layers.0.mlp"
    assert any("gradient" in line for line in item.tried)


def test_a_limit_is_not_taken_for_another_that_has_not_been_reached():
    """The bound is an attribute, so that a clip of queries, keys and values by it is among the candidates."""
    model = reference("llama")
    attention = model.model.layers[0].self_attn
    attention.ceiling = 1e6
    tamper(attention, lambda y, x: y.clamp(-attention.ceiling, attention.ceiling))
    with pytest.raises(NotProven) as error:
        proof(model)
    assert [item.where for item in error.value.unproven] == ["model.layers.0.self_attn"]


def test_routing_that_takes_a_wrong_expert_for_one_token_is_not_proven():
    """Only the choice differs: every weight and every expert is right."""
    model = reference("mixtral")
    gate = model.model.layers[0].mlp.gate
    forward = gate.forward

    def biased(hidden):
        logits, weights, index = forward(hidden)
        other = index.clone()
        other[0] = (index[0] + 1) % logits.shape[-1]
        return logits, weights, other

    gate.forward = biased
    with pytest.raises(NotProven) as error:
        proof(model)
    assert [item.where for item in error.value.unproven] == ["model.layers.0.mlp"]


def test_inputs_of_which_the_reference_makes_nothing_finite_judge_nothing():
    """Unless the captured one is among them."""
    model = reference("llama")
    calls, _ = record_calls(model, ids_for(131))
    site = site_of(calls, "model.layers.0.mlp", model.config)
    best = prove("ffn", site, torch.Generator().manual_seed(2)).survivors[0].candidate
    block = best.build(site.module, site.config).double()
    huge = site.call.hidden * 1e200
    assert errors(site, best, block, huge, torch.Generator()) == {}
    assert errors(site, best, block, site.call.hidden, torch.Generator())["output"] > 1e-4  # its weights are others
    call = dataclasses.replace(site.call, args=(huge,), kwargs={})
    tried = attempt(best, dataclasses.replace(site, call=call), torch.Generator(), thorough=True)
    assert tried.objection == "the module itself gives no finite output for it"


# --- claims that are almost right -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proven_mixtral():
    model = reference("mixtral", rms_norm_eps=1e-5)
    return model, proof(model)[0]


def claim(proven_mixtral, role, parameters=None, **arguments):
    """The proven candidate with some claims changed, tried again in full."""
    model, proven = proven_mixtral
    path = next(f"{proven.parts.layers}.0.{p.unit.path}" for p in proven.layers[0].parts if p.unit.name == role)
    candidate = proven.layers[0].attempts[role].candidate
    for name, value in arguments.items():
        candidate = claiming(candidate, name.split("__"), value)
    candidate = dataclasses.replace(candidate, parameters={**candidate.parameters, **(parameters or {})})
    site = site_of(proven.parts.calls, path, model.config)
    return attempt(candidate, site, torch.Generator().manual_seed(5), thorough=True)


def claiming(candidate, path, value):
    """The candidate with another value for an argument, or for one of a block inside it."""
    name, *rest = path
    inner = claiming(candidate.arguments[name], rest, value) if rest else literal(value, "a test")
    return dataclasses.replace(candidate, arguments={**candidate.arguments, name: inner})


@pytest.mark.parametrize("role", ["mixer_norm", "mixer", "ffn_norm", "ffn"])
def test_the_proven_claim_holds_again_on_other_draws(proven_mixtral, role):
    again = claim(proven_mixtral, role)
    assert again.proven, again.objection
    assert again.error <= 1e-9


@pytest.mark.parametrize(
    ("role", "arguments"),
    [
        ("mixer_norm", {"eps": 1.0001e-5}),
        ("mixer_norm", {"eps": 0.0}),
        ("mixer_norm", {"offset": 1.0}),
        ("mixer", {"scale": 14**-0.5 * (1 + 1e-8)}),
        ("mixer", {"rotary": "interleaved"}),
        ("mixer", {"rotary": None}),
        ("mixer", {"window": SEQUENCE - 1}),
        ("mixer", {"clip": 1e4}),
        ("ffn", {"experts__act": "gelu"}),
        ("ffn", {"router__score": "sigmoid"}),
        ("ffn", {"router__normalise": None}),
        ("ffn", {"router__normalise__eps": 1e-12}),
        ("ffn", {"router__scale": 1 + 1e-8}),
        ("ffn", {"router__top_k": 1}),
    ],
)
def test_a_claim_that_is_slightly_wrong_is_refuted(proven_mixtral, role, arguments):
    tried = claim(proven_mixtral, role, **arguments)
    assert not tried.proven, arguments
    assert tried.objection


@pytest.mark.parametrize(("one", "other"), [("key.weight", "value.weight"), ("key.weight", "key.weight")])
def test_a_claim_with_the_wrong_weights_is_refuted(proven_mixtral, one, other):
    held = proven_mixtral[1].layers[0].attempts["mixer"].candidate.parameters
    swapped = {one: held[other], other: held[one]} if one != other else {"value.weight": held["key.weight"]}
    assert not claim(proven_mixtral, "mixer", parameters=swapped).proven


def test_softmax_of_the_selected_is_the_same_as_softmax_renormalised(proven_mixtral):
    """Equal in exact arithmetic: what nothing separates may survive, but within the bound."""
    tried = claim(proven_mixtral, "ffn", router__scored="selected", router__normalise=None)
    assert tried.error <= 1e-9 or not tried.proven


# --- the measure ----------------------------------------------------------------------------------------------------


def test_relative_error_never_passes_what_cannot_be_compared():
    one, nan = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, float("nan"), 1.0], dtype=torch.float64)
    assert relative_error(one, one) == 0
    assert relative_error(one * 1.5, one) == 0.5
    assert relative_error(nan, one) == relative_error(one, nan) == relative_error(nan, nan) == float("inf")
    assert relative_error(one, one[:2]) == float("inf")
    assert relative_error(one, 0 * one) == float("inf")
    assert relative_error(0 * one, 0 * one) == 0
    assert relative_error(one * float("inf"), one) == float("inf")
    assert relative_error(one * 1e-9, 0 * one, floor=3**0.5) == pytest.approx(1e-9)


def test_a_module_like_none_in_the_library_has_no_candidate():
    model = reference("llama")
    proven, _ = proof(model)
    site = site_of(proven.parts.calls, "model.layers.0.mlp", model.config)
    assert prove("mixer", site, torch.Generator().manual_seed(0)).attempts == []


def test_no_more_candidates_are_looked_at_than_the_bound_and_equal_ones_once(monkeypatch):
    model = reference("llama")
    proven, _ = proof(model)
    site = site_of(proven.parts.calls, "model.layers.0.mlp", model.config)
    many = [Candidate("RMSNorm", {"width": literal(n // 2, "a test")}, {}) for n in range(BOUND + 50)]
    monkeypatch.setattr(block, "propose", lambda role, site: many)
    verdict = prove("norm", site, torch.Generator().manual_seed(0))
    assert len(verdict.attempts) == BOUND // 2
    assert not verdict.survivors
    assert verdict.bound == f"the search ended at its bound of {BOUND} candidates; 25 were left untried"
    monkeypatch.setattr(block, "propose", lambda role, site: many[:BOUND])
    assert prove("norm", site, torch.Generator().manual_seed(0)).bound == ""


def test_a_search_that_ends_at_its_bound_says_so_wherever_its_result_is_shown(monkeypatch):
    model = reference("mixtral")
    monkeypatch.setattr(block, "BOUND", 1)
    monkeypatch.setattr(moe, "MOST", 0)  # so that the mixture is not found
    proven, attempts = proof(model)
    assert attempts["model.layers.0.input_layernorm"][0].bound == NORMS_LEFT
    assert attempts["model.layers.0.self_attn"][0].bound == ""
    _, spec = our_logits(model, proven)
    assert NORMS_LEFT in spec.norm.proof.evidence
    ((_, _, why),) = lifted(spec)
    assert why.endswith("; the search ended at its bound of 0 candidates; 1 were left untried")
