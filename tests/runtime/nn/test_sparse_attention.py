"""Attention to what is chosen: packed documents stay apart, nothing is seen that follows, choices are as described."""

import pytest
import torch

from dayzero.runtime.nn import (
    BlockIndexer,
    CompressedAttention,
    CompressedIndexer,
    Compressor,
    Context,
    GroupedQueryAttention,
    IndexedAttention,
    LatentAttention,
    MeanPooledIndexer,
    Rotary,
)
from dayzero.runtime.nn.context import positions_of
from dayzero.runtime.nn.indexer import chosen
from dayzero.runtime.nn.pooled_indexer import best_pools, complete, tokens_of
from dayzero.runtime.nn.selected_attention import SELECTED, attend_selected

HIDDEN = 20
MINUS = float("-inf")


def context(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    position = positions_of(lengths, torch.device("cpu"))
    return Context(bounds, lengths, position, (Rotary(4, 100.0)(position, torch.float64),))


def grouped(indexer):
    return IndexedAttention(GroupedQueryAttention(HIDDEN, 4, 2, 6, 0.4, sinks=True, gate="sigmoid"), indexer)


def compressed(overlap=True, indexed=True, window=4):
    indexer = CompressedIndexer(HIDDEN, 8, 2, 2, Compressor(HIDDEN, 6, 3, 1e-5, overlap))
    compressor = Compressor(HIDDEN, 8, 3, 1e-5, overlap)
    return CompressedAttention(
        HIDDEN,
        4,
        8,
        8,
        0.4,
        2,
        5,
        1e-5,
        1e-5,
        1e-5,
        window,
        compressor=compressor,
        indexer=indexer if indexed else None,
    )


BLOCKS = {
    "blocks": lambda: grouped(BlockIndexer(HIDDEN, 2, 6, 2, 3, 1, 1e-5)),
    "means": lambda: grouped(MeanPooledIndexer(HIDDEN, 2, 6, 4, 2, 1e-5)),
    "entries that are chosen": compressed,
    "all entries": lambda: compressed(overlap=False, indexed=False),
    "only a window": lambda: CompressedAttention(HIDDEN, 4, 8, 8, 0.4, 2, 5, 1e-5, 1e-5, window=4),
}


def drawn(block):
    generator = torch.Generator().manual_seed(0)
    block = block.double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return block


def stream(tokens):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", BLOCKS)
def test_packed_documents_are_alone(name):
    block, x = drawn(BLOCKS[name]()), stream(26)
    whole = block(x, context((13, 2, 11)))
    apart = [block(x[a:b], context((b - a,))) for a, b in ((0, 13), (13, 15), (15, 26))]
    torch.testing.assert_close(whole, torch.cat(apart), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", BLOCKS)
def test_sees_nothing_that_follows(name):
    block, x = drawn(BLOCKS[name]()), stream(16)
    before = block(x, context((16,)))
    for at in (6, 11, 15):
        changed = x.clone()
        changed[at] += 1.0
        after = block(changed, context((16,)))
        torch.testing.assert_close(after[:at], before[:at], rtol=0, atol=0)
        assert not torch.allclose(after[at], before[at])


def test_entries_reach_beyond_the_window():
    alone, more = drawn(BLOCKS["only a window"]()), drawn(compressed(indexed=False))
    for block, seen in ((alone, False), (more, True)):
        x = stream(16).requires_grad_()
        (grad,) = torch.autograd.grad(block(x, context((16,)))[15].sum(), x)
        assert bool(grad[2].any()) == seen
        assert bool(grad[13].any())


def test_an_indexed_layer_leaves_its_choice():
    block, here = drawn(BLOCKS["blocks"]()), context((13, 7))
    block(stream(20), here)
    index = here.shared[SELECTED]
    assert index.shape == (20, 2, 2)
    # The token's own block is always among the two; the first block of a document is all that its first tokens have.
    own = (here.position // 3)[:, None, None]
    assert (index == own).any(-1).all()
    assert (index[:3] == torch.tensor([0, -1])).all()


def test_the_best_units_by_hand():
    scores = torch.tensor([[[[3.0, MINUS, MINUS], [1.0, 2.0, MINUS], [1.0, 3.0, 2.0]]]])
    assert chosen(scores, 2, 4).tolist() == [[[[0, -1, -1, -1]], [[1, 0, -1, -1]], [[1, 2, -1, -1]]]]


def test_pools_by_hand():
    ready = complete(7, 2, torch.device("cpu"))
    assert ready.sum(-1).tolist() == [0, 1, 1, 2, 2, 3, 3]
    scores = torch.tensor([5.0, 1.0, 9.0]).expand(7, 3).masked_fill(~ready, MINUS)[None, None]
    pools = best_pools(scores, 2)
    assert pools[0].tolist() == [[-1, -1], [0, -1], [0, -1], [0, 1], [0, 1], [2, 0], [2, 0]]
    assert torch.equal(best_pools(scores, 2, pool=2).sort().values, pools.sort().values)
    tokens = tokens_of([pools], 2, tail=True)
    assert tokens.shape == (7, 1, 5)
    seen = [sorted(set(row) - {-1}) for row in tokens[:, 0].tolist()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 4, 5], [0, 1, 4, 5, 6]]
    assert tokens_of([pools], 2, tail=False).shape == (7, 1, 4)


def test_attention_to_an_index_by_hand():
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(5, 2, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    index = torch.tensor([[0, -1], [0, 1], [2, 0], [1, 3], [4, 4]])[:, None]
    found = attend_selected(query, key, value, (5,), 0.7, index)
    for token, row in enumerate(index[:, 0].tolist()):
        keys = sorted(set(row) - {-1})
        for head in range(2):
            weights = (key[keys, head] @ query[token, head] * 0.7).softmax(0)
            torch.testing.assert_close(found[token, head], weights @ value[keys, head], rtol=1e-12, atol=1e-13)


def test_a_token_without_a_choice_attends_to_itself():
    query = torch.ones(3, 1, 2, dtype=torch.float64)
    value = torch.arange(6, dtype=torch.float64).view(3, 1, 2)
    index = torch.full((3, 1, 2), -1)
    torch.testing.assert_close(attend_selected(query, query, value, (3,), 1.0, index), value)


def test_no_tokens_at_all():
    for make in BLOCKS.values():
        assert drawn(make())(stream(0), context(())).shape == (0, HIDDEN)


def test_a_token_that_nothing_is_chosen_for_sees_itself_or_all_alike():
    query, key, value = (torch.randn(5, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    index = torch.tensor([-1, 0, 1, -1, 3]).view(5, 1, 1)  # documents of 3 and 2 tokens; 3 is of neither
    index[4] = 0
    alone = attend_selected(query, key, value, (3, 2), 0.5, index)
    everything = attend_selected(query, key, value, (3, 2), 0.5, index, unseeing="all")
    torch.testing.assert_close(alone[[0, 3]], value[[0, 3]])
    torch.testing.assert_close(everything[0], value[:3].mean(0))
    torch.testing.assert_close(everything[3], value[3:].mean(0))
    torch.testing.assert_close(everything[[1, 2, 4]], alone[[1, 2, 4]])
    # The scores of such a token are lost in its output, but not in its gradient.
    assert bool(torch.autograd.grad(everything[0].sum(), query)[0][0].any())
    with pytest.raises(ValueError, match="attends to itself only"):
        LatentAttention(HIDDEN, 2, 4, 0, 4, 6, 0.5, sinks=True, unseeing="all")
