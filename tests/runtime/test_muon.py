"""Muon against its definition by singular values, against torch's, and on meshes against one process."""

import math

import handmade
import harness
import pytest
import ranks_optimizer
import tiny
import torch

from dayzero.runtime.config import Group, Optimizer
from dayzero.runtime.muon import newton_schulz
from dayzero.runtime.optimizer import make_optimizer


def through_singular_values(x):
    """The five steps act on each singular value alone: a polynomial of it."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s.unsqueeze(-2) @ v


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7), (3, 5, 8), (2, 3, 8, 5), (1, 9)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = newton_schulz(x)
    assert float((got - through_singular_values(x)).norm() / got.norm()) < 1e-12
    full = torch.randn(64, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(newton_schulz(full))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.2  # noqa: PT018


def test_a_zero_matrix_stays_zero():
    assert torch.equal(newton_schulz(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))


def plain_muon(weight, gradients, lr, decay, momentum, compute=through_singular_values):
    """The published equations for one matrix."""
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient
        ahead = momentum * mean + (1 - momentum) * gradient
        weight = weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * compute(ahead)
    return weight


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stacked(torch.nn.Module):
    """Experts [E, 2F, H], of which each entry is a gate and a value."""

    joined_matrices = {"gate_up": 2}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.gate_up = torch.nn.Parameter(drawn((3, 8, 5), 0))
        self.in_bias = torch.nn.Parameter(drawn((3, 8), 1))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Stacked()
        self.mixer = torch.nn.Linear(5, 4, bias=False, dtype=torch.float64)


def test_every_expert_and_every_joined_matrix_is_one_of_its_own():
    model = Model()
    before = model.experts.gate_up.detach().clone(), model.mixer.weight.detach().clone()
    gradients = [(drawn((3, 8, 5), 10 + i), drawn((4, 5), 20 + i)) for i in range(3)]
    optimizer = make_optimizer(model, Optimizer(name="muon", lr=0.05, weight_decay=0.3, momentum=0.9))
    for stacked, dense in gradients:
        model.experts.gate_up.grad, model.mixer.weight.grad = stacked, dense
        model.experts.in_bias.grad = torch.ones(3, 8, dtype=torch.float64)
        optimizer.step()
    for expert in range(3):
        for rows in (slice(0, 4), slice(4, 8)):
            want = plain_muon(before[0][expert, rows], [g[expert, rows] for g, _ in gradients], 0.05, 0.3, 0.9)
            assert torch.allclose(model.experts.gate_up[expert, rows], want, rtol=1e-10, atol=0)
    want = plain_muon(before[1], [dense for _, dense in gradients], 0.05, 0.3, 0.9)
    assert torch.allclose(model.mixer.weight, want, rtol=1e-10, atol=0)
    assert {group["role"]: group["algorithm"] for group in optimizer.param_groups} == {
        "experts": "muon", "vectors": "adamw", "matrices": "muon",
    }  # fmt: skip


def moved_by(optimizer, layer, dtype=torch.float32):
    """How far four steps take the layer's weight."""
    start = layer.weight.detach().clone().double()
    for step in range(4):
        layer.weight.grad = drawn((40, 24), step).to(dtype)
        optimizer.step()
    return layer.weight.detach().double() - start


def test_in_bfloat16_it_is_as_close_to_the_definition_as_torch_is():
    layers = [torch.nn.Linear(24, 40, bias=False) for _ in range(3)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    layers[2].double()
    settings = Optimizer(name="muon", lr=0.02, weight_decay=0.1)
    ours, exact = make_optimizer(layers[0], settings), make_optimizer(layers[2], settings)
    ours.compute = torch.bfloat16
    torchs = torch.optim.Muon(layers[1].parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    want = moved_by(exact, layers[2], torch.float64)
    errors = [
        float((moved_by(one, layer) - want).norm() / want.norm())
        for one, layer in ((ours, layers[0]), (torchs, layers[1]))
    ]
    assert errors[1] < 0.03  # it is the same optimizer
    assert errors[0] <= 1.2 * errors[1]


def test_roles_choose_the_algorithm():
    model = Model()
    settings = Optimizer(name="muon", groups={"experts": Group(name="adamw"), "matrices": Group(lr=0.5)})
    groups = {group["role"]: group for group in make_optimizer(model, settings).param_groups}
    assert groups["experts"]["algorithm"] == "adamw"
    assert (groups["matrices"]["algorithm"], groups["matrices"]["lr"]) == ("muon", settings.lr / 2)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    config = {"num_hidden_layers": 2, "num_experts": 6, "tokenizer": False}
    return handmade.write(tiny.make("mixtral", folder / "checkpoint", **config), folder / "package")


LAYOUTS = {
    "sliced-experts": (1, 4, 2),
    "whole-experts": (1, 4, 1),
    "replicated": (2, 2, 2),
    "replicated-ep1": (4, 1, 1),
}


@pytest.mark.slow
def test_meshes_equal_one_process(package):
    """Rows that do not divide over the ranks, experts cut by rows over efsdp, and copies."""
    settings = Optimizer(name="muon", lr=0.05, weight_decay=0.1, groups={"embedding": Group(name="muon")})
    one = harness.run(ranks_optimizer.steps, 1, package, (1, 1, 1), settings, torch.float64)[0]
    cases = [(layout, settings, torch.float64) for layout in LAYOUTS.values()]
    for of_rank in harness.run(ranks_optimizer.steps_of, 4, package, cases):
        for name, got in zip(LAYOUTS, of_rank, strict=True):
            assert got.keys() == one.keys()
            for key, value in one.items():
                error = float((got[key] - value).norm() / value.norm().clamp(min=1e-30))
                assert error <= 1e-12, (name, key)
