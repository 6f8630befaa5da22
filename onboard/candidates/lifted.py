"""The candidate of last resort: the reference's own code, copied (`onboard.lift`) and handed what it was handed.

Its claim is small, that the copy and what it is rebuilt from compute what the module computed; it is proven like any
other. Settings are the constructor's arguments, of configs only the fields that the copy reads.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal
from dayzero.onboard.lift.closure import Lift, LiftError, lift, merge
from dayzero.onboard.oracle.constructed import built_like, constructed_with
from dayzero.onboard.oracle.training_modes import undecided
from dayzero.onboard.structure.token_mixing import mixes_tokens
from dayzero.runtime.nn.lifted import Lifted, classes_of
from dayzero.runtime.weights import Stored


@dataclass
class LiftedCandidate(Candidate):
    """A lifted class. reads_tables: whether it is handed rotary tables. replace: path of a module inside -> the block
    of ours that stands there."""

    lift: Lift | None = None
    reads_tables: bool = False
    replace: dict[str, Candidate] = field(default_factory=dict)

    @property
    def lifts(self) -> list[Lift]:
        return [*([self.lift] if self.lift else []), *(made for c in self.replace.values() for made in c.lifts)]

    def below(self, path: str) -> "Candidate":
        plain = super().below(path)
        replace = {name: candidate.below(path) for name, candidate in self.replace.items()}
        claim = (plain.block, plain.arguments, plain.parameters, plain.when)
        return LiftedCandidate(*claim, self.lift, self.reads_tables, replace)

    def describe(self) -> list[str]:
        inside = [f"{path}: {line}" for path, made in self.replace.items() for line in (made.block, *made.describe())]
        files = {definition.file: definition.lines for definition in self.lift.definitions} if self.lift else {}
        return [*(f"copied from {file}" for file in files), *super().describe(), *inside]


def propose_lifted(site: Site, replace: Mapping[str, Candidate] | None = None) -> list[Candidate]:
    """The module's own class, called once with all documents or a document at a time, whichever is enough.

    replace: path of a module inside -> the proven candidate for that module. [] where the class cannot stand by itself;
    `why_not` says why.
    """
    try:
        return lifted_candidates(site, replace or {})
    except LiftError:
        return []


def why_not(site: Site, replace: Mapping[str, Candidate] | None = None) -> str:
    """Why the module cannot be lifted, "" where it can."""
    try:
        lifted_candidates(site, replace or {})
    except LiftError as error:
        return str(error)
    return ""


def lifted_candidates(site: Site, replace: Mapping[str, Candidate]) -> list[Candidate]:
    """As `propose_lifted`. Raises LiftError."""
    if undecided(site.module):  # what gradients must pass through is seen in a call that wants them
        with torch.enable_grad():
            site.call.replay(site.call.hidden.clone().requires_grad_(True))
    made = lift(type(site.module), frozenset(path for path in replace if "." not in path))
    cls = classes_of(merge([made]))[made.name]
    if constructed_with(site.module) is None:
        raise LiftError(f"how {type(site.module).__name__} was constructed is not known")
    _check_members(site.module, cls)
    named, others = _handed(site, cls)
    reads = _Reads(cls, made)
    parameters = _parameters(site.module, replace)
    found: list[Candidate] = []
    # One call for all documents only where a token depends on no other: the captured batch is one document.
    for together in (True, False) if not mixes_tokens(site.call) else (False,):
        for handed in [named] + ([{**named, **others}] if others else []):
            shown = {name: _without_mask(what) if together else what for name, what in handed.items()}
            found.append(
                LiftedCandidate(
                    "Lifted",
                    {
                        "module": literal(made.name, f"the class of {site.call.path}"),
                        "settings": Evidence("arguments of its constructor", reads.settings),
                        "handed": Evidence(f"values of the captured call: {_shown(shown)}", _resolver(shown)),
                        "tables": literal(list(range(len(site.context.tables))), "tables of the captured call"),
                        "together": literal(together, "enumerated"),
                        "flat": literal(site.call.hidden.ndim == 2, "dimensions of the input"),
                        "replace": Evidence("proven blocks", _inside(site, dict(replace))),
                    },
                    dict(parameters),
                    None,
                    made,
                    "'table'" in repr(shown),
                    dict(replace),
                )
            )
    try:
        reads.construct(constructed_with(site.module) or {})
        _read_in_a_call(found[-1], cls, site, reads)
    except ValueError as error:
        raise LiftError(str(error)) from None
    return found


def _check_members(module: nn.Module, cls: type[nn.Module]) -> None:
    """Raises LiftError where the module holds a tensor that its constructor does not make."""
    with torch.device("meta"):
        try:
            made = cls(**(constructed_with(module) or {}))
        except Exception as error:  # whatever copied code raises
            said = " ".join(str(error).split())[:200]
            raise LiftError(f"{cls.__name__} cannot be constructed ({type(error).__name__}: {said})") from None
    ours = {name for name, _ in (*made.named_parameters(), *made.named_buffers())}
    theirs = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if missing := [name for name in theirs if name not in ours and "." not in name]:
        raise LiftError(f"{cls.__name__} is given {missing[0]} by another class")


def _parameters(module: nn.Module, replace: Mapping[str, Candidate]) -> dict[str, Any]:
    """Each tensor of the module under its own name; those of replaced modules as their blocks are made of them."""
    inside = tuple(f"{path}." for path in replace)
    saved = [name for name in module.state_dict() if not name.startswith(inside)]
    shown = dict(module.named_parameters(remove_duplicate=True)) | dict(module.named_buffers())
    parameters: dict[str, Any] = {f"module.{name}": Stored(name) for name in saved if name in shown}
    for path, candidate in replace.items():
        for name, source in candidate.below(path).parameters.items():
            parameters[f"module.{path}.block.{name}"] = source
    return parameters


def _inside(site: Site, replace: dict[str, Candidate]) -> Callable[[nn.Module, Any], Any]:
    """The blocks in place of modules inside, and in which place of a tuple their modules gave their result."""
    returns = {path: _returns(site.inner[path].output) if path in site.inner else None for path in replace}

    def resolve(module: nn.Module, config: Any) -> Any:
        return {
            path: {
                "block": "Inside",
                "arguments": {
                    "block": candidate.spec(module.get_submodule(path), config).model_dump(exclude={"proof"}),
                    "returns": returns[path],
                },
            }
            for path, candidate in replace.items()
        }

    return resolve


def _returns(output: Any) -> list[int] | None:
    if not isinstance(output, (tuple, list)):
        return None
    place = next(i for i, value in enumerate(output) if isinstance(value, Tensor) and value.is_floating_point())
    return [len(output), place]


# --- what the copy is handed


def _handed(site: Site, cls: type[nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameter of forward -> what it is made of, for those that it names and for those that it only passes on."""
    signature = inspect.signature(cls.forward)
    try:
        bound = signature.bind(None, *site.call.args, **site.call.kwargs)
    except TypeError as error:
        raise LiftError(f"{cls.__name__} is not called as its signature says: {error}") from None
    named: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise LiftError(f"{cls.__name__} is handed any number of arguments")
        if kind is inspect.Parameter.VAR_KEYWORD:
            others = {key: _described(f"{cls.__name__}.{key}", held, site) for key, held in value.items()}
        else:
            named[name] = _described(f"{cls.__name__}.{name}", value, site)
    given = [*named.values(), *others.values()]
    stream = [what for what in given if what in ("hidden", "streams") or (isinstance(what, dict) and "input" in what)]
    if not stream:
        raise LiftError(f"{cls.__name__} is not handed the stream as an argument of its own")
    return named, others


