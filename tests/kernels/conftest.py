"""Fixtures of the operator tests: the interpreter's process, torch_npu's stand-ins, random inputs."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.kernels.registry import VARIABLE

from . import npu_schemas
from .compare import gradients
from .interpreter import Interpreter


@pytest.fixture(autouse=True)
def _no_forced_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller's shell forces is not what the tests are about."""
    for variable in (VARIABLE, "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    worker = Interpreter()
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def npu() -> Iterator[ModuleType]:
    """torch.ops.npu, with CPU stand-ins for what we call."""
    library = npu_schemas.define()
    yield torch.ops.npu
    library._destroy()


@pytest.fixture
def evaluate(request: pytest.FixtureRequest) -> Callable[..., dict[str, Tensor]]:
    """`compare.gradients` of an operator's backend, wherever that backend can run."""

    def evaluate(operator: str, backend: str, inputs: dict[str, Any], **options: Any) -> dict[str, Tensor]:
        if backend == "triton":
            target = f"dayzero.kernels.{operator}.kernel:{operator}"
            return request.getfixturevalue("interpreter").call("compare:gradients", target, inputs, **options)
        if backend == "npu":
            request.getfixturevalue("npu")
        file = {
            "npu": "npu:backend.call",
            "torch": "grouped_mm:backend.call",
            "blocked": "blocked:backend.call",
            "bucketed": "bucketed:backend.call",
            "reference": f"reference:{operator}",
        }
        return gradients(f"dayzero.kernels.{operator}.{file[backend]}", inputs, **options)

    return evaluate


@pytest.fixture
def rng() -> Callable[..., Tensor]:
    """rng(shape, dtype, scale): normal numbers of this scale, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return draw
