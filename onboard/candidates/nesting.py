"""What was found out about a module, as claims about the module that holds it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from dayzero.onboard.candidates.causes import causes, changed, drivers, plain_settings
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, site_of
from dayzero.onboard.trace import Operations, trace


def site_below(site: Site, path: str) -> Site:
    """The site of the module at `path` below `site`."""
    return site_of({f"outer.{name}": call for name, call in site.inner.items()}, f"outer.{path}", site.config)


@overload
def below(path: str, argument: Evidence) -> Evidence: ...
@overload
def below(path: str, argument: Candidate) -> Candidate: ...
def below(path: str, argument: Evidence | Candidate) -> Evidence | Candidate:
    """A claim about the module at `path` as one about its holder: its evidence is looked up there, its parameters have
    the path before their names."""
    if not path:
        return argument
    if isinstance(argument, Evidence):
        return Evidence(
            argument.label.replace("attribute ", f"attribute {path}.").replace("shape of ", f"shape of {path}."),
            lambda module, config: argument.resolve(module.get_submodule(path), config),
        )
    return Candidate(
        argument.block,
        {name: below(path, inner) for name, inner in argument.arguments.items()},
        {name: source.renamed(lambda held: f"{path}.{held}") for name, source in argument.parameters.items()},
        below(path, argument.when) if argument.when is not None else None,
    )


@dataclass
class Inner:
    """A module below a site, asked on its own what its settings do; the answers are evidence about the site.

    path: "" for the site itself.
    """

    outer: Site
    path: str

    @cached_property
    def site(self) -> Site:
        return site_below(self.outer, self.path) if self.path else self.outer

    @property
    def operations(self) -> Operations:
        return self.site.operations

    def cause(self, value: float) -> Evidence:
        """Where a constant of the module's trace comes from (`causes`)."""
        return below(self.path, causes(self.site, value)[0])

    def driver(self, value: Any, other: Any, shows: Callable[[Operations], bool]) -> Evidence | None:
        """The first setting that makes the trace show something else (`drivers`)."""
        found = drivers(self.site, value, other, shows)
        return below(self.path, found[0]) if found else None

    @cached_property
    def switches(self) -> list[tuple[Evidence, Operations]]:
        """Booleans that change what the module executes, and what it executes when they are flipped."""
        usual = self.operations.sequence
        found = []
        for evidence, holder, name, held in plain_settings(self.site):
            if isinstance(held, bool):
                with contextlib.suppress(Exception), changed(holder, name, not held):
                    seen = trace(lambda: self.site.call.replay(self.site.call.hidden))
                    if [step.name for step in seen.sequence] != [step.name for step in usual]:
                        found.append((below(self.path, evidence), seen))
        return found
