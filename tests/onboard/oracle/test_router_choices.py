from torch import nn

from dayzero.onboard.oracle.router_choices import group_choices, router_choices
from dayzero.runtime.nn import GroupLimit, HashRouter, Router


class Holder(nn.Module):
    """What has as many numbers as a router, and is none."""

    experts, top_k = 3, 2


def test_routers_and_their_groups_wherever_they_stand():
    inside = nn.Sequential(Router(8, 6, 2, limit=GroupLimit(3, 1)), Holder())
    model = nn.Sequential(inside, Router(8, 10, 4))
    assert router_choices(model) == {(6, 2), (10, 4)}
    assert group_choices(model) == {(3, 1)}
    assert router_choices(nn.Linear(2, 2)) == group_choices(Holder()) == set()
    assert issubclass(HashRouter, nn.Module)
