import torch
from torch import nn

from dayzero.runtime.recompute import recompute


class Drifting(nn.Module):
    """Chooses the larger of two channels; each pass adds noise that turns the near tie around."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.chosen: list[list[int]] = []

    def forward(self, x):
        noise = torch.tensor([0.0, 0.1]) * len(self.chosen)
        values, index = (x + noise).topk(1)
        self.chosen.append(index.flatten().tolist())
        return self.scale * x.gather(-1, index).square() + values.detach()


def test_runs_again_with_the_routing_as_it_was():
    layer, x = Drifting(), torch.tensor([[1.05, 1.0], [2.0, 5.0]], requires_grad=True)
    recompute(layer)
    out = layer(x).sum()
    assert torch.allclose(out, torch.tensor(3 * (1.05**2 + 5.0**2) + 1.05 + 5.0))
    assert layer.chosen == [[0, 1]]
    out.backward()
    assert layer.chosen == [[0, 1], [0, 1]]  # by its own scores the second pass would choose [1, 1]
    assert torch.allclose(x.grad, torch.tensor([[6 * 1.05, 0.0], [0.0, 30.0]]))
    assert torch.allclose(layer.scale.grad, torch.tensor(1.05**2 + 25.0))


def test_keeps_only_the_input_and_the_routing():
    layer = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    x = torch.randn(4, 8, requires_grad=True)

    def kept():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            layer(x).sum()
        return sum(sizes)

    before = kept()
    recompute(layer)
    assert kept() <= x.numel() < before
