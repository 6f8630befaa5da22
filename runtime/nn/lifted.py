"""Layers that no block of ours stands for: the reference's own code, behind the interface that all blocks have."""

import ast
import contextlib
import functools
import hashlib
import inspect
import linecache
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .context import Context
from .promote import Promote


class Namespace:
    """The values that a lifted class reads from its config, as attributes. Raises AttributeError for any other."""

    def __init__(self, values: Mapping[str, Any]):
        vars(self).update({name: settings_value(value) for name, value in values.items()})

    def __repr__(self) -> str:
        return f"Namespace({', '.join(sorted(vars(self)))})"


def settings_value(value: Any) -> Any:
    """The object that a setting stands for: {"namespace": {...}} a config, {"picked": {...}} configs by
    number or word, {"dtype": "float32"} a dtype."""
    if isinstance(value, Mapping):
        if value.keys() == {"namespace"}:
            return Namespace(value["namespace"])
        if value.keys() == {"picked"}:
            return {int(key) if key.isdigit() else key: settings_value(held) for key, held in value["picked"].items()}
        if value.keys() == {"dtype"}:
            return getattr(torch, value["dtype"])
        return {name: settings_value(held) for name, held in value.items()}
    return [settings_value(held) for held in value] if isinstance(value, list) else value


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
    (`settings_value`). handed: for each argument of its forward, what it is made of (`_Document.give`). tables: which
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
                document = _Document(x, context, self.tables, self.flat, context.lengths)
                return self._call(document, context)
            if len(set(context.lengths)) <= 1 and not self.flat and not self._insides:
                return self._call(_Document(x, context, self.tables, self.flat), context)
            parts = []
            pieces: dict[str, list[Tensor]] = {}
            for piece, inner in _documents(x, context):
                parts.append(self._call(_Document(piece, inner, self.tables, self.flat), inner))
                for name, held in inner.shared.items():
                    if held is not context.shared.get(name):
                        pieces.setdefault(name, []).append(held)
            for name, made in pieces.items():
                if len(made) == len(parts):
                    context.shared[name] = torch.cat(made)
            return torch.cat(parts) if parts else x

    def _call(self, document: "_Document", context: Context) -> Tensor:
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


