"""Mixtures of experts in transformers' own models, and in one whose names mean nothing, are proven on our blocks; their
arguments come from what the modules read, so that they follow a changed config; almost right is not proven."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import families

from dayzero.onboard.candidates import site_of
from dayzero.onboard.candidates.evidence import Site
from dayzero.onboard.candidates.routing import routing_call
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import Call, record_calls
from dayzero.onboard.prove.block import TOLERANCE, prove, relative_error
from dayzero.onboard.prove.contradiction import contradiction
from dayzero.runtime.nn import Experts, MixtureOfExperts


def model_of(family, **changes):
    config = families.config(family)
    inner = config.get("text_config", config)
    inner.update(changes)
    model, _ = reference.build(config)
    reference.redraw(model, torch.Generator().manual_seed(0))
    return model


def calls_of(model, rows=2):
    ids = torch.randint(3, 100, (rows, 24), generator=torch.Generator().manual_seed(1))
    calls, _ = record_calls(model, ids)
    return calls


def site_in(family, path, rows=2, **changes):
    model = model_of(family, **changes)
    return site_of(calls_of(model, rows), path, reference.text_config(model))


@functools.cache
def proof(family, path, **changes):
    site = site_in(family, path, **changes)
    return site, prove("ffn", site, torch.Generator().manual_seed(2))


def best(family, path, **changes):
    site, verdict = proof(family, path, **changes)
    assert verdict.survivors, [attempt.objection for attempt in verdict.attempts[:3]]
    assert verdict.survivors[0].error <= TOLERANCE
    return verdict.survivors[0].candidate.spec(site.module, site.config)


def test_groups_bias_scale_and_shared():
    spec = best("deepseek_v3", "model.layers.1.mlp")
    router = spec.arguments["router"].arguments
    assert spec.arguments["shared"].block == "GatedFeedForward"
    assert (router["score"], router["scored"], router["selection_bias"], router["scale"]) == (
        "sigmoid",
        "all",
        True,
        2.5,
    )
    assert router["limit"].arguments == {"groups": 3, "kept": 2, "by": "top2", "zero_fill": False}
    assert router["normalise"].arguments == {"eps": 1e-20}


def test_top_k_before_softmax_biases_and_interleaved_rows():
    spec = best("gpt_oss", "model.layers.0.mlp")
    assert spec.arguments["router"].arguments["scored"] == "selected"
    assert spec.arguments["router"].arguments["logit_bias"] is True
    assert spec.arguments["experts"].arguments["bias"] is True
    assert spec.arguments["experts"].arguments["act"].model_dump(exclude={"proof"}) == {
        "block": "OaiSwiGLU",
        "arguments": {"alpha": 1.702, "limit": 7.0},
    }


@pytest.mark.parametrize(
    ("family", "path", "expected"),
    [
        ("longcat_flash", "model.layers.0.mlp", {"spare": "identity"}),
        ("llama4", "model.layers.1.feed_forward", {"weigh": "input"}),
        ("qwen3_5_moe", "model.layers.0.mlp", {"shared_gate": True}),
        ("jetmoe", "model.layers.0.mlp", {"bias": True}),
    ],
)
def test_what_is_special(family, path, expected):
    arguments = best(family, path).arguments
    assert {name: arguments[name] for name in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "path", "router"),
    [
        ("deepseek_v4", "model.layers.0.mlp", "HashRouter"),
        ("inkling", "model.layers.1.mlp", "JointRouter"),
        ("phimoe", "model.layers.0.mlp", "SparseMixerRouter"),
        ("zaya", "model.layers.1.mlp", "CarriedRouter"),
        ("switch_transformers", "encoder.block.1.layer.1.mlp", "TopOneRouter"),
    ],
)
def test_odd_routers(family, path, router):
    assert best(family, path).arguments["router"].block == router


@pytest.mark.parametrize(("experts", "keys"), [(25, 5), (12, 3)])
def test_product_keys_of_one_document(experts, keys):
    """The reference mixes the rows of a batch; a batch of one row is a document."""
    spec = best("doge", "model.layers.0.mlp", rows=1, num_experts=experts)
    router = spec.arguments["router"]
    assert (router.block, router.arguments["experts"]) == ("ProductKeyRouter", experts)
    assert spec.build().router.weight.shape == (2 * keys, 80)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("dbrx", "transformer.blocks.0.ffn"),
        ("muse_spark", "model.language_model.layers.1.mlp"),
        ("nemotron_h", "model.layers.1.mixer"),
        ("step3p7", "model.language_model.layers.3.mlp"),
        ("axk1", "model.layers.1.mlp"),
        ("beam", "model.layers.1.mlp"),
        ("cohere2_moe", "model.layers.1.mlp"),
        ("ernie4_5_vl_moe", "model.language_model.layers.1.mlp"),
        ("inkling2", "model.layers.0.mlp"),
    ],
)
def test_others(family, path):
    spec = best(family, path)
    assert spec.block == "MixtureOfExperts"
    assert spec.arguments["experts"].block == "Experts"


@pytest.mark.parametrize(
    ("family", "path", "changes"),
    [
        ("deepseek_v3", "model.layers.1.mlp", {"n_group": 5, "topk_group": 1}),
        ("deepseek_v3", "model.layers.1.mlp", {"topk_group": 1}),
        ("deepseek_v3", "model.layers.1.mlp", {"norm_topk_prob": False}),
        ("deepseek_v3", "model.layers.1.mlp", {"routed_scaling_factor": 0.3}),
        ("deepseek_v3", "model.layers.1.mlp", {"num_experts_per_tok": 3}),
        ("gpt_oss", "model.layers.0.mlp", {"swiglu_limit": 0.4}),
        ("gpt_oss", "model.layers.0.mlp", {"swiglu_alpha": 0.4}),
        ("nemotron_h", "model.layers.1.mixer", {"routed_scaling_factor": 3.5}),
    ],
)
def test_the_evidence_follows_a_changed_config(family, path, changes):
    candidate = proof(family, path)[1].survivors[0].candidate
    site = site_in(family, path, **changes)
    block = candidate.spec(site.module, site.config).build().to(torch.float64)
    block.load_state_dict(candidate.values(reference.state_of(site.module)))
    with torch.no_grad():
        ours = block(site.call.hidden.flatten(0, -2), site.context)
        before = candidate.spec(proof(family, path)[0].module, proof(family, path)[0].config)
    assert relative_error(ours, site.usual.reshape(ours.shape)) <= TOLERANCE
    assert candidate.spec(site.module, site.config) != before


def test_a_router_beside_its_experts():
    model = model_of("gemma4")
    calls = calls_of(model)
    path = next(path for path in calls if path.endswith("layers.0.router"))
    routing = routing_call(calls[path], 15)
    assert routing is not None
    calls[path] = routing
    config = reference.text_config(model)
    verdict = prove("routing", site_of(calls, path, config), torch.Generator().manual_seed(2))
    assert [attempt.candidate.block for attempt in verdict.survivors] == ["LeaveRouting"]
    verdict = prove("ffn", site_of(calls, path.replace("router", "experts"), config), torch.Generator().manual_seed(2))
    site = site_of(calls, path.replace("router", "experts"), config)
    (survivor,) = verdict.survivors
    assert survivor.candidate.spec(site.module, config).arguments["router"].block == "HandedRouting"


def test_a_reference_that_contradicts_itself_is_noticed_and_not_fitted():
    model = model_of("nllb_moe")
    site = site_of(calls_of(model), "model.decoder.layers.1.ffn", reference.text_config(model))
    assert not prove("ffn", site, torch.Generator().manual_seed(2)).survivors
    found = contradiction(site)
    assert found is not None
    assert "only 0, 1 have any effect" in found
    assert contradiction(proof("switch_transformers", "encoder.block.1.layer.1.mlp")[0]) is None


class Qux(nn.Module):
    """Experts under names that mean nothing: rows of gate and up alternate, in and out are transposed."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.empty(9, 20, 14)), nn.Parameter(torch.empty(9, 7, 20))

    def forward(self, a, b, c):
        joint = torch.einsum("th,ehf->tef", a, self.p)
        inner = F.silu(joint[..., 0::2].clamp(max=1.5)) * joint[..., 1::2].clamp(-1.5, 1.5)
        every = torch.einsum("tef,efh->teh", inner, self.q)
        return (every.gather(1, b[..., None].expand(-1, -1, 20)) * c[..., None]).sum(1)