def _described(name: str, value: Any, site: Site) -> Any:
    """What an argument is made of, as `runtime.nn.lifted` gives it. Raises LiftError where nothing explains it."""
    if isinstance(value, Tensor):
        found = _tensor(value, site)
        if found is None:
            raise LiftError(f"{name} is handed {list(value.shape)} {value.dtype}, which nothing here explains")
        return found
    if isinstance(value, (tuple, list)):
        pair = _table(tuple(value), site)
        return pair or {"many": [_described(name, held, site) for held in value]}
    if isinstance(value, Mapping):
        return {"named": {str(key): _described(name, held, site) for key, held in value.items()}}
    if value is None or isinstance(value, (bool, str, float)):
        return {"value": value}
    if isinstance(value, int):
        return "length" if value == site.call.hidden.shape[-2] else {"value": value}
    raise LiftError(f"{name} is handed {type(value).__name__}, which is no plain data")


def _tensor(value: Tensor, site: Site) -> Any:
    inputs = site.call.inputs
    if len(inputs) > 1 and len({held.shape for held in inputs}) == 1:
        for place, held in enumerate(inputs):
            if value is held:
                return {"input": place, "of": len(inputs)}
    if value is site.call.hidden:
        return "hidden" if value.ndim < 4 else "streams"
    batch, length = _sizes(site)
    if (table := _table((value,), site)) is not None:
        return table
    if value.shape[-2:] == (length, length) and (mask := _mask(value, site)) is not None:
        return mask
    axes = _axes(value.shape, batch, length)
    if axes is None:
        return None
    plain = _by_token(value, axes, batch, length)
    if plain is None:
        return None
    context = site.context
    if not value.is_floating_point() and plain.ndim == 1:
        if torch.equal(plain.long(), context.position):
            return {"position": axes}
        if context.ids is not None and torch.equal(plain.long(), context.ids):
            return {"ids": axes}
    if plain.ndim == 1 and bool((plain == 1).all()):
        return {"ones": axes, "dtype": str(value.dtype).removeprefix("torch.")}
    for name, held in context.shared.items():
        flat = held.reshape(held.shape[0], -1)
        if flat.numel() == plain.numel() and torch.equal(flat.to(plain.dtype), plain.reshape(flat.shape)):
            return {"shared": name, "axes": axes, "dtype": str(value.dtype).removeprefix("torch.")}
    return None


