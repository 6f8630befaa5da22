"""The loss that trains indexers: zero where scores say what attention does, a gradient for the indexer alone."""

import pytest
import torch
from torch import nn

from dayzero.runtime.nn import (
    BlockIndexer,
    CausalLM,
    CompressedAttention,
    CompressedIndexer,
    Compressor,
    Context,
    DecoderLayer,
    GroupedQueryAttention,
    IndexedAttention,
    LatentAttention,
    LightningIndexer,
    Loop,
    MeanPooledIndexer,
    PooledIndexer,
    Rotary,
)
from dayzero.runtime.nn.context import positions_of
from dayzero.runtime.nn.index_loss import divergence, index_loss, index_losses, train_indexers
from dayzero.runtime.recompute import recompute

HIDDEN = 20


def context(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    position = positions_of(lengths, torch.device("cpu"))
    return Context(bounds, lengths, position, (Rotary(4, 100.0)(position, torch.float64),))


def latent(indexer):
    return LatentAttention(HIDDEN, 4, 5, 4, 6, 7, 0.4, query_rank=8, indexer=indexer)


def grouped(indexer):
    return IndexedAttention(GroupedQueryAttention(HIDDEN, 4, 2, 6, 0.4), indexer)


def compressed():
    compressor = Compressor(HIDDEN, 8, 3, 1e-5, overlap=True)
    indexer = CompressedIndexer(HIDDEN, 8, 2, 2, Compressor(HIDDEN, 6, 3, 1e-5, overlap=True))
    return CompressedAttention(
        HIDDEN, 4, 8, 8, 0.4, 2, 5, 1e-5, 1e-5, 1e-5, window=4, compressor=compressor, indexer=indexer
    )


BLOCKS = {
    "tokens": lambda: latent(LightningIndexer(HIDDEN, 8, 2, 6, 3, 1e-5)),
    "pools": lambda: latent(PooledIndexer(HIDDEN, 8, 2, 6, 4, 2, 1e-5)),
    "blocks": lambda: grouped(BlockIndexer(HIDDEN, 2, 6, 2, 3, 1, 1e-5)),
    "means": lambda: grouped(MeanPooledIndexer(HIDDEN, 2, 6, 4, 2, 1e-5)),
    "entries": compressed,
}


def drawn(block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    block = block.double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return block


def stream(tokens):
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("over", ["all", "selected"])
@pytest.mark.parametrize("name", BLOCKS)
def test_reaches_the_indexer_and_nothing_else(name, over):
    block, x = drawn(BLOCKS[name]()), stream(20)
    plain = block(x, context((13, 7)))
    assert index_losses(block) == []
    train_indexers(block, over)
    torch.testing.assert_close(block(x, context((13, 7))), plain, rtol=0, atol=0)
    (loss,) = index_losses(block)
    assert loss.item() > 0
    loss.backward()
    for path, parameter in block.named_parameters():
        found = parameter.grad is not None and bool(parameter.grad.any())
        assert found == path.startswith("indexer."), path
    train_indexers(block, None)
    block(x, context((13, 7)))
    assert index_losses(block) == []


@pytest.mark.parametrize("name", BLOCKS)
def test_without_the_loss_the_indexer_has_no_gradient(name):
    block = drawn(BLOCKS[name]())
    block(stream(20), context((13, 7))).sum().backward()
    for path, parameter in block.named_parameters():
        assert (parameter.grad is None) == path.startswith("indexer."), path


@pytest.mark.parametrize("name", BLOCKS)
def test_packing_adds_up(name):
    block, x = drawn(BLOCKS[name]()), stream(20)
    train_indexers(block, "all")
    totals = []
    for parts in (((0, 20, (13, 7)),), ((0, 13, (13,)), (13, 20, (7,)))):
        total = 0.0
        for start, stop, lengths in parts:
            block(x[start:stop], context(lengths))
            total += index_losses(block)[0].item()
        totals.append(total)
    assert totals[0] == pytest.approx(totals[1], rel=1e-12)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_step_against_the_gradient_lowers_it(name):
    block, x = drawn(BLOCKS[name]()), stream(20)
    train_indexers(block, "all")
    block(x, context((20,)))
    (loss,) = index_losses(block)
    loss.backward()
    with torch.no_grad():
        for parameter in block.indexer.parameters():
            parameter -= 1e-6 * parameter.grad
    block(x, context((20,)))
    assert index_losses(block)[0] < loss


def test_divergence_by_hand():
    scores = torch.tensor([[[[0.0, torch.log(torch.tensor(3.0)).item(), float("-inf")]]]], dtype=torch.float64)
    weights = torch.tensor([[[[0.25, 0.25, 0.5]]]], dtype=torch.float64)
    candidate = torch.tensor([[[[True, True, False]]]])
    # (1/2, 1/2) against (1/4, 3/4)
    expected = 0.5 * torch.log(torch.tensor(2.0)) + 0.5 * torch.log(torch.tensor(2.0 / 3.0))
    assert divergence(scores, weights, candidate).item() == pytest.approx(expected.item(), rel=1e-6)
    assert divergence(scores, weights, torch.zeros_like(candidate)).item() == 0.0


def test_is_zero_where_scores_are_the_logits():
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(6, 1, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits = (query[:, 0] @ key[:, 0].T * 0.3)[None, None]
    scores = logits.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
    indexer = LightningIndexer(HIDDEN, 8, 2, 6, 3, 1e-5)
    index = torch.zeros(6, 1, 1, dtype=torch.int64)
    assert abs(index_loss([scores], query, key, index, (6,), 0.3, indexer, "all").item()) < 1e-14
    assert index_loss([scores + torch.arange(6.0)], query, key, index, (6,), 0.3, indexer, "all").item() > 0.1
    # One candidate is one distribution, whatever its score.
    assert index_loss([scores * 2], query, key, index, (6,), 0.3, indexer, "selected").item() == 0.0


def looped(again, layers=2, passes=3):
    """A model of layers with indexers that runs them `passes` times; without `again`, of as many layers as runs, each
    with the weights of the one it stands for."""

    def layer(number):
        parts = {"mixer": drawn(BLOCKS["tokens"](), number)}
        return DecoderLayer(parts, {"mixer": "x"}, "x + 0.5 * mixer")

    held = [layer(number) for number in range(layers)]
    stack = held if again else [layer(run % layers) for run in range(layers * passes)]
    loop = Loop(0, layers, passes) if again else None
    model = CausalLM(11, HIDDEN, stack, nn.Identity(), rotaries=[Rotary(4, 100.0)], loop=loop).double()
    with torch.no_grad():
        model.embed.weight.copy_(torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(2)).double())
    return model, stack


@pytest.mark.parametrize("recomputed", [False, True])
def test_every_run_of_a_layer_trains_its_indexer(recomputed):
    """As if the runs were layers of their own, whose indexers have one gradient: that of the sum of their losses."""
    ids, bounds = torch.arange(11), torch.tensor([0, 7, 11])
    (model, layers), (unrolled, runs) = looped(again=True), looped(again=False)
    if recomputed:
        for one in layers:
            recompute(one)
    for one in (model, unrolled):
        train_indexers(one, "all")
        one(ids, bounds)
    found, wanted = index_losses(model), index_losses(unrolled)
    assert (len(found), len(wanted)) == (2, 6)
    torch.testing.assert_close(sum(found), sum(wanted), rtol=1e-12, atol=0)
    assert index_losses(model) == []
    sum(found).backward()
    sum(wanted).backward()
    assert index_losses(model) == []
    for number, one in enumerate(layers):
        every = [run.mixer.indexer for run in runs[number :: len(layers)]]
        for name, parameter in one.mixer.indexer.named_parameters():
            grads = [indexer.get_parameter(name).grad for indexer in every]
            torch.testing.assert_close(parameter.grad, sum(grads), rtol=1e-10, atol=1e-14)
            assert not torch.allclose(parameter.grad, grads[-1], rtol=1e-3)