class Zog(nn.Module):
    """The router: twist says what is subtly different."""

    v: torch.Tensor

    def __init__(self, twist):
        super().__init__()
        self.w, self.twist, self.k, self.z = nn.Parameter(torch.empty(9, 20)), twist, 3, 1.75
        self.register_buffer("v", torch.zeros(9))

    def forward(self, a):
        scores = torch.sigmoid(F.linear(a, self.w))
        index = torch.topk(scores + self.v, self.k, dim=-1).indices
        weights = (scores + self.v if self.twist == "bias in the weight" else scores).gather(-1, index)
        if self.twist != "no normalisation":
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-12)
        return index, weights * self.z


class Foo(nn.Module):
    def __init__(self, twist=""):
        super().__init__()
        self.one, self.two = Zog(twist), Qux()

    def forward(self, a):
        flat = a.reshape(-1, 20)
        index, weights = self.one(flat)
        return self.two(flat, index, weights).reshape(a.shape)


def site_of_foo(twist):
    module = Foo(twist).to(torch.float64).requires_grad_(True)
    reference.redraw(module, torch.Generator().manual_seed(0))
    found = {}
    for path, inner in module.named_modules():

        def hook(inner, args, kwargs, output, path=path):
            found[path] = Call(path, inner, args, kwargs, output)

        inner.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        module(torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64))

    class Config:
        def to_dict(self):
            return {}

    calls = dict(found)
    for inner in module.modules():
        inner._forward_hooks.clear()
        inner._forward_hooks_with_kwargs.clear()
    return Site(calls.pop(""), calls, Config())


def test_names_do_not_matter():
    site = site_of_foo("")
    (survivor,) = prove("ffn", site, torch.Generator().manual_seed(2)).survivors
    spec = survivor.candidate.spec(site.module, site.config)
    block = spec.build()
    assert isinstance(block, MixtureOfExperts)
    assert isinstance(block.experts, Experts)
    assert spec.arguments["router"].arguments["scale"] == 1.75
    assert spec.arguments["experts"].arguments["act"].arguments["limit"] == 1.5
    assert "router.scale from attribute one.z" in survivor.candidate.describe()
    assert "router.top_k from attribute one.k" in survivor.candidate.describe()


def test_a_normalisation_that_is_not_there_is_not_claimed():
    site = site_of_foo("no normalisation")
    (survivor,) = prove("ffn", site, torch.Generator().manual_seed(2)).survivors
    assert "normalise" not in survivor.candidate.spec(site.module, site.config).arguments["router"].arguments


def test_a_bias_in_the_weight_is_not_proven():
    assert not prove("ffn", site_of_foo("bias in the weight"), torch.Generator().manual_seed(2)).survivors
