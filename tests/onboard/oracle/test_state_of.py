import pytest
import torch
from torch import nn

from dayzero.onboard.oracle.reference import state_of


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)
        self.c = self.a


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_has_two_names_appears_once_on_any_device(device):
    with torch.device(device):
        assert list(state_of(Shared())) == ["a.weight", "a.bias", "b.weight", "b.bias"]
