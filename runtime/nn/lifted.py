"""Layers that no block of ours stands for: the reference's own code, behind the interface that all blocks have."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .context import Context
from .lifted_document import Document, documents
from .lifted_settings import settings_value
from .promote import Promote


class Inside(nn.Module):
    """A block of ours where lifted code calls a module of its own.

    returns: (length, place): the module gives a tuple of that length, with its result there and None elsewhere; None
    for a tensor by itself.
    """

    def __init__(self, block: nn.Module, returns: list[int] | None = None):
        super().__init__()
        self.block, self.returns = block, returns
        self._context: list[Context] = []

    def inside(self, context: Context) -> None:
        """The context of the calls that follow."""
        self._context[:] = [context]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if _is_stream(value))
        flat = hidden.reshape(-1, hidden.shape[-1])
        made = self.block(flat, self._context[0]) if getattr(self.block, "uses_context", False) else self.block(flat)
        made = made.reshape(*hidden.shape[:-1], made.shape[-1])
        if self.returns is None:
            return made
        return tuple(made if place == self.returns[1] else None for place in range(self.returns[0]))


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Lifted(nn.Module):
    """x: [T, H], or several such inputs -> [T, H], computed by a class of the reference.

    module: the class; its name where the block is data. settings: the arguments of its constructor as plain data
    (`settings_value`). handed: for each argument of its forward, what it is made of (`Document.give`). tables: which
    of the model's rotary tables the numbers in `handed` mean. together: called once with all documents as one;
    otherwise each document by itself, as [1, S, H], or all at once where they are equally long. flat: it takes [S, H].
    replace: blocks of ours put in place of its own modules, by path. leaves: name -> path into its output, tensors
    [.., S, ...] that later layers read.
    """

    uses_context = True
    holds_lifted = True  # its `module` is a class of the model's lifted source
    parallel_roles: dict[str, str] = {}  # noqa: RUF012

    def __init__(
        self,
        module: type[nn.Module] | str,
        settings: dict[str, Any],
        handed: dict[str, Any],
        tables: list[int] | None = None,
        together: bool = False,
        flat: bool = False,
        replace: dict[str, nn.Module] | None = None,
        leaves: dict[str, list[int]] | None = None,
    ):
        super().__init__()
        if isinstance(module, str):
            raise ValueError(f"{module} is only the name of a lifted class")
        arguments = {name: settings_value(value) for name, value in settings.items()}
        self.module = module(**arguments)
        self.handed, self.tables, self.together, self.flat = handed, list(tables or []), together, flat
        self.leaves = leaves or {}
        self._computed = _computed(self.module, functools.partial(module, **arguments))
        self._insides: list[Inside] = []
        for path, block in (replace or {}).items():
            parent, _, name = path.rpartition(".")
            block = block if isinstance(block, Inside) else Inside(block)
            self._insides.append(block)
            owner = self.module.get_submodule(parent)
            if isinstance(owner, (nn.ModuleList, nn.Sequential)):
                owner[int(name)] = block
            else:
                vars(owner).pop(name, None)
                owner.add_module(name, block)
        _freeze_buffers(self.module)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Lifted":
        """What was proven is what the code computes in evaluation, so it stays in that mode: some of it adds noise when
        it trains, or refuses to. Blocks of ours inside follow `mode`."""
        super().train(mode)
        self.module.eval()
        for inside in self._insides:
            inside.train(mode)
        return self

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Every linear layer of the lifted code; blocks inside have targets of their own."""
        inside = tuple(name for name, made in self.named_modules() if isinstance(made, Inside))
        linears = [name for name, made in self.named_modules() if isinstance(made, nn.Linear)]
        return tuple(name for name in linears if not name.startswith(tuple(f"{path}." for path in inside)))

    def reset_parameters(self, std: float) -> None:
        """As the lifted code sets them; matrices normal."""
        for name, parameter in self.module.named_parameters():
            if not any(name.startswith(path) for path in self._inside_paths()):
                if parameter.ndim >= 2 and parameter.is_floating_point():
                    nn.init.normal_(parameter, std=std)
                elif parameter.is_floating_point():
                    nn.init.ones_(parameter)
                else:
                    nn.init.zeros_(parameter)

    def _inside_paths(self) -> list[str]:
        return [f"{name}." for name, made in self.module.named_modules() if isinstance(made, Inside)]

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        *inputs, context = x, *more
        x = torch.cat(inputs, -1) if len(inputs) > 1 else x
        if x.ndim == 3 and "streams" not in self.handed.values():  # they stand side by side
            return self.forward(x.flatten(1), context).reshape(x.shape)
        with Promote() if x.dtype == torch.float64 else contextlib.nullcontext():
            self._place_computed(x)
            if self.together:
                document = Document(x, context, self.tables, self.flat, context.lengths)
                return self._call(document, context)
            if len(set(context.lengths)) <= 1 and not self.flat and not self._insides:
                return self._call(Document(x, context, self.tables, self.flat), context)
            parts = []
            pieces: dict[str, list[Tensor]] = {}
            for piece, inner in documents(x, context):
                parts.append(self._call(Document(piece, inner, self.tables, self.flat), inner))
                for name, held in inner.shared.items():
                    if held is not context.shared.get(name):
                        pieces.setdefault(name, []).append(held)
            for name, made in pieces.items():
                if len(made) == len(parts):
                    context.shared[name] = torch.cat(made)
            return torch.cat(parts) if parts else x

    def _call(self, document: "Document", context: Context) -> Tensor:
        for inside in self._insides:
            inside.inside(context)
        output = self.module(**{name: document.give(what) for name, what in self.handed.items()})
        for name, path in self.leaves.items():
            context.shared[name] = document.flatten(_follow(output, path))
        return document.flatten(_first(output))

    def _place_computed(self, x: Tensor) -> None:
        """What the constructor computed, on x's device; computed in float64 for float64."""
        wanted = (x.device, x.dtype == torch.float64)
        if self._computed is None or self._computed.placed == wanted:
            return
        for path, name, value in self._computed.values(x.dtype == torch.float64):
            vars(self.module.get_submodule(path))[name] = value.to(x.device)
        self._computed.placed = wanted


