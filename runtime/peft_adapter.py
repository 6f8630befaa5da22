"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with the checkpoint's module names."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, read_headers
from dayzero.runtime.weights import BoundRule, Concat, Rule, Shape, Stack, Stored, bind

WEIGHT = ".weight"


def write_adapter(
    out: Path,
    source: Path,
    rules: Sequence[Rule],
    adapters: Mapping[str, tuple[Tensor, Tensor]],
    rank: int,
    alpha: float,
    dropout: float = 0.0,
) -> list[str]:
    """Fills the folder `out` and returns the names of the adapted modules in the checkpoint.

    adapters: module of the model, such as "layers.0.mixer.query" -> (A [rank, in], B [out, rank]). Where a module's
    weight is several of the checkpoint's side by side, each gets A and its own rows of B.

    Where a module is called as the routed experts' own (gate_proj of a dense layer or a shared expert), PEFT would take
    the name for the experts of transformers 5: the config then targets the parameter, which allows no dropout.

    Raises InputError for a module whose weight the checkpoint stores in a way that PEFT cannot adapt.
    """
    shapes = {name: header.shape for name, header in read_headers(source).items()}
    bound = bind(rules)
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    for module, (a, b) in adapters.items():
        if module + WEIGHT not in bound:
            raise InputError(f"weights.py: {module}{WEIGHT}", found="no rule for it", expected="one rule")
        for theirs, rows in _parts(bound[module + WEIGHT], shapes):
            modules.append(theirs)
            tensors[f"base_model.model.{theirs}.lora_A.weight"] = a.detach().to("cpu").clone()
            tensors[f"base_model.model.{theirs}.lora_B.weight"] = b.detach()[rows].to("cpu").contiguous()
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    stacked = {name for rule in bound.values() if isinstance(rule.source, Stack) for name in rule.names()}
    routed = {_leaf(name.removesuffix(WEIGHT)) for name in stacked}
    plain = [module for module in modules if _leaf(module) not in routed]
    by_parameter = sorted(module + WEIGHT for module in modules if _leaf(module) in routed)
    config = {
        "base_model_name_or_path": str(source),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if by_parameter else dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": target_modules(plain, shapes),
        "target_parameters": by_parameter or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return modules


def without_place(headers: Mapping[str, TensorHeader], rules: Sequence[Rule], modules: Sequence[str]) -> list[str]:
    """Those of the adapted `modules` of the model that `write_adapter` would refuse. headers: the source's."""
    shapes, bound = {name: header.shape for name, header in headers.items()}, bind(rules)

    def refused(module: str) -> bool:
        try:
            return not list(_parts(bound[module + WEIGHT], shapes))
        except InputError:
            return True

    return [module for module in modules if module + WEIGHT in bound and refused(module)]


def target_modules(modules: Sequence[str], shapes: Mapping[str, Shape]) -> list[str]:
    """The short names (q_proj) where these name exactly `modules` among the checkpoint's, else the whole paths."""
    others = {name.removesuffix(WEIGHT) for name in shapes if name.endswith(WEIGHT)} - set(modules)
    short = {_leaf(module) for module in modules}
    return sorted(modules) if short & {_leaf(other) for other in others} else sorted(short)


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _parts(rule: BoundRule, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, slice]]:
    """(module in the checkpoint, its rows of the parameter) for each tensor that the parameter is made of."""
    source = rule.source
    parts = source.parts if isinstance(source, Concat) and source.dim == 0 else (source,)
    start = 0
    for part in parts:
        name = next(part.names(rule.index))
        if not isinstance(part, Stored) or not name.endswith(WEIGHT):
            raise InputError(
                rule.parameter,
                found=f"an adapter on {name}, which is not stored as a plain linear weight",
                expected="a weight [out, in]",
                hint="PEFT has no module to adapt there. Export merged weights instead.",
            )
        rows = part.shape(shapes, rule.index)[0]
        yield name.removesuffix(WEIGHT), slice(start, start + rows)
        start += rows
