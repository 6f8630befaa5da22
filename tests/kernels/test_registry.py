"""The registry: order, forcing, reasons, lazy imports."""

import os
import re
import subprocess
import sys

import pytest
import torch

from dayzero.kernels import registry
from dayzero.kernels.registry import Backend, BackendError, choices, operator, operators, using
from dayzero.kernels.swiglu import swiglu


@pytest.fixture
def double(monkeypatch):
    """An operator with three backends: one that always refuses, one for integers, one for floats."""
    monkeypatch.setattr(registry, "_operators", dict(registry._operators))

    def named(name, kind):
        def supports(x):
            return (True, "") if isinstance(x, kind) else (False, f"{type(x).__name__} is not {kind.__name__}")

        return Backend(name, supports, lambda x: (name, x + x))

    never = Backend("never", lambda x: (False, "out of order"), abs)
    backends = [never, named("whole", int), named("real", float)]
    return operator("double", reference=lambda x: ("reference", 2 * x), backends=backends)


@pytest.mark.parametrize(("x", "backend"), [(2, "whole"), (2.0, "real"), ("ab", "reference")])
def test_first_that_supports_serves(double, x, backend):
    assert double(x) == (backend, 2 * x)


def test_choices_give_every_reason(double):
    found = [(choice.backend, choice.ok, choice.reason, choice.chosen) for choice in choices("double", 2.0)]
    assert found == [
        ("never", False, "out of order", False),
        ("whole", False, "float is not int", False),
        ("real", True, "", True),
        ("reference", True, "", False),
    ]


def test_using_forces_and_restores(double):
    with using(double="reference"):
        assert double(2)[0] == "reference"
        with using(double="whole"):
            assert double(2)[0] == "whole"
        assert double(2)[0] == "reference"
    assert double(2)[0] == "whole"


def test_environment_forces(double, monkeypatch):
    monkeypatch.setenv("DAYZERO_KERNELS", " swiglu=reference, double=real ")
    assert double(2.0)[0] == "real"
    with using(double="reference"):  # the nearer choice wins
        assert double(2.0)[0] == "reference"
    assert [choice.backend for choice in choices("swiglu", *[torch.ones(2)] * 2) if choice.chosen] == ["reference"]


def test_forced_backend_never_falls_back(double):
    with using(double="real"), pytest.raises(BackendError, match="backend real is forced but refuses: int is not"):
        double(2)
    with using(double="real"):
        assert not any(choice.chosen for choice in choices("double", 2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("swiglu=cuda", "has no backend 'cuda'; it has npu, triton, blocked, reference"),
        ("swigloo=reference", "no operator 'swigloo'; there are .*rms_norm.*swiglu"),
        ("swiglu", "expected operator=backend, found 'swiglu'"),
    ],
)
def test_bad_names_are_errors(value, message, monkeypatch):
    monkeypatch.setenv("DAYZERO_KERNELS", value)
    with pytest.raises(BackendError, match=message):
        swiglu(torch.ones(2), torch.ones(2))
    monkeypatch.delenv("DAYZERO_KERNELS")
    if value.count("=") == 1:
        name, backend = value.split("=")
        with pytest.raises(BackendError, match=message), using(**{name: backend}):
            pass


def test_checks_come_before_the_choice():
    with using(swiglu="triton"), pytest.raises(ValueError, match="gate and up differ"):
        swiglu(torch.ones(2), torch.ones(3))


def test_names_are_unique(double):
    with pytest.raises(ValueError, match="double is registered already"):
        operator("double", reference=abs)


def test_operators_are_listed():
    assert {"grouped_gemm", "rms_norm", "swiglu"} <= set(operators())
    assert list(operators()) == sorted(operators())


@pytest.mark.parametrize(
    ("dtype", "size", "chosen", "reason"),
    [
        (torch.float32, 8, "torch", ""),
        (torch.bfloat16, 8, "bucketed", ""),
        (torch.bfloat16, 12, "bucketed", "rows of n \\* 16 bytes; K is 12"),
        (torch.float16, 8, "reference", "not used for torch.float16 on cpu"),
        (torch.float64, 8, "reference", "not used for torch.float64 on cpu"),
    ],
)
def test_grouped_gemm_on_a_cpu(dtype, size, chosen, reason):
    x, weight = torch.ones(4, size, dtype=dtype), torch.ones(2, 16, size, dtype=dtype)
    answers = {choice.backend: choice for choice in choices("grouped_gemm", x, weight, torch.tensor([1, 3]))}
    assert answers[chosen].chosen
    assert re.search(reason, answers["torch"].reason)
    assert not answers["triton"].ok
    assert "not for cpu" in answers["triton"].reason


def test_triton_refuses_fake_tensors(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2, 3)
        answers = {choice.backend: choice for choice in choices("swiglu", fake, fake)}
        assert answers["triton"].reason == "FakeTensor instead of a plain tensor"
        assert swiglu(fake, fake).shape == (2, 3)


def test_import_loads_torch_only():
    script = (
        "import sys, dayzero.kernels; print([m for m in ('triton', 'torch_npu', 'transformers') if m in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DAYZERO_KERNELS"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip() == "[]"