def _sizes(site: Site) -> tuple[int, int]:
    """(documents, tokens of each) of the captured call."""
    lengths = site.context.lengths
    return len(lengths), lengths[0]


def _axes(shape: torch.Size, batch: int, length: int) -> str | None:
    """A letter for each dimension: b documents, s tokens, d what is left, a digit for copies; None if no tokens."""
    axes = ""
    for place, size in enumerate(shape):
        if size == length and "s" not in axes:
            axes += "s"
        elif "s" not in axes and size == batch and batch > 1:
            axes += "b"
        elif size == 1 or ("s" not in axes and size < 10):
            axes += str(size)
        elif "s" in axes and place == len(shape) - 1:
            axes += "d"
        else:
            return None
    if "s" not in axes:
        return None
    # One row for all documents is a row for each.
    return axes if "b" in axes or not axes.startswith("1") else "b" + axes[1:]


def _by_token(value: Tensor, axes: str, batch: int, length: int) -> Tensor | None:
    """[T] or [T, d] of a tensor with these axes; None where copies differ."""
    if "b" in axes:
        place = axes.index("b")
        value = value.expand(*value.shape[:place], batch, *value.shape[place + 1 :])
    else:
        value, axes = value.unsqueeze(0).expand(batch, *value.shape), "b" + axes
    for place in reversed(range(len(axes))):
        if axes[place].isdigit():
            first = value.select(place, 0)
            if not torch.equal(value, first.unsqueeze(place).expand_as(value)):
                return None
            value = first
    order = [axis for axis in axes if not axis.isdigit()]
    if order[:2] != ["b", "s"]:
        return None
    return value.flatten(0, 1)


def _table(value: tuple, site: Site) -> Any:
    """A rotary table of the context in the spelling of `value`: a pair, one of the two, or complex."""
    if len(value) not in {1, 2} or not all(isinstance(part, Tensor) for part in value):
        return None
    if len(value) == 2 and (value[0].shape != value[1].shape or not value[0].is_floating_point()):
        return None
    batch, length = _sizes(site)
    axes = _axes(value[0].shape, batch, length)
    if axes is None:
        return None
    plain = [_by_token(part, axes, batch, length) for part in value]
    if any(part is None or part.ndim != 2 for part in plain):
        return None
    for number, (cos, sin) in enumerate(site.context.tables):
        for style in ("half", "interleaved", "once"):
            tables = {"cos": _spread(cos, style), "sin": _spread(sin, style)}
            made = {"table": number, "style": style, "axes": axes}
            if len(value) == 2:
                if _all_equal(plain, list(tables.values())):
                    return {**made, "part": "pair"}
            elif value[0].is_complex():
                if style == "once" and _all_equal(plain, [torch.complex(cos, sin)]):
                    return {**made, "part": "complex"}
            else:
                for part, table in tables.items():
                    if _all_equal(plain, [table]):
                        return {**made, "part": part}
    return None


def _spread(table: Tensor, style: str) -> Tensor:
    if style == "half":
        return torch.cat((table, table), -1)
    return table.repeat_interleave(2, -1) if style == "interleaved" else table


