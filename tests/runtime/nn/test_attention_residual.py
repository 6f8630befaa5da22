import pytest
import torch
from drawn import drawn

from dayzero.runtime.nn import AttentionResidual, DecoderLayer, RMSNorm
from dayzero.runtime.recompute import recompute

GENERATOR = torch.Generator().manual_seed(0)


def states(count, tokens=5, hidden=8):
    return [torch.randn(tokens, hidden, generator=GENERATOR, dtype=torch.float64) for _ in range(count)]


def rms(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def test_keys_with_a_learned_norm_weight_and_raw_values():
    """softmax_i(sum(rms(v_i) * weight * query)) over raw v_i, without a scale."""
    block, held = drawn(AttentionResidual(8, 1e-6)), states(4)
    scores = torch.stack([(rms(v) * block.norm.weight * block.query).sum(-1) for v in held])
    want = sum(weight[:, None] * v for weight, v in zip(scores.softmax(0), held, strict=True))
    assert torch.allclose(block(*held), want, rtol=1e-12)


def test_normed_values_a_scale_and_several_queries():
    block = drawn(AttentionResidual(8, 1e-6, scale=0.25, queries=3, weighted=False, normed_values=True))
    held = states(3)
    got = block(*held)
    assert [name for name, _ in block.named_parameters()] == ["query"]
    assert len(got) == 3
    for query, mixed in zip(block.query, got, strict=True):
        scores = torch.stack([0.25 * (rms(v) * query).sum(-1) for v in held])
        want = sum(weight[:, None] * rms(v) for weight, v in zip(scores.softmax(0), held, strict=True))
        assert torch.allclose(mixed, want, rtol=1e-12)


def test_of_one_state_the_mixture_is_that_state_and_the_query_gets_no_gradient():
    block, (state,) = drawn(AttentionResidual(8, 1e-6)), states(1)
    got = block(state)
    got.sum().backward()
    assert torch.equal(got, state)
    assert not block.query.grad.any()


def test_each_token_by_itself():
    block, held = drawn(AttentionResidual(8, 1e-6, scale=0.5)), states(3, tokens=7)
    apart = torch.cat([block(*(v[:4] for v in held)), block(*(v[4:] for v in held))])
    assert torch.equal(block(*held), apart)


def test_it_computes_in_float32_and_gives_what_it_was_given():
    block = AttentionResidual(8, 1e-6).bfloat16()
    torch.nn.init.ones_(block.query)
    torch.nn.init.ones_(block.norm.weight)
    held = [v.bfloat16() for v in states(3)]
    got = block(*held)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, block.float()(*(v.float() for v in held)).bfloat16())


def layer(keeps=""):
    parts = {
        "mixer_input": AttentionResidual(8, 1e-6),
        "mixer_norm": RMSNorm(8, 1e-6),
        "mixer": torch.nn.Linear(8, 8),
        "ffn_input": AttentionResidual(8, 1e-6),
        "ffn": torch.nn.Linear(8, 8),
    }
    reads = {"mixer_input": "past, x", "mixer_norm": "mixer_input", "mixer": "mixer_norm", "ffn": "ffn_input"}
    reads["ffn_input"] = "past, x, mixer" if keeps else "past, x + mixer"
    order = list(parts)
    gives = "mixer + ffn" if keeps else "x + mixer + ffn"
    return drawn(DecoderLayer(parts, {name: reads[name] for name in order}, gives, keeps))


def test_a_layer_that_begins_a_block_keeps_its_input_and_starts_anew():
    made, (x,) = layer(keeps="x"), states(1)
    kept, given = made((x,), None)
    y = made.mixer(made.mixer_norm(x))
    assert kept is x
    assert torch.allclose(given, y + made.ffn(made.ffn_input(x, y)), rtol=1e-12)


def test_a_layer_inside_a_block_adds_to_the_stream_and_reads_what_was_kept():
    made, (a, b, x) = layer(), states(3)
    first, second, given = made((a, b, x), None)
    y = made.mixer(made.mixer_norm(made.mixer_input(a, b, x)))
    assert (first is a, second is b) == (True, True)
    assert torch.allclose(given, x + y + made.ffn(made.ffn_input(a, b, x + y)), rtol=1e-12)


def test_recomputed_layers_give_the_same_gradients():
    layers = [layer(keeps="x"), layer(), layer(keeps="x"), layer()]
    merge = drawn(AttentionResidual(8, 1e-6))
    (x,) = states(1)

    def gradients():
        start = x.clone().requires_grad_(True)
        stream = (start,)
        for made in layers:
            stream = made(stream, None)
        assert len(stream) == 3
        parameters = [parameter for made in (*layers, merge) for parameter in made.parameters()]
        return torch.autograd.grad(merge(*stream).square().sum(), [start, *parameters], materialize_grads=True)

    plain = gradients()
    for made in layers:
        recompute(made)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        ({"a": "past + x"}, "adds to past"),
        ({"a": "x, b"}, "reads b, which is no part before it"),
        ({"a": "x.y"}, "not a sum of named values"),
    ],
)
def test_wirings_that_are_none(reads, says):
    with pytest.raises(ValueError, match=says):
        DecoderLayer({"a": AttentionResidual(8, 1e-6)}, reads, "x + a")
