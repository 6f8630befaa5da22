"""The one place where an operator's backend is chosen.

An operator has a plain PyTorch reference, which defines its meaning, and faster backends in order of preference. Each
call goes to the first backend that supports its arguments, else to the reference. A choice can be forced, for a process
by `DAYZERO_KERNELS="swiglu=reference,rms_norm=triton"`, for a block of code by `with using(swiglu="reference")`. A
forced backend that cannot serve the call is an error: there is no silent fallback.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor

REFERENCE = "reference"
VARIABLE = "DAYZERO_KERNELS"

_operators: dict[str, "Operator"] = {}
# Not a ContextVar: a checkpointed layer runs again in autograd's own thread and must meet the same choice there.
_forced: dict[str, str] = {}
_stand_ins: list[Callable[..., Tensor]] = []


@dataclass(frozen=True)
class Backend:
    """One implementation. `supports` takes the operator's arguments, looks at dtypes, shapes and devices only, and
    returns (ok, reason); `call` takes the same arguments."""

    name: str
    supports: Callable[..., tuple[bool, str]]
    call: Callable[..., Tensor]


@dataclass(frozen=True)
class Choice:
    """What one backend would say to a call: `reason` is why not, `chosen` whether the call would go there."""

    backend: str
    ok: bool
    reason: str
    chosen: bool


class BackendError(RuntimeError):
    """A forced backend that does not exist or does not support the call."""


@dataclass(frozen=True)
class Operator:
    """A callable that dispatches to one of its backends. `check` raises ValueError for arguments no backend accepts."""

    name: str
    reference: Callable[..., Tensor]
    backends: tuple[Backend, ...]
    check: Callable[..., None] = field(default=lambda *args, **kwargs: None)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.check(*args, **kwargs)
        if _stand_ins:
            return _stand_ins[-1](self, *args, **kwargs)
        return self.select(*args, **kwargs).call(*args, **kwargs)

    def select(self, *args: Any, **kwargs: Any) -> Backend:
        """The backend that a call with these arguments goes to. Raises BackendError if a forced one cannot serve it."""
        forced = _forced_backend(self.name)
        for backend in self.backends:
            if forced in (None, backend.name):
                ok, reason = backend.supports(*args, **kwargs)
                if ok:
                    return backend
                if forced:
                    raise BackendError(f"operator {self.name}: backend {forced} is forced but refuses: {reason}")
        return self.backends[-1]

    def backend(self, name: str) -> Backend:
        """The backend of this name. Raises BackendError naming those there are."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        known = ", ".join(backend.name for backend in self.backends)
        raise BackendError(f"operator {self.name} has no backend {name!r}; it has {known}")


def operator(
    name: str,
    reference: Callable[..., Tensor],
    backends: Sequence[Backend] = (),
    check: Callable[..., None] | None = None,
) -> Operator:
    """Register an operator. backends: in order of preference; the reference comes last and supports everything."""
    if name in _operators:
        raise ValueError(f"operator {name} is registered already")
    every = (*backends, Backend(REFERENCE, lambda *args, **kwargs: (True, ""), reference))
    _operators[name] = Operator(name, reference, every, *([check] if check else []))
    return _operators[name]


def operators() -> tuple[str, ...]:
    """Names of the registered operators, sorted."""
    return tuple(sorted(_operators))


def choices(name: str, *args: Any, **kwargs: Any) -> list[Choice]:
    """What every backend of operator `name` says to a call with these arguments, in order of preference."""
    op = _operator(name)
    op.check(*args, **kwargs)
    try:
        chosen = op.select(*args, **kwargs).name
    except BackendError:
        chosen = None
    answers = [(backend.name, *backend.supports(*args, **kwargs)) for backend in op.backends]
    return [Choice(backend, ok, reason, backend == chosen) for backend, ok, reason in answers]


@contextmanager
def using(**backends: str) -> Iterator[None]:
    """Force backends by operator name, process-wide, for a block: `with using(swiglu="reference"): ...`."""
    for name, backend in backends.items():
        _operator(name).backend(backend)
    before = dict(_forced)
    _forced.update(backends)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextmanager
def standing_in(call: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, process-wide, an operator's calls are `call(operator, *args, **kwargs)`: to see them, or to do without
    their arithmetic."""
    _stand_ins.append(call)
    try:
        yield
    finally:
        _stand_ins.pop()


def _operator(name: str) -> Operator:
    if name not in _operators:
        raise BackendError(f"no operator {name!r}; there are {', '.join(operators())}")
    return _operators[name]


def _forced_backend(name: str) -> str | None:
    return _forced.get(name) or _from_environment(os.environ.get(VARIABLE, ""), len(_operators)).get(name)


@lru_cache(maxsize=8)
def _from_environment(text: str, registered: int) -> dict[str, str]:
    """`a=x,b=y` as a mapping, every name checked. registered: only keys the cache, since names can be added."""
    forced = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, backend = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise BackendError(f"{VARIABLE}: expected operator=backend, found {part!r}")
        forced[name] = _operator(name).backend(backend).name
    return forced
