"""The loss in chunks against the loss of all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from dayzero.runtime.loss import Head, summed_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 23, 6, 11


def inputs(dtype=torch.float64, bias=False, tokens=TOKENS):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    shift = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    labels = torch.randint(0, VOCABULARY - 2, (tokens,), generator=generator)
    labels[::5] = -100
    return x, weight, shift, labels


def loss_and_gradients(x, weight, bias, labels, chunk, factor=0.37, **head):
    leaves = [held.clone().requires_grad_() for held in (x, weight, bias) if held is not None]
    made = Head(leaves[1], leaves[2] if bias is not None else None, **head)
    loss = summed_cross_entropy(leaves[0], made, labels, chunk)
    (loss * factor).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("chunk", [1, 4, 22, 23, 100])
@pytest.mark.parametrize(
    "head",
    [{}, {"scale": 0.3, "softcap": 2.0}, {"rows": VOCABULARY - 2}, {"bias": True}],
    ids=["plain", "scaled and capped", "padded rows", "bias"],
)
def test_chunks_change_neither_loss_nor_gradients(chunk, head):
    settings = {name: value for name, value in head.items() if name != "bias"}
    given = inputs(bias="bias" in head)
    whole = loss_and_gradients(*given, None, **settings)
    for got, want in zip(loss_and_gradients(*given, chunk, **settings), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_whole_loss_is_the_sum_that_torch_gives():
    x, weight, _, labels = inputs()
    want = F.cross_entropy(x @ weight.T, labels, reduction="sum", ignore_index=-100)
    torch.testing.assert_close(summed_cross_entropy(x, Head(weight), labels, 4), want)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("labelled", [0, 1, 9, TOKENS])
def test_only_rows_with_a_label_cost_anything(labelled, chunk):
    """Forward and both gradients are three products of [rows, H, V]."""
    x, weight, _, labels = inputs()
    labels = labels.clamp(min=0)
    labels[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))[labelled:]] = -100
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with FlopCounterMode(display=False) as flops:
        summed_cross_entropy(leaves[0], Head(leaves[1]), labels, chunk).backward()
    assert flops.get_total_flops() == 3 * 2 * labelled * HIDDEN * VOCABULARY
    assert not leaves[0].grad[labels == -100].any()
    want = F.cross_entropy(x @ weight.T, labels, reduction="sum", ignore_index=-100)
    torch.testing.assert_close(summed_cross_entropy(*leaves[:1], Head(leaves[1]), labels, chunk), want)


def test_a_frozen_head_has_no_gradient_and_evaluation_none_at_all():
    x, weight, _, labels = inputs()
    leaf = x.clone().requires_grad_()
    summed_cross_entropy(leaf, Head(weight), labels, 4).backward()
    assert weight.grad is None
    torch.testing.assert_close(leaf.grad, loss_and_gradients(x, weight, None, labels, None, factor=1.0)[1])
    with torch.no_grad():
        assert not summed_cross_entropy(leaf, Head(weight), labels, 4).requires_grad


def test_the_head_s_gradient_is_summed_in_float32():
    x, weight, _, labels = inputs(torch.bfloat16, tokens=600)
    exact = loss_and_gradients(x.double(), weight.double(), None, labels, None, 1.0)[2]
    ours = loss_and_gradients(x, weight, None, labels, 1, 1.0)[2]
    rounded = torch.zeros_like(weight)
    for t in range(600):
        rounded += loss_and_gradients(x[t : t + 1], weight, None, labels[t : t + 1], None, 1.0)[2]
    errors = [float((grad.double() - exact).norm() / exact.norm()) for grad in (ours, rounded)]
    assert ours.dtype == torch.bfloat16
    assert errors[0] < 0.5 * errors[1]


def test_logits_exist_for_one_chunk_only():
    """No tensor of [T, V] is kept for the backward pass."""
    x, weight, _, labels = inputs()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda held: seen.append(held.shape) or held, lambda held: held):
        summed_cross_entropy(x.requires_grad_(), Head(weight.requires_grad_()), labels, 4)
    assert max(shape.numel() for shape in seen) == VOCABULARY * HIDDEN  # the head; logits of 4 tokens are fewer


def test_a_second_backward_is_refused():
    x, weight, _, labels = inputs()
    loss = summed_cross_entropy(x.requires_grad_(), Head(weight), labels, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()
