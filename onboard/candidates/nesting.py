"""What was found out about a module, as claims about the module that holds it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dayzero.onboard.candidates.causes import causes, changed, drivers, plain_settings
from dayzero.onboard.candidates.evidence import Evidence, Site, below, site_of
from dayzero.onboard.prove.trace import Operations, trace


def site_below(site: Site, path: str) -> Site:
    """The site of the module at `path` below `site`."""
    return site_of({f"outer.{name}": call for name, call in site.inner.items()}, f"outer.{path}", site.config)


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
