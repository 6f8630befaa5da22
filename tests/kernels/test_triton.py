"""What is particular to Triton: the interpreter's bfloat16, and compiling for a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .interpreter import Interpreter

KERNELS = {
    "swiglu_forward",
    "swiglu_backward",
    "rms_norm_forward",
    "rms_norm_backward",
    "rms_norm_weight_backward",
    "grouped_rows",
    "grouped_weights",
}


@pytest.fixture(scope="module")
def stock():
    worker = Interpreter("--stock")
    yield worker
    worker.close()


@pytest.fixture
def pair(rng):
    return rng((16, 16), torch.bfloat16), rng((16, 16), torch.bfloat16)


def test_repaired_interpreter_adds_and_rounds_bfloat16(interpreter, pair):
    a, b = pair
    added, rounded, product = interpreter.call("specimens:run", a, b)
    assert torch.equal(added, a + b)
    assert torch.equal(rounded, (a.float() / 3).bfloat16())
    assert torch.allclose(product, a.float() @ b.float(), atol=1e-5)


def test_stock_interpreter_does_not(stock, pair):
    """When this fails, Triton has been mended and `interpreter.repair` can go."""
    a, b = pair
    added, rounded, product = stock.call("specimens:run", a, b)
    assert not torch.equal(added, a + b)
    assert not torch.equal(rounded, (a.float() / 3).bfloat16())
    assert not torch.allclose(product, a.float() @ b.float(), rtol=1)


def test_operator_reaches_its_kernel(interpreter, rng):
    """Through the registry, whose Triton backends import their kernels at the first call."""
    given = {"gate": rng((3, 16)), "up": rng((3, 16))}
    answers = interpreter.call("dayzero.kernels.registry:choices", "swiglu", *given.values())
    assert [answer.backend for answer in answers if answer.chosen] == ["triton"]
    chosen, kernel = (
        interpreter.call("compare:gradients", f"dayzero.kernels.swiglu{name}:swiglu", given) for name in ("", ".kernel")
    )
    assert all(torch.equal(chosen[name], kernel[name]) for name in kernel)


def test_worker_reports_errors(interpreter):
    with pytest.raises(RuntimeError, match="ModuleNotFoundError"):
        interpreter.call("no_such_module:f")


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_90(tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = Path(__file__).with_name("aot.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    compiled = json.loads(run.stdout)
    assert {key.split()[0] for key in compiled} == KERNELS
    assert {key.split()[1] for key in compiled} == {"*bf16", "*fp32"}
    assert min(compiled.values()) > 1000