@dataclass
class _Document:
    """Equally long documents as the lifted code sees them, or all of them as one. x: [T, H], T = B S.

    lengths: of the documents, where they are handed as one.
    """

    x: Tensor
    context: Context
    tables: list[int]
    flat: bool
    lengths: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return 1 if self.lengths is not None else max(len(self.context.lengths), 1)

    @property
    def length(self) -> int:
        return self.x.shape[0] // self.batch

    def give(self, what: Any) -> Any:
        """The argument that `what` describes:

        "hidden" the input; "streams" the same where it is several, [.., n, H]; {"input": place, "of": count} one of
        several inputs; "length" of the document;
        {"value": plain} itself; {"many": [...]} a tuple;
        {"named": {...}} a dict; {"position": axes} and {"ids": axes} integers; {"ones": axes, "dtype": name};
        {"table": number, "part": "pair" | "cos" | "sin" | "complex", "style": "half" | "interleaved" | "once",
        "axes": axes}; {"shared": name, "axes": axes, "dtype": name};
        {"mask": "added" | "visible" | "hidden", "window": tokens or None, "chunk": tokens or None, "full": bool,
        "axes": axes, "dtype": name}; {"distance": 1 or -1, "axes": axes} how far each token is from each other.
        axes: one letter a dimension: b documents, s tokens, t tokens seen, d what is left, a digit for that many
        copies.
        """
        if what in ("hidden", "streams"):
            return self.x if self.flat else self.x.unflatten(0, (self.batch, self.length))
        if what == "length":
            return self.length
        if "input" in what:
            return self.give("hidden").chunk(what["of"], -1)[what["input"]]
        if "value" in what:
            return settings_value(what["value"])
        if "many" in what:
            return tuple(self.give(held) for held in what["many"])
        if "named" in what:
            return {name: self.give(held) for name, held in what["named"].items()}
        if "position" in what:
            return self._shaped(self.context.position, what["position"])
        if "ids" in what:
            if self.context.ids is None:
                raise ValueError("lifted code needs the token ids, but the context has none")
            return self._shaped(self.context.ids, what["ids"])
        if "ones" in what:
            ones = torch.ones(self.x.shape[0], dtype=getattr(torch, what["dtype"]), device=self.x.device)
            return self._shaped(ones, what["ones"])
        if "shared" in what:
            held = self.context.shared[what["shared"]]
            held = held.flatten(1) if "d" in what["axes"] else held.flatten()
            return self._shaped(held.to(getattr(torch, what["dtype"])), what["axes"])
        if "table" in what:
            return self._table(what)
        if "mask" in what:
            return self._mask(what)
        if "distance" in what:
            place = torch.arange(self.length, device=self.x.device)
            return self._repeated(what["distance"] * (place[:, None] - place), what["axes"])
        raise ValueError(f"no argument is made of {what!r}")

    def _shaped(self, tokens: Tensor, axes: str) -> Tensor:
        """[T, ...] with the dimensions that `axes` names."""
        made = tokens.unflatten(0, (self.batch, self.length))
        if "b" not in axes:
            made = made[0]
        order = [axis for axis in axes if axis in "bsd"]
        if "d" in order and made.ndim > len(order):
            made = made.flatten(len(order) - 1)
        for place, axis in enumerate(axes):
            if axis.isdigit():
                made = made.unsqueeze(place)
                if axis != "1":
                    made = made.expand(*made.shape[:place], int(axis), *made.shape[place + 1 :])
        return made

    def _table(self, what: Mapping[str, Any]) -> Any:
        number = self.tables[what["table"]]
        if number >= len(self.context.tables):
            raise ValueError(f"lifted code reads rotary table {number}, but the model has {len(self.context.tables)}")
        cos, sin = (_spread(table, what["style"]) for table in self.context.tables[number])
        if what["part"] == "complex":
            return self._shaped(torch.complex(cos, sin), what["axes"])
        made = (self._shaped(cos, what["axes"]), self._shaped(sin, what["axes"]))
        return {"pair": made, "cos": made[0], "sin": made[1]}[what["part"]]

    def _mask(self, what: Mapping[str, Any]) -> Tensor:
        place = torch.arange(self.length, device=self.x.device)
        age = place[:, None] - place
        visible = torch.ones_like(age, dtype=torch.bool) if what.get("full") else age >= 0
        if what.get("window") is not None:
            visible = visible & (age < what["window"])
        if what.get("chunk") is not None:
            visible = visible & (place[:, None] // what["chunk"] == place // what["chunk"])
        if self.lengths is not None:
            document = torch.repeat_interleave(
                torch.arange(len(self.lengths), device=self.x.device), torch.tensor(self.lengths, device=self.x.device)
            )
            visible = visible & (document[:, None] == document)
        made = ~visible if what["mask"] == "hidden" else visible
        if what["mask"] == "added":
            made = torch.zeros(visible.shape, dtype=self.x.dtype, device=self.x.device)
            made = made.masked_fill(~visible, torch.finfo(self.x.dtype).min)
        else:
            made = made.to(getattr(torch, what.get("dtype", "bool")))
        return self._repeated(made, what["axes"])

    def _repeated(self, made: Tensor, axes: str) -> Tensor:
        """[S, S] with the dimensions before it that `axes` names."""
        for place, axis in enumerate(axes):
            if axis not in "st":
                size = self.batch if axis == "b" else int(axis)
                made = made.unsqueeze(place).expand(*made.shape[:place], size, *made.shape[place:])
        return made

    def flatten(self, made: Tensor) -> Tensor:
        """[T, ...] of a tensor [B, S, ...] or [T, ...]."""
        return made.flatten(0, 1) if made.shape[:2] == (self.batch, self.length) else made


def _spread(table: Tensor, style: str) -> Tensor:
    """[T, pairs] -> [T, dim]: each frequency once, or for both channels of its pair."""
    if style == "half":
        return torch.cat((table, table), -1)
    return table.repeat_interleave(2, -1) if style == "interleaved" else table


def _documents(x: Tensor, context: Context) -> Iterator[tuple[Tensor, Context]]:
    """Each document with a context of its own; what an earlier layer left is cut to it."""
    start = 0
    for length in context.lengths:
        stop = start + length
        if length:
            shared = {
                name: held[start:stop] if held.shape[:1] == x.shape[:1] else held
                for name, held in context.shared.items()
            }
            yield (
                x[start:stop],
                replace(
                    context,
                    cu_seqlens=torch.tensor([0, length], device=context.cu_seqlens.device),
                    lengths=(length,),
                    position=context.position[start:stop],
                    tables=tuple((cos[start:stop], sin[start:stop]) for cos, sin in context.tables),
                    ids=None if context.ids is None else context.ids[start:stop],
                    shared=shared,
                ),
            )
        start = stop


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


# What lifted source may import, by the first part of the name; of our own, `runtime.nn.upstream` alone.
IMPORTS = {
    "abc", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "inspect", "itertools",
    "logging", "math", "numbers", "operator", "random", "string", "torch", "types", "typing", "warnings",
}  # fmt: skip
UPSTREAM = "dayzero.runtime.nn.upstream"
_REFUSED = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "open"}


def check_source(source: str) -> None:
    """Raises ValueError for lifted source that imports, or calls by name, what no arithmetic needs.

    This catches mistakes and makes review short. It confines nothing: lifted source is code, as trusted as where it
    came from.
    """
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            if name != UPSTREAM and name.split(".")[0] not in IMPORTS:
                raise ValueError(f"line {node.lineno} imports {name}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Name) and node.id in _REFUSED:
            raise ValueError(f"line {node.lineno} uses {node.id}")
        # `input` is a usual name of a value.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "input":
            raise ValueError(f"line {node.lineno} calls input")


@functools.lru_cache(maxsize=64)
def classes_of(source: str) -> Mapping[str, type]:
    """Name -> class of lifted source text, which is executed. {} for no text. Raises ValueError (`check_source`)."""
    if not source:
        return {}
    check_source(source)
    name = f"dayzero_lifted_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    module = types.ModuleType(name)
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return {
        held.__name__: held
        for held in vars(module).values()
        if inspect.isclass(held) and held.__module__ == name
    }  # fmt: skip


def beside(file: str) -> types.SimpleNamespace:
    """The classes of lifted.py in the folder of `file`, for the model.py of a package."""
    return types.SimpleNamespace(**classes_of(Path(file).with_name("lifted.py").read_text(encoding="utf-8")))
