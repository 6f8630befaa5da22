"""Layers that run several times: which pass sees what, and gradients that are the sum over passes."""

import pytest
import torch
from drawn import drawn
from torch import nn

from dayzero.runtime.nn import AttentionResidual, CausalLM, DecoderLayer, Loop, MessageGate, Projection, RMSNorm
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.recompute import recompute

HIDDEN, PASSES = 6, 3


def plain(keeps=""):
    reads = {"norm": "x", "ffn": "norm"}
    return DecoderLayer({"norm": RMSNorm(HIDDEN, 1e-5), "ffn": Projection(HIDDEN, HIDDEN)}, reads, "x + ffn", keeps)


def gated(keeps=""):
    """In later passes the norm runs twice: over the stream, and over the stream with a message let in."""
    parts = {"norm": RMSNorm(HIDDEN, 1e-5), "ffn": Projection(HIDDEN, HIDDEN), "gate": MessageGate(HIDDEN, 3, 1e-5)}
    again = {
        "let_in": ("gate", "x, message.1"),
        "norm": ("norm", "let_in"),
        "ffn": ("ffn", "norm"),
        "twice": ("norm", "x + message.0"),
    }
    reads = {"norm": "x", "ffn": "norm"}
    return DecoderLayer(parts, reads, "x + ffn", keeps, again=again, again_gives="x + ffn + 0.5 * twice")


def by_hand(layer, x, message):
    if message is None:
        return x + layer.ffn(layer.norm(x))
    return x + layer.ffn(layer.norm(layer.gate(x, message[1]))) + 0.5 * layer.norm(x + message[0])


def with_messages():
    message = AttentionResidual(HIDDEN, 1e-6, scale=0.4, queries=2, weighted=False, normed_values=True, sets=2)
    layers = [plain(keeps="x"), gated(keeps="x"), gated(keeps="x"), plain()]
    loop = Loop(1, 2, PASSES, restarts=True, message=message)
    merge = AttentionResidual(HIDDEN, 1e-6)
    return drawn(CausalLM(11, HIDDEN, layers, RMSNorm(HIDDEN, 1e-5), history=True, merge=merge, loop=loop))


def its_logits(model, ids):
    first = model.embed(ids)
    before = by_hand(model.layers[0], first, None)
    messages = [None, None]
    for _ in range(PASSES):
        middle = by_hand(model.layers[1], before, messages[0])
        x = by_hand(model.layers[2], middle, messages[1])
        made = model.loop.message(middle, x)  # what the pass kept beside its own input, and what it gave
        messages = [made[:2], made[2:]]
    x = model.layers[3](x, None)
    return model.norm(model.merge(first, before, middle, x)) @ model.head.weight.T


def gradients(model, logits):
    wanted = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(logits, list(named.values()), wanted, allow_unused=True)
    return dict(zip(named, grads, strict=True))


def test_later_passes_restart_and_are_handed_messages():
    model, ids = with_messages(), torch.arange(7)
    got, want = model(ids, torch.tensor([0, 7])), its_logits(model, ids)
    assert torch.allclose(got, want, rtol=1e-12)
    ours, theirs = gradients(model, got), gradients(model, want)
    assert all(grad is not None for grad in ours.values())
    for name, grad in theirs.items():
        assert torch.allclose(ours[name], grad, rtol=1e-10, atol=1e-12), name


def test_recomputed_layers_find_their_messages_again():
    model, ids = with_messages(), torch.arange(7)
    want = gradients(model, model(ids, torch.tensor([0, 7])))
    for layer in model.layers:
        recompute(layer)
    got = gradients(model, model(ids, torch.tensor([0, 7])))
    for name, grad in got.items():
        assert torch.allclose(grad, want[name], rtol=1e-12), name


def test_documents_are_alone():
    model = with_messages()
    packed = model(torch.arange(9), torch.tensor([0, 4, 9]))
    alone = [model(ids, torch.tensor([0, len(ids)])) for ids in (torch.arange(4), torch.arange(4, 9))]
    assert torch.allclose(packed, torch.cat(alone), rtol=1e-12)


def test_a_loop_that_goes_on():
    """Two of three layers, twice: the second pass reads what the first gave."""
    layers = [plain() for _ in range(3)]
    model = CausalLM(11, HIDDEN, layers, RMSNorm(HIDDEN, 1e-5), loop=Loop(1, 2, 2))
    initialise(model, 0.3, 0)
    model = model.double()
    ids = torch.arange(5)
    x = model.embed(ids)
    for number in (0, 1, 2, 1, 2):
        x = by_hand(model.layers[number], x, None)
    assert model.head is not None
    want = model.norm(x) @ model.head.weight.T
    assert torch.allclose(model(ids, torch.tensor([0, 5])), want, rtol=1e-12)


def test_what_is_no_loop():
    with pytest.raises(ValueError, match=r"layers 1 \.\. 2 cannot run 0 times"):
        Loop(1, 2, 0)
    with pytest.raises(ValueError, match="begins where that began"):
        Loop(1, 2, 2, message=nn.Identity())
    with pytest.raises(ValueError, match="b reads c, which is no part before it"):
        DecoderLayer({"a": RMSNorm(6, 1e-5)}, {"a": "x"}, "a", again={"b": ("a", "c")}, again_gives="b")
    with pytest.raises(ValueError, match=r"parts \['a'\] are wired as \['a', 'd'\]"):
        DecoderLayer({"a": RMSNorm(6, 1e-5)}, {"a": "x"}, "a", again={"b": ("d", "x")}, again_gives="b")


def test_a_gate_lets_in_what_it_reads_off_both():
    gate = drawn(MessageGate(HIDDEN, 3, 1e-5))
    x, message = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    normed = [v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() for v in (x, message)]
    read = torch.cat(normed, -1) @ gate.down.weight.T
    forget, take = ((read @ weight.T).tanh() for weight in (gate.forget.weight, gate.take.weight))
    assert torch.allclose(gate(x, message), x - forget * x + take * message, rtol=1e-12)
    gate.reset_parameters(0.1)
    assert torch.equal(gate(x, message), x)
