"""The eager reference: transformers' own implementation, in float64, with every float32 island promoted and counted.

Only classes that transformers ships are built here; code that comes with a checkpoint is never imported.
"""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dayzero.runtime.errors import InputError

# Reads from these files are bookkeeping of the library (saving, dispatch, defaults), not the model's arithmetic.
_BOOKKEEPING = ("configuration_utils.py", "modeling_utils.py", "configuration_auto.py", "auto_factory.py", "_attn_impl")


class UnknownArchitecture(Exception):
    """transformers has no class for this config; the message says why."""


class Promote(TorchFunctionMode):
    """Turns every cast to float32 into one to float64, and counts them: a float64 proof needs no float32 islands.

    The counts say where the reference insists on float32, which is evidence for our own precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
            self.casts[name] += 1
        if name == "float":
            self.casts[name] += 1
            return args[0].double()
        if name in {"to", "type"} and any(arg is torch.float32 for arg in args):
            self.casts[name] += 1
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)


class ForceTopK(TorchFunctionMode):
    """Replaces the indices of the n-th `topk` call by `choices[n]` (rows as in the call), values gathered to match."""

    def __init__(self, choices: list[Tensor]):
        super().__init__()
        self.choices, self.calls = choices, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "topk":
            scores = args[0]
            index = self.choices[self.calls].reshape(*scores.shape[:-1], -1)
            self.calls += 1
            return torch.return_types.topk((scores.gather(-1, index), index))
        return func(*args, **kwargs)


def load_config(config: Mapping[str, Any], reads: set[str] | None = None) -> Any:
    """transformers' config object for the content of a config.json.

    Raises UnknownArchitecture for a model_type that transformers does not have, InputError for values that it refuses.

    reads: a set that fills up with the names of the fields that configuration and model code read.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    # Asked first: without a model_type AutoConfig would look for one in the folder's name.
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnknownArchitecture(f"transformers has no model_type {model_type!r}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)))
        try:
            loaded = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise InputError(
                "config.json", found=_first_line(error), expected=f"what transformers accepts for {model_type}"
            ) from None
    if reads is not None:
        loaded = _recording(type(loaded), reads).from_dict(dict(config))
    loaded._attn_implementation = "eager"
    loaded._experts_implementation = "eager"
    return loaded


def _recording(cls: type, reads: set[str]) -> Any:
    """A subclass whose instances note every field that anything but the library's bookkeeping reads."""

    class Recorded(cls):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_") and not sys._getframe(1).f_code.co_filename.endswith(_BOOKKEEPING):
                reads.add(name)
            return super().__getattribute__(name)

    Recorded.__name__, Recorded.__qualname__ = cls.__name__, cls.__qualname__
    return Recorded


def _first_line(error: Exception) -> str:
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A validation error says what is wrong on its last line.
    return (": ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines) or type(error).__name__)[:300]


def model_class(config: Any, architectures: list[str]) -> type[nn.Module]:
    """The transformers class that `architectures` names. Raises UnknownArchitecture."""
    import transformers

    for name in architectures:
        found = getattr(transformers, name, None) if name.endswith("ForCausalLM") else None
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    listed = ", ".join(architectures) or "none"
    raise UnknownArchitecture(f"transformers has no causal language model for architectures: {listed}")


def build(config: Mapping[str, Any], *, device: str = "cpu", record: bool = False) -> tuple[nn.Module, set[str]]:
    """The reference model in float64, evaluation mode, and the config fields it read (empty without `record`).

    Raises UnknownArchitecture where transformers has no such model, InputError where it cannot be built.
    """
    reads: set[str] = set()
    loaded = load_config(config, reads if record else None)
    cls = model_class(loaded, list(config.get("architectures") or []))
    previous = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with Promote(), torch.device(device):
            model = cls(loaded)
    except Exception as error:
        found = f"{cls.__name__} refuses it: {_first_line(error)}"
        raise InputError("config.json", found=found, expected="a config that its own model accepts") from None
    finally:
        torch.set_default_dtype(previous)
    return model.to(torch.float64).eval(), reads


def redraw(model: nn.Module, generator: torch.Generator, gain: float = 1.0) -> None:
    """New random values for every parameter and every floating-point buffer that is saved, none of them zero or alike.

    Matrices are scaled to keep the size of what passes through, vectors spread around one. Values are
    float32-representable, so that a float32 file holds them exactly.
    """
    with torch.no_grad():
        for tensor in state_of(model).values():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.ndim >= 2:
                tensor.copy_((noise * gain / tensor.shape[-1] ** 0.5).float())
            else:
                tensor.copy_((1.0 + 0.3 * gain * noise).float())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, floating point only, detached and sharing memory: a bias that the optimizer
    never sees is as much of what the module computes as a weight. A tensor under two names appears once."""
    seen: set[int] = set()
    state = {}
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and (not tensor.numel() or tensor.data_ptr() not in seen):
            seen.add(tensor.data_ptr())
            state[name] = tensor.detach()
    return state


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or advice from transformers."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def on_disk(model: nn.Module, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors as transformers' `save_pretrained` writes them: its names, its layouts.

    values: other tensors of the parameters' shapes to write instead, such as gradients.
    """
    from safetensors.torch import load_file

    state = dict(values) if values is not None else None
    with tempfile.TemporaryDirectory() as folder, quiet():
        model.save_pretrained(folder, state_dict=state, safe_serialization=True)  # type: ignore[operator]
        return {
            name: tensor.clone()
            for file in sorted(Path(folder).glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }


def run(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits [B, S, V] of the reference for ids [B, S], float32 islands promoted."""
    with Promote():
        return model(input_ids=ids, use_cache=False, **kwargs).logits
