"""Which config fields a reference reads, and which of its modules reads them.

The config object, the configs nested in it and the dicts among its values are given classes that note every read; so
are copies that the reference makes of them.
"""

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

# In the library, models and their configs compute; of the rest only these do. Everything else is bookkeeping: saving,
# dispatch, defaults, validation.
_COMPUTING = ("modeling_rope_utils.py", "masking_utils.py", "integrations/moe.py")
_LIBRARIES = ("/transformers/", "/huggingface_hub/", "/copy.py", "/dataclasses.py", "<string>")
_OURS = str(Path(__file__).parents[1])
_FRAMES = 8  # looked at above a read for the module that it is made for


@dataclass
class Reads:
    """fields: dotted names from the top of config.json, such as `text_config.rope_parameters.rope_theta`.
    by: field -> the modules that read it; a read outside any module is by none. text: where the text decoder's fields
    stand, such as "text_config."; what stands there counts under its name without that too."""

    fields: set[str] = field(default_factory=set)
    text: str = ""
    by: dict[str, list[nn.Module]] = field(default_factory=dict, repr=False)

    def note(self, name: str, frame: types.FrameType) -> None:
        """One read, from the code in `frame`."""
        if _is_bookkeeping(frame.f_code.co_filename):
            return
        self.fields.add(name)
        if self.text and name.startswith(self.text):
            self.fields.add(name.removeprefix(self.text))
        reader = _module_above(frame)
        held = self.by.setdefault(name, [])
        if reader is not None and not any(reader is other for other in held):
            held.append(reader)

    def paths(self, model: nn.Module) -> dict[str, list[str]]:
        """Field -> paths in `model` of the modules that read it, sorted."""
        names = {id(module): path for path, module in model.named_modules()}
        return {
            name: sorted(names[id(module)] for module in modules if id(module) in names)
            for name, modules in self.by.items()
        }


def _is_bookkeeping(file: str) -> bool:
    if "/transformers/models/" in file and "/models/auto/" not in file:
        return False
    return (any(part in file for part in _LIBRARIES) and not file.endswith(_COMPUTING)) or file.startswith(_OURS)


def _module_above(frame: types.FrameType | None) -> nn.Module | None:
    for _ in range(_FRAMES):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module):
                return first
        frame = frame.f_back
    return None


def record(config: Any, reads: Reads, prefix: str = "") -> None:
    """From now on every read of a field of `config`, and of what is nested in it, is noted.

    A config that cannot be given another class (one with slots, say) raises TypeError.
    """
    held = vars(config)
    for name, value in list(held.items()):
        if name.startswith("_"):
            continue
        if _is_config(value):
            record(value, reads, f"{prefix}{name}.")
        elif type(value) is dict and value and all(isinstance(key, str) for key in value):
            held[name] = _Noted(value, reads, f"{prefix}{name}.")
    config.__class__ = _recording(type(config), reads, prefix)


@contextlib.contextmanager
def noting_construction(reads: Reads) -> Iterator[Callable[[Any], None]]:
    """Reads that configs make of themselves while they are built: one field set by another. Yields a function that is
    told the finished config, and notes what was read of it and of what is nested in it."""
    from transformers import PreTrainedConfig

    seen: list[tuple[Any, str, types.FrameType]] = []
    original = PreTrainedConfig.__getattribute__

    def noting(self: Any, name: str) -> Any:
        frame = sys._getframe(1)
        if not name.startswith("_") and not _is_bookkeeping(frame.f_code.co_filename):
            seen.append((self, name, frame))
        return original(self, name)

    def finished(config: Any, prefix: str = "") -> None:
        for made, name, frame in seen:
            if made is config:
                reads.note(prefix + name, frame)
        for name, value in list(vars(config).items()):
            if _is_config(value):
                finished(value, f"{prefix}{name}.")

    PreTrainedConfig.__getattribute__ = noting  # type: ignore[method-assign]
    try:
        yield finished
    finally:
        PreTrainedConfig.__getattribute__ = original  # type: ignore[method-assign]


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(type(value), "model_type")


def _recording(cls: type, reads: Reads, prefix: str) -> type:
    class Recorded(cls):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_"):
                reads.note(prefix + name, sys._getframe(1))
            return super().__getattribute__(name)

    Recorded.__name__, Recorded.__qualname__, Recorded.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Recorded


class _Noted(dict):
    """A dict of settings whose reads are noted under its own name."""

    def __init__(self, values: dict[str, Any], reads: Reads, prefix: str):
        super().__init__(values)
        self._reads, self._prefix = reads, prefix

    def __getitem__(self, key: Any) -> Any:
        self._reads.note(f"{self._prefix}{key}", sys._getframe(1))
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._reads.note(f"{self._prefix}{key}", sys._getframe(1))
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._reads.note(f"{self._prefix}{key}", sys._getframe(1))
        return super().pop(key, *default)

    def items(self) -> Any:
        self._note_all(sys._getframe(1))
        return super().items()

    def values(self) -> Any:
        self._note_all(sys._getframe(1))
        return super().values()

    def _note_all(self, frame: types.FrameType) -> None:
        for key in self:
            self._reads.note(f"{self._prefix}{key}", frame)

    def __copy__(self) -> "_Noted":
        return _Noted(dict(self), self._reads, self._prefix)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Noted":
        return _Noted(copy.deepcopy(dict(self), memo), self._reads, self._prefix)
