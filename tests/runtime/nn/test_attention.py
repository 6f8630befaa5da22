"""Every option of grouped-query attention does what it says, and packing changes nothing."""

import pytest
import torch
from torch import Tensor

from dayzero.runtime.nn import GroupedQueryAttention
from dayzero.runtime.nn.context import Context, lengths_of, positions_of
from dayzero.runtime.nn.rotary import Rotary

BASE = {"hidden": 10, "heads": 4, "kv_heads": 2, "head_dim": 6, "scale": 0.4}
OPTIONS = {
    "plain": {},
    "no positions": {"rotary": None},
    "interleaved": {"rotary": "interleaved"},
    "last channels": {"rotary_last": True, "table": 1},
    "partial": {"table": 1},
    "bias": {"bias": True, "output_bias": True},
    "head norms": {"qk_norm": "head", "qk_norm_eps": 1e-5, "qk_norm_offset": 1.0},
    "norms after": {"qk_norm": "head", "qk_norm_eps": 1e-5, "qk_norm_after_rotary": True},
    "norms without weight": {"qk_norm": "head", "qk_norm_eps": 1e-5, "qk_norm_scaled": False},
    "whole norms": {"qk_norm": "whole", "qk_norm_eps": 1e-5},
    "value norm": {"value_norm_eps": 1e-5},
    "output norm": {"output_norm_eps": 1e-5},
    "value dim": {"value_dim": 3},
    "wide values": {"value_dim": 8},
    "values are keys": {"value_is_key": True, "qk_norm": "head"},
    "narrow output": {"out": 7},
    "factors": {"query_factor": 1.5, "key_factor": 0.5, "value_factor": 2.0},
    "window": {"window": 3},
    "chunk": {"chunk": 4},
    "both ways": {"causal": False},
    "clip": {"clip": 0.3},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "gate": {"gate": "sigmoid"},
    "head gate": {"gate": "softplus", "gate_per_head": True},
    "biased gate": {"gate": "sigmoid", "gate_bias": True},
    "step_log": {"query_scale": "step_log", "query_scale_factor": 0.5, "query_scale_length": 2.0},
    "log": {"query_scale": "log", "query_scale_factor": 0.5, "query_scale_length": 2.0},
}


def block(**options) -> GroupedQueryAttention:
    made = GroupedQueryAttention(**{**BASE, **options}).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return made


def context(*lengths: int) -> Context:
    bounds = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    position = positions_of(lengths_of(bounds, sum(lengths)), bounds.device)
    tables = tuple(Rotary(dim, 50.0)(position, torch.float64) for dim in (6, 4))
    return Context(bounds, lengths, position, tables)


def inputs(tokens: int) -> Tensor:
    return torch.randn(tokens, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def agrees(got, want):
    return bool(torch.linalg.vector_norm(got - want) <= 1e-12 * torch.linalg.vector_norm(want))


@pytest.mark.parametrize("option", OPTIONS)
def test_packed_documents_are_what_they_are_alone(option):
    made, x = block(**OPTIONS[option]), inputs(14)
    packed = made(x, context(9, 5))
    assert packed.shape == (14, OPTIONS[option].get("out", 10))
    assert agrees(packed[:9], made(x[:9], context(9)))
    assert agrees(packed[9:], made(x[9:], context(5)))
    assert option != "plain" or agrees(packed, made(x, context(9, 5)))


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in {"plain", "narrow output"}])
def test_every_option_changes_the_output(option):
    made, plain = block(**OPTIONS[option]), block()
    shared = {name: value for name, value in made.state_dict().items() if name in plain.state_dict()}
    shared = {name: value for name, value in shared.items() if plain.state_dict()[name].shape == value.shape}
    plain.load_state_dict(shared, strict=False)
    x = inputs(14)
    assert not agrees(made(x, context(9, 5)), plain(x, context(9, 5)))


@pytest.mark.parametrize("option", OPTIONS)
def test_the_future_is_not_seen(option):
    if option == "both ways":
        pytest.skip("sees what follows")
    made, x = block(**OPTIONS[option]), inputs(9)
    changed = x.clone()
    changed[6:] += 1
    before, after = made(x, context(9)), made(changed, context(9))
    assert torch.equal(before[:6], after[:6])
    assert not agrees(before[6:], after[6:])


def test_every_parameter_is_used_and_reset():
    made = GroupedQueryAttention(
        **BASE, qk_norm="head", bias=True, output_bias=True, sinks=True, gate="sigmoid", gate_bias=True
    ).double()
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for module in made.modules():
            if hasattr(module, "reset_parameters") and not isinstance(module, torch.nn.Linear):
                module.reset_parameters(0.5)
    made(inputs(9), context(9)).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in made.named_parameters()}
    zero = [name for name, grad in gradients.items() if grad is None or not bool((grad.abs() > 1e-10).any())]
    assert zero == ["key.bias"] or zero == []
    assert set(made.parallel_roles) >= {name.split(".")[0] for name in gradients}


def test_a_query_scale_can_be_handed():
    made, x = block(query_scale="handed"), inputs(9)
    here = context(9)
    here.shared["query_scale"] = torch.full((9,), 1.5, dtype=torch.float64)
    assert agrees(made(x, here), block(query_factor=1.5)(x, context(9)))
    with pytest.raises(ValueError, match="hands nothing"):
        made(x, context(9))


def test_sinks_take_what_is_missing_from_the_sum():
    made, x = block(sinks=True, rotary=None, value_norm_eps=None), inputs(9)
    with torch.no_grad():
        made.sinks.fill_(-1e9)
    assert agrees(made(x, context(9)), _without_sinks(made)(x, context(9)))
    with torch.no_grad():
        made.sinks.fill_(60.0)
    assert float(made(x, context(9)).detach().norm()) <= 1e-15


def _without_sinks(made):
    plain = block(rotary=None)
    plain.load_state_dict({name: value for name, value in made.state_dict().items() if name != "sinks"})
    return plain


@pytest.mark.parametrize("option", ["plain", "head norms", "norms after", "window", "step_log"])
def test_keys_and_values_are_taken_from_the_layer_that_left_them(option):
    first, second = block(**OPTIONS[option], leaves="a"), block(**OPTIONS[option], takes="a")
    assert {name for name, _ in second.named_children()} == {name for name, _ in first.named_children()} - {
        "key", "value", "key_norm",
    }  # fmt: skip
    second.load_state_dict({name: value for name, value in first.state_dict().items() if name in second.state_dict()})
    shared, x = context(9, 5), inputs(14)
    assert torch.equal(first(x, shared), block(**OPTIONS[option])(x, context(9, 5)))
    assert torch.equal(second(x, shared), first(x, shared))  # of the same input, with the same weights
    (grad,) = torch.autograd.grad(second(x * 2, shared).sum(), [first.value.weight])
    assert grad.abs().min() > 0
    with pytest.raises(ValueError, match="takes keys and values 'a', but no earlier layer left them"):
        second(x, context(9, 5))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="neither left nor made"):
        block(leaves="a", takes="b")
    with pytest.raises(ValueError, match="4 heads cannot share 3"):
        GroupedQueryAttention(**{**BASE, "kv_heads": 3})
    with pytest.raises(ValueError, match="cannot be the keys"):
        GroupedQueryAttention(**BASE, value_is_key=True, value_dim=3)
    with pytest.raises(ValueError, match="no such rotary tables"):
        block(table=2)(inputs(9), context(9))