def _first(value: Any) -> Tensor:
    found = next(_streams(value), None)
    if found is None:
        raise ValueError(f"lifted code returned no tensor but {type(value).__name__}")
    return found


def _streams(value: Any) -> Iterator[Tensor]:
    if _is_stream(value):
        yield value
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from _streams(held)
    elif isinstance(value, (tuple, list)):
        for held in value:
            yield from _streams(held)


def _follow(value: Any, path: list[int]) -> Tensor:
    for step in path:
        value = list(value.values())[step] if isinstance(value, Mapping) else value[step]
    return value


def _freeze_buffers(module: nn.Module) -> None:
    """Saved buffers become parameters that are not trained: they come from the checkpoint and go back to it."""
    for owner in module.modules():
        if isinstance(owner, Inside):
            continue
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                del owner._buffers[name]
                owner.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


class _OnlyComputed(TorchFunctionMode):
    """Memory that is only reserved stays on the meta device; what is computed is real."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in {torch.empty, torch.empty_strided}:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@dataclass
class _Computed:
    """Tensors that a constructor computes and no checkpoint holds, by the path of their module and their name.
    construct: makes the module again. placed: (device, whether in float64) of those that are in their places."""

    names: list[tuple[str, str]]
    construct: Callable[[], nn.Module]
    placed: tuple[torch.device, bool] | None = None

    def values(self, wide: bool) -> Iterator[tuple[str, str, Tensor]]:
        """Computed on the CPU, in float32 where the code says so, or all in float64."""
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64 if wide else torch.float32)
            with torch.device("cpu"), _OnlyComputed(), Promote() if wide else contextlib.nullcontext():
                made = self.construct()
        finally:
            torch.set_default_dtype(before)
        for path, name in self.names:
            value = getattr(made.get_submodule(path), name).detach()
            if value.is_meta:
                raise ValueError(f"{type(made).__name__} computes {name} from memory that is not there yet")
            yield path, name, value


def _computed(module: nn.Module, construct: Callable[[], nn.Module]) -> _Computed | None:
    """What of the module is computed. It is taken off its buffers: it is made anew where the input is."""
    names = []
    for path, owner in module.named_modules():
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and name in owner._non_persistent_buffers_set:
                del owner._buffers[name]
                owner._non_persistent_buffers_set.discard(name)
                vars(owner)[name] = buffer.detach()
        names += [(path, name) for name, value in list(vars(owner).items()) if isinstance(value, Tensor)]
    return _Computed(names, construct) if names else None
