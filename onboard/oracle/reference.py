"""The eager reference: the implementation that a checkpoint was made for, in float64, every float32 island promoted;
what the islands are, a run in bfloat16 shows (`onboard.align.precision`).

It is transformers' own class, or code that ships with the checkpoint where this process may run that
(`oracle.remote_code.using`); both are built and run through the functions here. What its code keeps from training is
replaced here only (`oracle.training_modes`), and its modules' constructor arguments are noted (`oracle.constructed`).
"""

import contextlib
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle import remote_code
from dayzero.onboard.oracle.config_reads import Reads, noting_construction, record
from dayzero.onboard.oracle.constructed import constructed_with, noting_arguments
from dayzero.onboard.oracle.training_modes import allow_gradients, replaced
from dayzero.runtime.errors import InputError
from dayzero.runtime.nn.promote import Promote

__all__ = [
    "Promote", "Reads", "UnknownArchitecture", "build", "constructed_with", "encoder_path", "inputs",
    "is_computed", "load_config", "model_class", "never_trained", "on_disk", "quiet", "redraw", "replaced", "run",
    "state_of", "text_config", "text_model", "text_prefix",
]  # fmt: skip


class UnknownArchitecture(Exception):
    """transformers has no class for this config; the message says why."""


def load_config(config: Mapping[str, Any], reads: Reads | None = None) -> Any:
    """The config object for the content of a config.json: transformers', or the one of the checkpoint's own code.

    Raises UnknownArchitecture for a model_type that nothing here has, InputError for values that are refused.

    reads: fills up with the fields that configuration and model code read.
    """
    content = dict(config)
    code = remote_code.current()
    own = code.config_class() if code is not None else None
    try:
        with noting_construction(reads or Reads()) as finished:
            loaded = own.from_dict(content) if own is not None else _native_config(content)  # type: ignore[attr-defined]
    except (InputError, UnknownArchitecture):
        raise
    except Exception as error:
        expected = f"what {own.__name__ if own else 'transformers'} accepts for {config.get('model_type')}"
        raise InputError("config.json", found=_first_line(error), expected=expected) from None
    for part in _configs(loaded):
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
    if reads is not None:
        reads.text = text_prefix(loaded)
        finished(loaded)
        record(loaded, reads)
    return loaded


def _native_config(content: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    # Asked first: without a model_type AutoConfig would look for one in the folder's name.
    model_type = content.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(content))
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # What config.json calls itself proves nothing; the class that it names has a config class of its own.
    named = content.get("architectures") or [] if model_type is None or isinstance(model_type, str) else []
    for name in named:
        if (cls := _exported(name)) is not None and isinstance(getattr(cls, "config_class", None), type):
            return cls.config_class.from_dict({k: v for k, v in content.items() if k != "model_type"})  # type: ignore[attr-defined]
    raise UnknownArchitecture(f"transformers has no model_type {model_type!r}")


def _configs(config: Any) -> Iterator[Any]:
    """The config and those nested in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(type(value), "model_type") and hasattr(value, "to_dict"):
            yield from _configs(value)


def _first_line(error: Exception) -> str:
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A validation error says what is wrong on its last line.
    return (": ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines) or type(error).__name__)[:300]


def model_class(config: Any, architectures: list[str]) -> type[nn.Module]:
    """The class of the language model that predicts the next token: the checkpoint's own where this process may run it,
    else the one that `architectures` names, else, where it names none or transformers runs such configs by another
    model's class, the one that transformers has for them.

    Raises UnknownArchitecture: a class that is named and not there is another model than the one that is.
    """
    if (code := remote_code.current()) is not None:
        return code.model_class()
    others = []
    for name in architectures:
        found = _exported(name) or _beside(config, name)
        if found is not None and _predicts_tokens(found):
            return found
        others.append(f"{name} does not predict tokens" if found is not None else f"there is no {name}")
    mapped = _mapped(config)
    if mapped is not None and (not architectures or not _has_model_file(config)):
        return mapped
    listed = ", ".join(others) or "none is named"
    has = f"; for this model_type there is {mapped.__name__}" if mapped is not None else ""
    raise UnknownArchitecture(f"transformers has no causal language model for architectures: {listed}{has}")


def _exported(name: str) -> type | None:
    import transformers

    found = getattr(transformers, name, None) if name.isidentifier() else None
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _beside(config: Any, name: str) -> type | None:
    """A class of the model file that belongs to the config's own; not every one is exported, and some are spelt with
    other capitals or underscores than checkpoints spell them."""
    if not _has_model_file(config):
        return None
    with contextlib.suppress(ImportError):
        file = vars(importlib.import_module(_model_file(config)))
        spelt = [key for key in file if _plain(key) == _plain(name)]
        found = file.get(name if name in spelt else spelt[0]) if spelt else None
        return found if isinstance(found, type) and issubclass(found, nn.Module) else None
    return None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _model_file(config: Any) -> str:
    return type(config).__module__.replace(".configuration_", ".modeling_")


def _has_model_file(config: Any) -> bool:
    """Whether the file of the config's class has one with models beside it."""
    return ".configuration_" in type(config).__module__ and importlib.util.find_spec(_model_file(config)) is not None