def _all_equal(ours: list[Any], theirs: list[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _mask(value: Tensor, site: Site) -> Any:
    """A mask [.., S, S] that hides the future, and what is out of a window or chunk."""
    batch, length = _sizes(site)
    first = value.reshape(-1, length, length)
    if not torch.equal(first, first[:1].expand_as(first)):
        return None
    row = first[0]
    axes = "".join("b" if size == batch and place == 0 else str(size) for place, size in enumerate(value.shape[:-2]))
    if any(size > 9 for size in value.shape[:-2]):
        return None
    made: dict[str, Any] = {"axes": axes.replace("1", "b", 1) if axes.startswith("1") else axes}
    made["axes"] += "st"
    if value.is_floating_point():
        if not bool(((row == 0) | (row < -1e30)).all()):
            return None
        visible, made["mask"] = row == 0, "added"
    else:
        place = torch.arange(length)
        for sign in (1, -1):
            if value.dtype == torch.int64 and torch.equal(row, sign * (place[:, None] - place)):
                return {"distance": sign, "axes": made["axes"]}
        if value.dtype != torch.bool and not bool(((row == 0) | (row == 1)).all()):
            return None
        visible = row.bool()
        made["mask"], made["dtype"] = "visible", str(value.dtype).removeprefix("torch.")
        if bool(visible[0, 0].logical_not()):
            visible, made["mask"] = ~visible, "hidden"
    place = torch.arange(length)
    age = place[:, None] - place
    if bool(visible.all()):
        return {**made, "full": True, "window": None, "chunk": None}
    if torch.equal(visible, age >= 0):
        return {**made, "window": None, "chunk": None}
    widest = int(visible.sum(-1).max())
    if torch.equal(visible, (age >= 0) & (age < widest)):
        return {**made, "window": _field(site, widest), "chunk": None}
    if torch.equal(visible, (age >= 0) & (place[:, None] // widest == place // widest)):
        return {**made, "window": None, "chunk": _field(site, widest)}
    return None


def _field(site: Site, value: int) -> Evidence:
    """Where a width of a mask comes from: a config field, an attribute, or just the mask."""
    found = site.explain(value)
    found.sort(key=lambda evidence: not evidence.label.startswith("config "))
    return found[0] if found else literal(value, "the mask's band")


def _without_mask(what: Any) -> Any:
    return {"value": None} if isinstance(what, dict) and "mask" in what else what


def _resolver(handed: Any) -> Callable[[nn.Module, Any], Any]:
    def resolve(module: nn.Module, config: Any) -> Any:
        def walk(value: Any) -> Any:
            if isinstance(value, Evidence):
                return value.resolve(module, config)
            if isinstance(value, dict):
                return {name: walk(held) for name, held in value.items()}
            return [walk(held) for held in value] if isinstance(value, list) else value

        return walk(handed)

    return resolve


def _shown(handed: Any) -> str:
    """The description in a line, evidence by its label."""
    if isinstance(handed, Evidence):
        return handed.label
    if isinstance(handed, dict):
        return "{" + ", ".join(f"{name}: {_shown(held)}" for name, held in handed.items()) + "}"
    return "[" + ", ".join(map(_shown, handed)) + "]" if isinstance(handed, list) else str(handed)


# --- what it is constructed with


class _Probe:
    """A config that notes which of its fields are read. Nested configs are probes too."""

    def __init__(self, config: Any, names: dict[str, Any], prefix: str = ""):
        vars(self).update(_config=config, _names=names, _prefix=prefix)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        path = self._prefix + name
        if inspect.ismethod(value):
            raise LiftError(f"it calls config.{path}(), which is code of its config class")
        self._names[path] = True
        if isinstance(value, Sequence) and not isinstance(value, (str, list, tuple)):
            return _ProbeList(value, self._names, f"{path}.")
        return _Probe(value, self._names, f"{path}.") if _is_config(value) else value


class _ProbeList:
    """Configs by number or word, as probes."""

    def __init__(self, held: Any, names: dict[str, Any], prefix: str):
        self._held, self._names, self._prefix = held, names, prefix

    def __getitem__(self, key: Any) -> Any:
        self._names[f"{self._prefix}{key}"] = True
        return _Probe(self._held[key], self._names, f"{self._prefix}{key}.")


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(type(value), "model_type")


class _Reads:
    """Which fields of which constructor argument the copy reads, and the settings made of them."""

    def __init__(self, cls: type[nn.Module], made: Lift):
        self.cls, self.lift = cls, made
        self.names: dict[str, dict[str, Any]] = {}

    def probes(self, arguments: Mapping[str, Any], names: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The arguments, configs as probes that note what is read into `names`, by argument."""
        return {
            name: _Probe(value, names.setdefault(name, {})) if _is_config(value) else value
            for name, value in arguments.items()
        }

    def settings(self, module: nn.Module, config: Any) -> dict[str, Any]:
        """The constructor's arguments for this module, as plain data. Raises ValueError for what is none."""
        arguments = constructed_with(module)
        if arguments is None:
            raise ValueError(f"how {type(module).__name__} was constructed is not known")
        arguments = arguments | self._number(module, arguments)
        names = self.construct(arguments)
        settings = {}
        for name, value in arguments.items():
            if _is_config(value):
                settings[name] = _namespace(value, names.get(name, {}) | self.names.get(name, {}))
            else:
                settings[name] = _plain(name, value)
        return settings

    def construct(self, arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Constructs the copy without memory: the fields that it reads then, not the same for every module."""
        names: dict[str, dict[str, Any]] = {}
        with torch.device("meta"):
            try:
                self.cls(**self.probes(arguments, names))
            except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, NotImplementedError) as error:
                raise ValueError(f"{self.cls.__name__} cannot be constructed: {error}") from None
        return names

    def _number(self, module: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The layer's number as that of the first module that is the same in all but its number: where nothing reads
        it, equal layers have equal settings."""
        others = built_like(module)
        for name, value in arguments.items():
            if type(value) is not int or name in self._read_numbers(module, others, name):
                continue
            alike = [
                held[name]
                for other, held in others
                if type(held.get(name)) is int
                and all(_same(held.get(key), arguments[key]) for key in arguments if key != name)
                and _signature(other, held[name]) == _signature(module, value)
            ]
            if len(alike) > 1:
                return {name: min(alike)}
        return {}

    def _read_numbers(self, module: nn.Module, others: list[tuple[nn.Module, dict]], name: str) -> set[str]:
        """{name} if an attribute that holds the number is read outside constructors."""
        members = [(made, held[name]) for made, held in others if type(held.get(name)) is int]
        holders = None
        for made, number in members:
            held = {
                key
                for part in made.modules()
                for key, value in vars(part).items()
                if type(value) is int and value == number
            }
            holders = held if holders is None else holders & held
        return {name} if (holders or set()) & _read_in_calls(self.lift) else set()


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bool, type(None), list, tuple)) and a == b)


def _signature(module: nn.Module, number: int) -> tuple:
    """All that an instance holds, its number left out."""
    entries: list[tuple] = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    for path, part in module.named_modules():
        for name, value in sorted(vars(part).items()):
            if isinstance(value, (bool, int, float, str, type(None), list, tuple)) and not name.startswith("_"):
                own = type(value) is int and value == number
                entries.append((path, name, "its number" if own else repr(value)))
    return tuple(entries)


@functools.lru_cache(maxsize=256)
def _read_in_calls(made: Lift) -> frozenset[str]:
    """Attributes that the copy reads outside constructors."""
    found: set[str] = set()
    for definition in made.definitions:
        for node in ast.walk(ast.parse(definition.text)):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                found |= {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load)
                }
    return frozenset(found)


def _namespace(config: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are read, as `settings_value` understands them."""
    values: dict[str, Any] = {}
    for head in dict.fromkeys(path.partition(".")[0] for path in sorted(names)):
        inner = {name.partition(".")[2]: True for name in names if name.startswith(f"{head}.")}
        if not hasattr(config, head):
            continue
        value = getattr(config, head)
        if _is_config(value):
            values[head] = _namespace(value, inner)
        elif inner:
            keys = dict.fromkeys(path.partition(".")[0] for path in sorted(inner))
            picked = {key: {n.partition(".")[2]: True for n in inner if n.startswith(f"{key}.")} for key in keys}
            held = {key: value[int(key) if key.isdigit() else key] for key in keys}
            values[head] = {"picked": {key: _namespace(held[key], picked[key]) for key in keys}}
        else:
            values[head] = _plain(head, value)
    return {"namespace": values}


def _plain(name: str, value: Any) -> Any:
    """Plain data. Raises ValueError for what cannot be written down."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [_plain(name, held) for held in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(name, held) for key, held in dict(value).items()}
    raise ValueError(f"{name} is {type(value).__name__}, which is no plain data")


def _read_in_a_call(candidate: Candidate, cls: type[nn.Module], site: Site, reads: _Reads) -> None:
    """Calls the copy on the captured input with probes for configs. Raises LiftError where what it reads cannot be
    plain data."""
    from dayzero.onboard.prove.block import block_function  # which proposes candidates itself

    spec = candidate.spec(site.module, site.config)
    classes, arguments = classes_of(merge(candidate.lifts)), constructed_with(site.module) or {}
    inside = {path: held.build(classes) for path, held in (spec.arguments["replace"] or {}).items()}
    given = {name: spec.arguments[name] for name in ("handed", "tables", "together", "flat")}
    block = Lifted(cls, reads.probes(arguments, reads.names), replace=inside, **given).to(torch.float64)
    for names in reads.names.values():
        names.clear()  # what is read in constructing is seen for each module anew
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.zero_()
        try:
            block_function(site, block)(site.call.hidden)
        except LiftError:
            raise
        except Exception:  # what does not run on zeros is tried on its weights by the prover
            return
