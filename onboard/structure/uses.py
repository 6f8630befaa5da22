"""Modules in lists of which one call runs only one: a set of parameters for each use of a module that layers share."""

from collections.abc import Iterable

from torch import nn


def list_around(module: nn.Module, path: str) -> str | None:
    """The path of the innermost list of modules around the one at `path`; None where there is none."""
    names = path.split(".")
    for count in range(len(names) - 1, 0, -1):
        around = ".".join(names[:count])
        if isinstance(module.get_submodule(around), nn.ModuleList):
            return around
    return None


def members(module: nn.Module, around: str) -> list[int]:
    """The members of a list of modules that own parameters: others only fill its places."""
    held = module.get_submodule(around)
    return [number for number, member in enumerate(held.children()) if any(True for _ in member.parameters())]


def use_of(module: nn.Module, called: Iterable[str]) -> int:
    """Which of its uses a call of the module is: the place, among the members of its lists that own parameters, of the
    one that was called; 0 where that says nothing. called: paths of the modules that ran."""
    ran: dict[str, set[int]] = {}
    for path in called:
        around = list_around(module, path)
        if around is not None:
            ran.setdefault(around, set()).add(int(path[len(around) + 1 :].split(".")[0]))
    places = set()
    for around, numbers in ran.items():
        own = members(module, around)
        owned = numbers & set(own)
        if len(owned) != 1:
            return 0
        places.add(own.index(owned.pop()))
    return places.pop() if len(places) == 1 else 0
