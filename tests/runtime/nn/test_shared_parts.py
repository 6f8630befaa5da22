"""Parts that several layers share, what was kept of the stream, and values side by side."""

import pytest
import torch
from torch import nn

from dayzero.runtime.nn import CausalLM, DecoderLayer, Projection, RMSNorm, SideBySide
from dayzero.runtime.nn.causal_lm import initialise

HIDDEN = 6


class Doubled(nn.Module):
    """Counts its uses: multiplies by 1 + use."""

    uses_context = True

    def __init__(self):
        super().__init__()
        self.inner = Projection(HIDDEN, HIDDEN)
        self.seen: list[int] = []

    def forward(self, x, context):
        self.seen.append(context.use)
        return self.inner(x) * (1 + context.use)


def layer(shared=None, use=0, keeps=""):
    parts = {"mixer_norm": RMSNorm(HIDDEN, 1e-5)}
    reads = {"mixer_norm": "x", "mixer": "mixer_norm"}
    if keeps:
        return DecoderLayer({**parts, "mixer": Projection(HIDDEN, HIDDEN)}, reads, "x + mixer", keeps)
    parts |= {"mixer_input": SideBySide(), "projection": Projection(2 * HIDDEN, HIDDEN)}
    reads |= {"mixer_input": "mixer, past.0", "projection": "mixer_input"}
    return DecoderLayer(parts, reads, "x + 0.5 * past.0 + projection", shared=shared, use=use)


def model():
    shared = {"mixer": Doubled()}
    layers = [layer(keeps="x"), layer(shared, 0), layer(shared, 1)]
    made = CausalLM(11, HIDDEN, layers, RMSNorm(HIDDEN, 1e-5), history=True, shared=[shared])
    initialise(made, 0.3, 0)
    return made.double()


def by_hand(made, ids):
    first = made.embed(ids)
    x = first + made.layers[0].mixer(made.layers[0].mixer_norm(first))
    for use in (0, 1):
        held = made.layers[1 + use]
        mixed = made.shared[0]["mixer"].inner(held.mixer_norm(x)) * (1 + use)
        x = x + 0.5 * first + held.projection(torch.cat((mixed, first), -1))
    return made.norm(x) @ made.head.weight.T


def test_two_layers_have_one_part_and_its_gradient_is_the_sum_of_both():
    made, ids = model(), torch.arange(7)
    names = [name for name, _ in made.named_parameters() if "inner" in name]
    assert names == ["shared.0.mixer.inner.linear.weight"]
    ours, wanted = made(ids, torch.tensor([0, 7])), by_hand(made, ids)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    assert made.shared[0]["mixer"].seen == [0, 1]
    cotangent = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = list(made.parameters())
    for one, other in zip(
        torch.autograd.grad(ours, parameters, cotangent),
        torch.autograd.grad(wanted, parameters, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_every_part_is_wired_and_none_is_both_shared_and_own():
    with pytest.raises(ValueError, match="are wired as"):
        DecoderLayer({"mixer": Projection(2, 2)}, {"mixer": "x"}, "x", shared={"mixer": Projection(2, 2)})
    with pytest.raises(ValueError, match="are wired as"):
        DecoderLayer({}, {"mixer": "x"}, "mixer")
