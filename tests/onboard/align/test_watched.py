"""Our model's calls as they are noted: pass by pass, and from when to when."""

import torch
from torch import nn

from dayzero.onboard.align.watched import watched, watched_while


class Twice(nn.Module):
    """A layer that doubles, run twice, whose part runs twice in each."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, ids, bounds):
        x = ids.to(torch.float64)[:, None]
        return self.layer((x, self.layer((x, x))[-1]))[-1]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Half()

    def forward(self, x):
        return *x[:-1], self.part(x[-1]) + self.part(3 * x[-1])


class Half(nn.Module):
    def forward(self, x):
        if bool((x > 1000).any()):
            raise ValueError("too large")
        return x / 2


IDS = torch.tensor([[1, 2, 4]])


def test_every_run_of_a_module_is_noted_with_what_it_read_and_gave():
    seen = watched(Twice(), IDS)
    first, second = (seen.visit("layer", number) for number in (0, 1))
    assert first is not None
    assert second is not None
    assert first.stream.flatten().tolist() == [1, 2, 4]
    assert second.stream.flatten().tolist() == [2, 4, 8]
    assert second.given is not None
    assert second.given.flatten().tolist() == [4, 8, 16]
    assert seen.visit("layer", 2) is None
    assert seen.logits is not None
    inside = seen.during(second)
    assert list(inside) == ["layer.part", "layer.part@2"]
    assert [call.read[0].flatten().tolist() for call in inside.values()] == [[2, 4, 8], [6, 12, 24]]


def test_what_did_not_end_has_given_nothing():
    seen = watched(Twice(), IDS * 250)
    broken = seen.visit("layer", 0)
    assert (seen.logits, seen.stopped) == (None, "too large")
    assert broken is not None
    assert broken.given is None
    assert seen.during(broken)["layer.part@2"].given is None
    assert seen.during(broken)["layer.part"].given is not None


def test_a_single_module_can_be_watched():
    model = Twice()
    seen = watched_while(model, lambda: model.layer.part(torch.ones(2)))
    assert list(seen.calls) == ["layer.part"]
