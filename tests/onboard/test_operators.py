"""The operators of a package: those that the model calls, at the sizes at which it calls them, and no others."""

import odd_specs
import pytest
import torch

from dayzero.kernels.registry import standing_in
from dayzero.onboard.operators import operator_calls
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.spec import BlockSpec, LayerKind, LayerRun, ModelSpec


def sizes(spec):
    return {operator.name: operator.sizes for operator in operator_calls(spec)}


@pytest.mark.parametrize("name", sorted(odd_specs.NAMES))
def test_what_a_real_pass_calls_and_nothing_else(name):
    spec = odd_specs.read(name)
    model = spec.build()
    initialise(model, 0.2, seed=0)
    called = {}

    def count(operator, *args, **kwargs):
        shape = args[1].shape if operator.name == "grouped_gemm" else args[0].shape[-1:]
        called.setdefault(operator.name, set()).add(tuple(shape))
        return operator.select(*args, **kwargs).call(*args, **kwargs)

    with standing_in(count), torch.no_grad():
        model(torch.arange(12) % spec.vocabulary, torch.tensor([0, 7, 12]))
    found = {name: {_shape(size) for size in held} for name, held in sizes(spec).items()}
    assert found == called


def _shape(size):
    return (size["experts"], size["rows"], size["columns"]) if "experts" in size else (size["width"],)


def model_of(norm, kinds, **more):
    """Five layers of each kind, the last kind first."""
    runs = [LayerRun(first=5 * place, count=5, kind=kind) for place, kind in enumerate(reversed(range(len(kinds))))]
    return ModelSpec(
        name="made",
        checkpoint=odd_specs.NO_CHECKPOINT,
        vocabulary=11,
        hidden=16,
        tied=True,
        layer_kinds=kinds,
        layers=runs,
        norm=norm,
        rules=[],
        **more,
    )


def test_constants_of_norms_and_gates_are_told_apart():
    norm = BlockSpec(block="RMSNorm", arguments={"width": 16, "eps": 1e-5, "offset": 1.0})
    bare = BlockSpec(block="RMSNorm", arguments={"width": 16, "eps": 1e-6, "scaled": False})
    clamped = BlockSpec(block="ClampedGLU", arguments={"act": "silu", "limit": 7.0})
    feed_forwards = [
        BlockSpec(block="GatedFeedForward", arguments={"hidden": 16, "width": 24, "act": act})
        for act in (clamped, "gelu")
    ]
    attention = BlockSpec(
        block="GroupedQueryAttention",
        arguments={"hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "scale": 0.3, "rotary": None},
    )
    spec = model_of(norm, [LayerKind.pre_norm(norm, attention, bare, ffn) for ffn in feed_forwards])
    assert sizes(spec) == {
        "rms_norm": [
            {"width": 16, "eps": 1e-5, "offset": 1.0},
            {"width": 16, "eps": 1e-6, "offset": 0.0, "scaled": False},
        ],
        "swiglu": [{"width": 24, "limit": 7.0}],
    }


COPIED = """
import torch


class Picky(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        names = {True: self.first, False: self.second}
        return names[bool(x.sum() > 0)](x)
"""


def test_copied_code_that_looks_at_values_is_passed_over():
    norm = BlockSpec(block="RMSNorm", arguments={"width": 16, "eps": 1e-5})
    copied = {"module": "Picky", "settings": {"width": 16}, "handed": {"x": "hidden"}, "tables": [], "together": True}
    kind = LayerKind.pre_norm(norm, norm, norm, BlockSpec(block="Lifted", arguments=copied))
    called = sizes(model_of(norm, [kind], lifted=COPIED))
    assert {name: {size["width"] for size in held} for name, held in called.items()} == {"rms_norm": {16}}
