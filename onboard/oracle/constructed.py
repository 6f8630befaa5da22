"""With which arguments each module was constructed, seen while a model is built.

Every module's constructor ends in `nn.Module.__init__`; the frames above that call hold the arguments of the outermost
constructor. No source is needed, and it works for any class, on any device.
"""

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dayzero.runtime.nn.promote import Promote

_FRAMES = 12  # looked at above a constructor: its subclasses', and what decorators put between
_made: "WeakKeyDictionary[nn.Module, dict[str, Any]]" = WeakKeyDictionary()


def constructed_with(module: nn.Module) -> dict[str, Any] | None:
    """Parameter name -> argument of the module's constructor; None if it was not built while arguments were noted, or
    takes a variable number of them."""
    return _made.get(module)


@contextlib.contextmanager
def noting_arguments() -> Iterator[None]:
    """Notes the constructor arguments of every module that is built, torch's own left out."""
    original = nn.Module.__init__

    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not type(self).__module__.startswith("torch."):
            arguments = _arguments(self, sys._getframe(1))
            if arguments is not None:
                _made[self] = arguments

    nn.Module.__init__ = noting
    try:
        yield
    finally:
        nn.Module.__init__ = original


class _Unallocated(TorchFunctionMode):
    """Gives no memory to what a constructor leaves empty, as weights are; what it computes is computed."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def built_again(module: nn.Module) -> nn.Module | None:
    """The module built once more, by itself and in float64: what its constructor computes has its values, whatever the
    device of the first. None where its arguments are not known or do not build it."""
    arguments = constructed_with(module)
    previous = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with Promote(), _Unallocated():
            return None if arguments is None else type(module)(**arguments)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    finally:
        torch.set_default_dtype(previous)


def _arguments(module: nn.Module, frame: types.FrameType | None) -> dict[str, Any] | None:
    """The arguments in the outermost constructor frame of `module`; None where it has a variable number of them."""
    outermost = None
    for _ in range(_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return {}
    code, held = outermost.f_code, outermost.f_locals
    if code.co_flags & inspect.CO_VARARGS and held.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]):
        return None
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    found = {name: held[name] for name in names if name in held}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        found |= held.get(code.co_varnames[place]) or {}
    return found


def built_like(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The modules of the same class that were built of the same objects, this one included, with their arguments."""
    mine = _made.get(module) or {}
    shared = {name: value for name, value in mine.items() if not isinstance(value, (bool, int, float, str, type(None)))}
    return [
        (other, held)
        for other, held in list(_made.items())
        if type(other) is type(module) and all(held.get(name) is value for name, value in shared.items())
    ]