def _predicts_tokens(cls: type) -> bool:
    """Whether the class gives logits for text: by its head, for causal or conditional generation."""
    return cls.__name__.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))


def _mapped(config: Any) -> type | None:
    """What transformers' own tables have for the config's class."""
    from transformers.models.auto import modeling_auto

    tables = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM")
    classes = [cls for cls in type(config).__mro__ if getattr(cls, "model_type", None)]
    for table in tables:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING")
        for cls in classes:
            if cls in mapping:
                found = mapping[cls]
                return found[0] if isinstance(found, (tuple, list)) else found
    return None


def text_config(model: nn.Module) -> Any:
    """The config of the text decoder: the model's own, or the one nested in it."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def text_prefix(config: Any) -> str:
    """Where the text decoder's fields stand in config.json: "" at the top, or such as "text_config."."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((f"{name}." for name, value in vars(config).items() if value is text), "")


def text_model(model: nn.Module) -> nn.Module:
    """The part of the model whose config is the text config; the model itself where it has no other parts."""
    text = text_config(model)
    if text is model.config:
        return model
    held = [module for module in model.modules() if hasattr(module, "config") and module is not model]
    for match in (lambda config: config is text, lambda config: type(config) is type(text)):
        for module in held:  # outer modules come first
            if match(module.config) and any(isinstance(part, nn.Embedding) for part in module.modules()):
                return module
    return model


def build(config: Mapping[str, Any], *, device: str = "cpu", record: bool = False) -> tuple[nn.Module, set[str]]:
    """The reference model in float64, evaluation mode, and the config fields it reads (empty without `record`): dotted
    names from the top of config.json, and those of the text config by themselves. The set grows when the model runs.

    `model.config_reads` says which module read what. Raises UnknownArchitecture where there is no such model,
    InputError where it cannot be built.
    """
    reads = Reads() if record else None
    loaded = load_config(config, reads)
    cls = model_class(loaded, list(config.get("architectures") or []))
    previous = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with Promote(), torch.device(device), noting_arguments():
            model = cls(loaded)
    except Exception as error:
        found = f"{cls.__name__} refuses it: {_first_line(error)}"
        raise InputError("config.json", found=found, expected="a config that its own model accepts") from None
    finally:
        torch.set_default_dtype(previous)
    model = model.to(torch.float64).eval()
    allow_gradients(model)
    if reads is None:
        return model, set()
    model.config_reads = reads  # type: ignore[assignment]
    return model, reads.fields


def redraw(model: nn.Module, generator: torch.Generator, gain: float = 1.0) -> None:
    """New random values for every parameter and every floating-point buffer that is saved, none of them zero or alike.

    Matrices are scaled to keep the size of what passes through, vectors spread around one. Vectors that are never
    trained (selection biases) spread around zero, as wide as the scores that they are added to; buffers whose
    values differ when the model is built are tables that its constructor computed, and stay. Whole numbers are taken
    as names of the rows of a matrix beside them: a row of a table gets different ones. Values are
    float32-representable, so that a float32 file holds them exactly.
    """
    frozen = {tensor.data_ptr() for tensor in never_trained(model)}
    with torch.no_grad():
        for name, tensor in state_of(model).items():
            if not tensor.is_floating_point():
                _redraw_names(model, name, tensor, generator)
                continue
            if is_computed(model, name):
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.data_ptr() in frozen:
                tensor.copy_((0.15 * gain * noise - 0.05).float())
            elif tensor.ndim >= 2:
                tensor.copy_((noise * gain / tensor.shape[-1] ** 0.5).float())
            else:
                tensor.copy_((1.0 + 0.3 * gain * noise).float())


