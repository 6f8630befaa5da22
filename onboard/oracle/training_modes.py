"""Modes that a reference's code forbids or skips in training: recognised, and where gradients depend on them replaced.

Code for inference runs its experts under `no_grad` when it evaluates, and refuses to run when it trains. An oracle
needs gradients in evaluation mode. A method that is decorated with `no_grad` and hands the stream on is called without
the decorator; one that only chooses (indices, scores) is left as it is, for its parameters are never trained.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def allow_gradients(model: nn.Module) -> None:
    """Replaces, in the classes of this model's modules and in this process, what keeps gradients from the stream."""
    for cls in _classes(model):
        for owner, name, function in _methods(cls):
            if (plain := _without_no_grad(function)) is not None:
                setattr(owner, name, _HandsOn.of(function, plain))


def replaced(model: nn.Module) -> list[str]:
    """What has been replaced in this model, and what its code refuses, one line each."""
    lines = []
    for cls in _classes(model):
        for name in with_gradients(cls):
            lines.append(f"{cls.__name__}.{name} runs under no_grad in evaluation: called with gradients here")
        if _refuses_training(cls):
            lines.append(f"{cls.__name__}.forward refuses training mode: read in evaluation mode here")
    return lines


def with_gradients(cls: type) -> list[str]:
    """Methods of the class that are called without the `no_grad` that its code puts around them."""
    return sorted(name for _, name, function in _methods(cls) if getattr(function, "hands_on", lambda: False)())


def undecided(model: nn.Module) -> bool:
    """Whether something in this model runs under `no_grad` and has not yet been called with gradients wanted."""
    held = [function for cls in _classes(model) for _, _, function in _methods(cls)]
    return any(hasattr(function, "hands_on") and function.hands_on() is None for function in held)


def _classes(model: nn.Module) -> Iterator[type]:
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        if not cls.__module__.startswith("torch."):
            yield cls


def _methods(cls: type) -> Iterator[tuple[type, str, Any]]:
    """(class, name, function) of what instances may call in a forward pass; the library's own base classes left out."""
    seen = {"__init__", "reset_parameters"}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "torch" or base.__name__ == "PreTrainedModel":
            return
        for name, value in list(vars(base).items()):
            if inspect.isfunction(value) and name not in seen and not name.startswith("_init"):
                seen.add(name)
                yield base, name, value


def _without_no_grad(function: Any) -> Any:
    """The function under a `no_grad` decorator, None where there is no such decorator."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None or not function.__code__.co_filename.endswith("torch/utils/_contextlib.py"):
        return None
    held = inspect.getclosurevars(function).nonlocals.get("ctx_factory")
    return inner if type(getattr(held, "__self__", None)) is torch.no_grad else None


class _HandsOn:
    """Decides, when it is first called with gradients wanted, whether a method hands the stream on."""

    @staticmethod
    def of(function: Any, plain: Any) -> Any:
        decided: list[bool] = []

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if decided == [True] or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            made = function(*args, **kwargs)
            if not decided:
                widths = {value.shape[-1] for value in (*args, *kwargs.values()) if _is_stream(value)}
                decided.append(_is_stream(made) and made.shape[-1] in widths)
                if decided[0]:
                    return plain(*args, **kwargs)
            return made

        del call.__wrapped__  # else what unwraps it would find the method again and replace it once more
        call.hands_on = lambda: decided[0] if decided else None  # type: ignore[attr-defined]
        return call


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2


def _refuses_training(cls: type) -> bool:
    """Whether forward raises, or asserts that it is not, when `self.training`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError, AttributeError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and ast.unparse(node.test) == "not self.training":
            return True
        raises = isinstance(node, ast.If) and any(isinstance(inner, ast.Raise) for inner in node.body)
        if raises and ast.unparse(node.test) == "self.training":  # type: ignore[attr-defined]
            return True
    return False
