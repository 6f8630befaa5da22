"""Which setting makes a module do what it does: settings are changed, one at a time, and the module is run again.

Two settings, or a setting and a number in the code, may hold one value on this model; only one of them is what the
module reads. A changed setting shows in the trace or in the output at once.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.candidates.evidence import Evidence, Site, attribute, config_field, literal, read_by
from dayzero.onboard.prove.trace import Operations, trace

Switch = tuple[Evidence, Tensor, Operations]


def causing(site: Site, value: float) -> list[tuple[Evidence, Any, str]]:
    """Settings that hold `value` and whose change shows among the constants: the evidence, its holder and name."""
    other = value * 1.37 + 0.011
    found = []
    for evidence, holder, name, held in plain_settings(site):
        if _number(held) and held == value:
            with changed(holder, name, other):
                if _has(_again(site), other):
                    found.append((evidence, holder, name))
    return found


def causes(site: Site, value: float) -> list[Evidence]:
    """Where the constant `value` in the module's trace comes from: the settings whose change changes it, and the number
    itself where it is still there when all of them are changed."""
    found = causing(site, value)
    with contextlib.ExitStack() as stack:
        for _, holder, name in found:
            stack.enter_context(changed(holder, name, value * 1.37 + 0.011))
        number = not found or _has(_again(site), value)
    return [evidence for evidence, _, _ in found] + ([literal(value, "constant in the trace")] if number else [])


def drivers(site: Site, value: Any, other: Any, shows: Callable[[Operations], bool]) -> list[Evidence]:
    """Settings that hold `value`, of the module or of the config that it still reads when it runs, such that the trace
    `shows` it when they hold `other` instead."""
    found = []
    config = read_by(site.module, site.config)
    of_config = [
        (config_field(name), config, name, held)
        for name, held in sorted(vars(config).items())
        if not name.startswith("_")
    ]
    for evidence, holder, name, held in [*plain_settings(site), *of_config]:
        if type(held) is type(other) and held == value:
            # Settings that check their values may refuse this one.
            with contextlib.suppress(Exception), changed(holder, name, other):
                if shows(_again(site)):
                    found.append(evidence)
    return found


def switches(site: Site) -> Iterator[Switch]:
    """Booleans that the module reads: the evidence, and what the module gives and executes when it is flipped."""
    with torch.no_grad():
        usual = site.call.replay(site.call.hidden)
    for evidence, holder, name, held in plain_settings(site):
        if not isinstance(held, bool):
            continue
        with changed(holder, name, not held), torch.no_grad(), contextlib.suppress(Exception):
            output = site.call.replay(site.call.hidden)
            if output.shape != usual.shape or not torch.equal(output, usual):
                yield evidence, output, trace(lambda: site.call.replay(site.call.hidden))


def named_choice(site: Site, value: str, path: str = "") -> Evidence:
    """The string setting of the module at `path` that says `value`; the value itself where there is none."""
    for name, held in sorted(vars(site.module.get_submodule(path)).items()):
        if isinstance(held, str) and held == value and not name.startswith("_"):
            return attribute(path, name)
    return literal(value, "the trace's activation")


@contextlib.contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    """The attribute with another value, for as long as this lasts."""
    held = getattr(holder, name)
    try:
        setattr(holder, name, value)
        yield
    finally:
        setattr(holder, name, held)


def plain_settings(site: Site) -> Iterator[tuple[Evidence, Any, str, Any]]:
    """(evidence, its holder, name, value) of the plain attributes of the module and what is below it, nearest first."""
    for path, module in site.module.named_modules():
        for name, held in sorted(vars(module).items()):
            if not name.startswith("_") and name != "training":
                yield attribute(path, name), module, name, held


def _number(held: Any) -> bool:
    return isinstance(held, (int, float)) and not isinstance(held, bool)


def _again(site: Site) -> Operations:
    try:
        return trace(lambda: site.call.replay(site.call.hidden))
    except Exception:  # the reference's own code refuses the value, in whatever way
        return Operations()


def _has(operations: Operations, value: float) -> bool:
    return any(abs(value - other) <= 1e-12 * abs(value) for other in operations.constants)
