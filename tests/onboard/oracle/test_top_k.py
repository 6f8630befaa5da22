"""What routers choose is told from other choices, and can be replaced by itself."""

import pytest
import torch
from torch import nn

from dayzero.onboard.oracle.top_k import ForceTopK, steady_choices


class Chooser(nn.Module):
    """Chooses among what `make` gives for x [T, H]."""

    def __init__(self, make, count):
        super().__init__()
        self.make, self.count = make, count

    def forward(self, x):
        scores = self.make(x)
        return scores.topk(min(self.count, scores.shape[-1]), dim=-1).indices


class Both(nn.Module):
    """An attention that chooses 2 of the tokens, and a router that chooses 2 of 6 experts, in turn."""

    def __init__(self):
        super().__init__()
        self.attention = Chooser(lambda x: x @ x.T, 2)
        self.router = Chooser(nn.Linear(4, 6), 2)

    def forward(self, x):
        return self.attention(x), self.router(x)


def test_a_choice_of_tokens_that_looks_like_a_routers_at_one_length_is_none():
    model = Both()
    six, nine = torch.randn(6, 4), torch.randn(9, 4)
    found = steady_choices([lambda: model(six), lambda: model(nine)], {(6, 2)})
    assert (found.seen, found.by) == ([(6, 2)], [model.router])
    choice = torch.tensor([[5, 0]]).expand(6, 2)
    alone = model(six)
    with ForceTopK([choice], {(6, 2)}, {model.router}) as force:
        attended, routed = model(six)
    assert torch.equal(attended, alone[0])
    assert torch.equal(routed, choice)
    assert force.calls == 1


def test_calls_for_one_document_each_take_the_rows_of_theirs():
    model = Both()
    choice = torch.stack([torch.tensor([n % 6, (n + 1) % 6]) for n in range(9)])
    with ForceTopK([choice, choice.flip(0)], {(6, 2)}, {model.router}) as force:
        taken = [model(torch.randn(length, 4))[1] for length in (5, 4, 9)]
    assert torch.equal(torch.cat(taken[:2]), choice)
    assert torch.equal(taken[2], choice.flip(0))
    assert force.calls == 2


def test_only_what_is_like_a_router_is_noted():
    model = Both()
    runs = [lambda: model(torch.ones(7, 4)), lambda: model(torch.ones(8, 4))]
    assert steady_choices(runs, {(12, 2)}).seen == []


def test_a_module_that_fails_leaves_no_hook_behind():
    model = Chooser(lambda x: x, -1)
    with pytest.raises(RuntimeError):
        steady_choices([lambda: model(torch.ones(2, 3))], {(3, 1)})
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
