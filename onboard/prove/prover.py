"""Modules of one reference proven, each distinct one once: by a block, or by its own code, copied."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from dayzero.onboard.candidates import Candidate, Site, site_of
from dayzero.onboard.candidates.refit import refitted_to
from dayzero.onboard.lift.computes import computes
from dayzero.onboard.lift.lifting import prove_lifted
from dayzero.onboard.lift.reason import reason
from dayzero.onboard.oracle.calls import Call, tensors
from dayzero.onboard.oracle.reference import text_config
from dayzero.onboard.prove.block import Attempt, attempt, prove
from dayzero.onboard.prove.contradiction import contradiction
from dayzero.onboard.prove.proven import Unproven
from dayzero.onboard.structure.between_parts import objection
from dayzero.onboard.structure.discover import ModelParts
from dayzero.onboard.structure.layer_wiring import Again
from dayzero.onboard.structure.units import LayerParts

_TODO = (
    'write a block for it ("Adding a block" in docs/architecture.md), or change the reference so that its class can be '
    "copied; then run the same command again"
)


class Prover:
    """Proves modules of one reference, each distinct one once. usual: path -> the claim to try before any search."""

    def __init__(
        self, reference: nn.Module, parts: ModelParts, generator: torch.Generator, tell: Callable[[str], None]
    ):
        self.calls, self.config, self.layers = parts.calls, text_config(reference), parts.layers
        self.generator, self.tell, self.streams, self.loop = generator, tell, parts.streams, parts.loop
        self.usual: Mapping[str, Candidate] = {}
        self.attempts: dict[str, list[Attempt]] = {}
        self.known: dict[tuple, Attempt | None] = {}
        self.unproven: dict[str, Unproven] = {}
        self.first: dict[tuple, str] = {}  # what was asked -> the module that it was asked of first
        self.alike: dict[str, str] = {}  # module -> the first of its kind
        self.contradictions: dict[str, str] = {}
        self.bounds: dict[str, str] = {}  # module -> where the search for it ended before everything was tried
        self.again: Again | None = None

    @contextlib.contextmanager
    def seeing(self, calls: dict[str, Call], again: Again | None = None) -> Iterator[None]:
        """With the calls of one pass over layers that run several times."""
        before = self.calls, self.again
        self.calls, self.again = calls, again
        try:
            yield
        finally:
            self.calls, self.again = before

    def best(
        self, roles: tuple[str, ...], path: str, signature: tuple, joined: bool = False, call: Call | None = None
    ) -> Attempt | None:
        """The best block for the module at `path`; None, with the reason in `unproven`, where there is none.

        call: the module as another function of its arguments than of the first one.
        """
        key = (roles, signature)
        self.alike[path] = self.first.setdefault(key, path)
        if key not in self.known:
            self.tell(f"proving {path}")
            site = site_of(self.calls, path if call is None else call.path, self.config)
            site.call = call or replace(site.call, joined=joined)
            attempts: list[Attempt] = []
            survivors: list[Attempt] = []
            if path in self.usual:
                claim = refitted_to(self.usual[path], site)
                attempts = [attempt(claim, site, self.generator, thorough=True, gains=())]
                survivors = [tried for tried in attempts if tried.proven]
            bounds: list[str] = []
            for role in () if survivors else roles:
                verdict = prove(role, site, self.generator)
                attempts += verdict.attempts
                bounds += [verdict.bound] if verdict.bound else []
                survivors = survivors or verdict.survivors
                if survivors:
                    break
            self.attempts[path] = attempts
            self.known[key] = survivors[0] if survivors else None
            self.bounds[path] = "; ".join(bounds)
            if survivors:
                survivors[0].bound = self.bounds[path]
            else:
                nearest = sorted(attempts, key=lambda attempt: (not attempt.thorough, attempt.error))[:3]
                tried = [f"{a.candidate.block}: {a.objection}" for a in nearest]
                kind = type(self.calls[path].module).__name__
                why = f"no block reproduces {kind}" if tried else f"no block here is like {kind}"
                if "ffn" in roles and (wrong := _contradiction(site)):
                    self.contradictions[path] = why = wrong
                self.unproven[path] = Unproven(path, self._with_bound(path, why), tried, _TODO)
        return self.known[key]

    def open(self, paths: Iterable[str]) -> list[Unproven]:
        """Why the modules at these paths are not proven: one thing for all of a kind, of whatever layers."""
        found: list[Unproven] = []
        for path in paths:
            first = self.alike.get(path, path)
            item = self.unproven.setdefault(first, Unproven(first, "no block reproduces it"))
            if path not in (first, *item.also):
                item.also.append(path)
            if not any(item is other for other in found):
                found.append(item)
        return found

    def beside(self, layer: str, wiring: LayerParts) -> str:
        """What a layer of which modules were looked into does beside the sums of its wiring; "" for nothing."""
        paths = (f"{layer}.{unit.path}".rpartition(".")[0] for unit in wiring.units)
        if not any(path in self.calls for path in paths if path != layer):
            return ""
        return objection(self.calls, layer, wiring, self.config, self.generator)

    def lifted(
        self,
        path: str,
        signature: tuple,
        roles: tuple[str, ...] = (),
        replace: Mapping[str, Candidate] | None = None,
        call: Call | None = None,
        why: str = "",
    ) -> Attempt | None:
        """The module's own code, copied, where that is proven to do the same; None, with the reason in `unproven`.

        roles: for which no block was found. replace: paths inside it -> what stands there instead. why: no block
        stands there; found out where it is not given.
        """
        key = (("lifted", *sorted(replace or {})), signature)
        if key not in self.known:
            self.tell(f"lifting {path}")
            site = site_of(self.calls, path, self.config)
            if not self.usual:  # of a model that is asked what becomes of it, nobody is told
                inputs = 1 if call is None else len(call.inputs)
                why = why or self._with_bound(
                    path, self.contradictions.get(path) or reason(site, roles, self.attempts.get(path, []), inputs)
                )
            site.call = call or site.call
            made, attempts, objection = prove_lifted(site, replace or {}, self.generator)
            self.attempts.setdefault(path, []).extend(attempts)
            self.known[key] = made
            if made is not None:
                made.why = why
                made.computes = {} if self.usual else computes(site, made.candidate)
            else:
                before = self.unproven.get(path)
                tried = [*(before.tried if before else []), *(f"{a.candidate.block}: {a.objection}" for a in attempts)]
                said = f"{type(site.module).__name__}: {why}; its own code is not copied: {objection}"
                self.unproven[path] = Unproven(path, said, tried[-3:], _TODO, before.also if before else [])
        return self.known[key]

    def _with_bound(self, path: str, why: str) -> str:
        """Why no block stands there, and that not all were tried, where that is so."""
        return f"{why}; {self.bounds[path]}" if self.bounds.get(path) else why


def _contradiction(site: Site) -> str | None:
    """What is wrong with the reference itself, where that can be said: no block is fitted to it, and of its own code,
    copied, it is told."""
    with contextlib.suppress(RuntimeError, ValueError, IndexError, KeyError):
        return contradiction(site)
    return None


def handed(call: Call) -> tuple[str, ...]:
    """Digests of the tensors that a module is handed beside its hidden input, such as its mask."""
    inputs = call.inputs
    others = [held for held in tensors((call.args, call.kwargs)) if not any(held is one for one in inputs)]
    return tuple(hashlib.sha256(tensor.detach().resolve_conj().numpy().tobytes()).hexdigest() for tensor in others)