def is_computed(model: nn.Module, name: str) -> bool:
    """Whether this buffer held different values when it was first seen: noted on it, since it may be redrawn later.
    Two of them are none: a bias of zeros may start with another value for a class of its own."""
    owner, _, leaf = name.rpartition(".")
    buffer = model.get_submodule(owner)._buffers.get(leaf)
    if buffer is None:
        return False
    if not hasattr(buffer, "_computed"):
        buffer._computed = buffer.unique().numel() > 2  # type: ignore[attr-defined]
    return buffer._computed  # type: ignore[attr-defined]


def never_trained(module: nn.Module) -> list[Tensor]:
    """Saved vectors that no optimizer sees, such as selection biases: buffers, and parameters without a gradient."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return [
        tensor
        for name, tensor in state_of(module).items()
        if name not in trained and tensor.is_floating_point() and tensor.numel() == max(tensor.shape, default=0) > 1
        if not is_computed(module, name)
    ]


def _redraw_names(model: nn.Module, name: str, table: Tensor, generator: torch.Generator) -> None:
    """Distinct random names in every row of the table [..., K], below the rows of the narrowest matrix beside it."""
    owner = model.get_submodule(name.rpartition(".")[0])
    rows = [p.shape[0] for p in owner.parameters(recurse=False) if p.ndim == 2 and p.shape[0] >= table.shape[-1]]
    if table.ndim < 2 or not rows:
        return
    order = torch.rand(*table.shape[:-1], min(rows), generator=generator).argsort(-1)
    table.copy_(order[..., : table.shape[-1]])


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, detached and sharing memory: a bias that the optimizer never sees, or a
    table of whole numbers, is as much of what the module computes as a weight. What has two names appears once."""
    seen: set[tuple[int, int]] = set()
    state = {}
    for name, tensor in module.state_dict().items():
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset())  # tensors without values have no address
        if (tensor.ndim or tensor.is_floating_point()) and (not tensor.numel() or place not in seen):
            seen.add(place)
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


def encoder_path(model: nn.Module) -> str | None:
    """Where the encoder is that the text decoder looks at; None for a model without one."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = model.get_encoder()  # type: ignore[operator]
    return next((path for path, module in model.named_modules() if module is encoder), None)


def inputs(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """The arguments with which the text decoder reads ids [B, S] and nothing else."""
    made: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = ids
    return made


# Classes for several kinds of input whose forward fails when there is only text.
_FAIL_ON_TEXT: set[type] = set()


def logits_of(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits [B, S, V] of the reference for ids [B, S].

    A class for several kinds of input may fail on what its language model returned for text, where it looks for what
    images left. Its language model, a class that predicts tokens by itself, is called instead from then on.
    """
    if type(model) not in _FAIL_ON_TEXT:
        try:
            return model(**inputs(model, ids), **kwargs).logits
        except AttributeError:
            if _language_model(model) is None:
                raise
            _FAIL_ON_TEXT.add(type(model))
    called = _language_model(model)
    assert called is not None
    return called(**inputs(called, ids), **kwargs).logits


def fails_on_text(model: nn.Module) -> str:
    """What is called in place of the reference, "" where it is called itself."""
    called = _language_model(model) if type(model) in _FAIL_ON_TEXT else None
    return (
        "" if called is None else f"{type(model).__name__} fails on text alone: its {type(called).__name__} is called"
    )


def _language_model(model: nn.Module) -> nn.Module | None:
    """The only part that is a model for the next token of text."""
    found = [m for m in model.modules() if m is not model and hasattr(m, "config") and _predicts_tokens(type(m))]
    return found[0] if len(found) == 1 else None


def run(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    """`logits_of`, float32 islands promoted."""
    with Promote():
        return logits_of(model, ids, **kwargs)
