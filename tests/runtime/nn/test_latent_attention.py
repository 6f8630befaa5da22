"""Latent attention against its equations, packed documents, what layers leave for later ones."""

import pytest
import torch

from dayzero.runtime.nn import Context, LatentAttention, LightningIndexer, PooledIndexer, Rotary
from dayzero.runtime.nn.context import positions_of
from dayzero.runtime.nn.selected_attention import SELECTED

HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK = 20, 3, 5, 4, 6, 7


def context(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    position = positions_of(lengths, torch.device("cpu"))
    return Context(bounds, lengths, position, (Rotary(ROPE, 100.0)(position, torch.float64),))


def drawn(block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    block = block.double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return block


def latent(**more):
    sizes = {"nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE, "kv_rank": RANK, "scale": 0.4}
    return drawn(LatentAttention(HIDDEN, HEADS, **{**sizes, **more}))


def indexer(**more):
    return LightningIndexer(
        HIDDEN, **{"source": 8, "heads": 2, "head_dim": 6, "top_k": 3, "key_norm_eps": 1e-5, **more}
    )


def pooled(**more):
    return PooledIndexer(
        HIDDEN, **{"source": 8, "heads": 2, "head_dim": 6, "top_k": 4, "pool": 2, "key_norm_eps": 1e-5}
    )


def stream(tokens, seed=1):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(block, x):
    """Latent attention of one document, token by token, as the equations say, with half rotation."""

    def norm(v, module):
        return v / (v.pow(2).mean() + module.eps).sqrt() * module.weight

    def turned(v, at):
        angles = at * 100.0 ** -torch.tensor([0.0, 2.0 / ROPE], dtype=torch.float64)
        a, b = v[: ROPE // 2], v[ROPE // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()))

    keys, values, rows = [], [], []
    for at, token in enumerate(x):
        down = block.kv_down.weight @ token
        up = (block.kv_up.weight @ norm(down[:RANK], block.kv_norm)).view(HEADS, NOPE + VALUE)
        keys.append([torch.cat((up[h, :NOPE], turned(down[RANK:], at))) for h in range(HEADS)])
        values.append([up[h, NOPE:] for h in range(HEADS)])
        latent_ = norm(block.query_down.weight @ token, block.query_norm)
        query = (block.query_up.weight @ latent_).view(HEADS, NOPE + ROPE)
        gathered = []
        for h in range(HEADS):
            q = torch.cat((query[h, :NOPE], turned(query[h, NOPE:], at)))
            weights = torch.stack([q @ k[h] * block.scale for k in keys]).softmax(0)
            gathered.append(sum(w * v[h] for w, v in zip(weights, values, strict=True)))
        rows.append(block.output.weight @ torch.cat(gathered))
    return torch.stack(rows)


def test_is_what_the_equations_say():
    block, x = latent(query_rank=8, rotary="half"), stream(6)
    torch.testing.assert_close(block(x, context((6,))), by_definition(block, x), rtol=1e-11, atol=1e-12)


OPTIONS = {
    "direct query": {},
    "no rotation": {"rotary": None},
    "scaled latents": {"query_rank": 8, "query_scale": 1.3, "kv_scale": 0.7},
    "normed key": {"key_norm_eps": 1e-5},
    "head gate": {"gate": "head"},
    "gate from both latents": {"query_rank": 8, "query_from": "both", "gate": "element", "gate_from": "query"},
    "sinks": {"sinks": True},
    "window": {"window": 3},
    "biases": {"query_rank": 8, "latent_bias": True, "output_bias": True},
    "positions": {"position_scale": 0.3, "position_step": 2},
    "learned positions": {"learned_position_scale": True},
    "wide values": {"value_dim": 13},
    "indexer": {"query_rank": 8, "indexer": indexer},
    "indexer without rotation": {"query_rank": 8, "indexer": lambda: indexer(rotary=None)},
    "indexer of the input": {
        "indexer": lambda: indexer(source=HIDDEN, query_norm_eps=1e-5, learned_position_scale=True)
    },
    "pools": {"query_rank": 8, "indexer": pooled},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_documents_are_alone(name):
    options = {key: value() if callable(value) else value for key, value in OPTIONS[name].items()}
    block, x = latent(**options), stream(17)
    whole = block(x, context((9, 1, 7)))
    apart = [block(x[a:b], context((b - a,))) for a, b in ((0, 9), (9, 10), (10, 17))]
    torch.testing.assert_close(whole, torch.cat(apart), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_sees_nothing_that_follows(name):
    options = {key: value() if callable(value) else value for key, value in OPTIONS[name].items()}
    block, x = latent(**options), stream(11)
    before = block(x, context((11,)))
    changed = x.clone()
    changed[7] += 1.0
    after = block(changed, context((11,)))
    torch.testing.assert_close(after[:7], before[:7], rtol=0, atol=0)
    assert not torch.allclose(after[7], before[7])


def test_the_selection_is_left_for_later_layers():
    first, second = latent(query_rank=8, indexer=indexer()), latent(selection_from_earlier=True)
    shared, x = context((9, 5)), stream(14)
    first(x, shared)
    index = shared.shared[SELECTED]
    assert index.shape == (14, 1, 3)
    assert index.dtype == torch.int64
    assert (index[:, 0].max(-1).values <= shared.position).all()
    assert (index[8] >= 0).all()
    assert (index[0] == torch.tensor([0, -1, -1])).all()
    narrow = second(x, shared)
    shared.shared[SELECTED] = torch.arange(9).minimum(shared.position[:, None])[:, None]
    assert not torch.allclose(narrow, second(x, shared))
    torch.testing.assert_close(second(x, shared), latent()(x, shared))
    del shared.shared[SELECTED]
    with pytest.raises(ValueError, match="none was made"):
        second(x, shared)


def test_latents_are_left_with_their_gradient():
    first, second = latent(leaves="a"), latent(takes="a")
    assert not hasattr(second, "kv_down")
    shared, x = context((5,)), stream(5)
    first(x, shared)
    second(x, shared).sum().backward()
    gradients = {name: parameter.grad for name, parameter in first.named_parameters()}
    for name in ("kv_down.weight", "kv_norm.weight"):
        found = gradients[name]
        assert found is not None
        assert found.abs().min() > 0
    shared.shared.clear()
    with pytest.raises(ValueError, match="no earlier layer left them"):
        second(x, shared)


def test_deinterleaving_cannot_be_seen_from_outside():
    one, two = latent(rotary="interleaved"), latent(rotary="deinterleaved")
    x = stream(8)
    torch.testing.assert_close(one(x, context((8,))), two(x, context((8,))), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(one(x, context((8,))), latent(rotary="half")(x, context((8,))))


def test_impossible_arguments():
    with pytest.raises(ValueError, match="needs query_rank"):
        latent(query_from="both")
    with pytest.raises(ValueError, match="not both"):
        latent(query_rank=8, indexer=indexer(), selection_from_earlier=True)
    with pytest.raises(ValueError, match="no such rotary tables"):
        latent(table=1)(stream(3), context((3,)))
