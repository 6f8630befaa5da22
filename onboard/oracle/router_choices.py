"""Which choices a model of ours makes as its routers do: what is noted of a model and replaced is like one of them."""

from torch import nn

from dayzero.runtime.nn import GroupLimit, Routing


def router_choices(model: nn.Module) -> set[tuple[int, int]]:
    """(classes, top_k) of every router: out of how many it chooses, and how many for a token."""
    return {(router.choices, router.top_k) for router in model.modules() if isinstance(router, Routing)}


def group_choices(model: nn.Module) -> set[tuple[int, int]]:
    """(groups, kept) of routers that choose groups of experts first."""
    return {(limit.groups, limit.kept) for limit in model.modules() if isinstance(limit, GroupLimit)}
