import itertools
import math

import pytest
import torch

from dayzero.runtime.config import Group, Optimizer
from dayzero.runtime.errors import InputError
from dayzero.runtime.lora import apply_lora
from dayzero.runtime.nn import Experts
from dayzero.runtime.optimizer import clip_gradients, gradient_norm, make_optimizer
from dayzero.runtime.schedule import learning_rate


@pytest.fixture
def layer():
    layer = torch.nn.Linear(3, 2)
    layer.weight.grad = torch.full((2, 3), 2.0)
    layer.bias.grad = torch.tensor([3.0, 4.0])
    return layer


def test_norm_and_clipping(layer):
    norm = gradient_norm(layer.parameters())
    assert float(norm) == pytest.approx(7.0)  # sqrt(6 * 4 + 25)
    clip_gradients(layer.parameters(), 8.0, norm)
    assert float(gradient_norm(layer.parameters())) == pytest.approx(7.0)
    clip_gradients(layer.parameters(), 3.5, norm)
    assert layer.bias.grad.tolist() == pytest.approx([1.5, 2.0])
    assert float(gradient_norm(layer.parameters())) == pytest.approx(3.5)


def test_vectors_do_not_decay_and_frozen_parameters_stay(layer):
    layer.weight.grad.zero_()
    layer.bias.grad.zero_()
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    make_optimizer(layer, Optimizer(lr=0.1, weight_decay=0.5)).step()
    assert torch.allclose(layer.weight, before[0] * 0.95)
    assert torch.equal(layer.bias, before[1])
    layer.requires_grad_(False)
    with pytest.raises(ValueError, match="trainable"):
        make_optimizer(layer, Optimizer())


class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(8, 4)
        self.experts = Experts(4, 8, 6, "silu", bias=True)


class Mixed(torch.nn.Module):
    """One parameter of every role but lora."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(9, 8)
        self.mixer = torch.nn.Linear(8, 8)
        self.ffn = Routed()
        self.kernel = torch.nn.Parameter(torch.zeros(8, 4))
        self.head = torch.nn.Linear(8, 9, bias=False)


def names_by_role(model, settings=None):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, settings or Optimizer()).param_groups
    return {group["role"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}


def test_roles_follow_from_modules_and_shapes():
    model = Mixed()
    assert names_by_role(model) == {
        "other": ["kernel"],
        "embedding": ["embed.weight"],
        "matrices": ["mixer.weight"],
        "vectors": ["mixer.bias", "ffn.router.bias", "ffn.experts.in_bias", "ffn.experts.down_bias"],
        "router": ["ffn.router.weight"],
        "experts": ["ffn.experts.gate_up", "ffn.experts.down"],
        "head": ["head.weight"],
    }
    joined = {group["role"]: group["joined"] for group in make_optimizer(model, Optimizer()).param_groups}
    assert (joined["experts"], joined["matrices"]) == ([2, 1], [1])
    apply_lora(model, 2, 4.0, targets=["mixer"])
    assert names_by_role(model) == {"lora": ["mixer.lora_a", "mixer.lora_b"]}


def test_every_role_has_its_own_rate_and_decay():
    groups = {"router": Group(lr=0.1, weight_decay=0.0), "embedding": Group(weight_decay=0.5)}
    made = make_optimizer(Mixed(), Optimizer(lr=0.2, weight_decay=0.3, groups=groups))
    made.set_lr(0.4)
    values = {group["role"]: (group["lr"], group["weight_decay"]) for group in made.param_groups}
    assert values == {
        "router": (pytest.approx(0.04), 0.0),
        "embedding": (0.4, 0.5),
        "vectors": (0.4, 0.0),
        **dict.fromkeys(("other", "matrices", "experts", "head"), (0.4, 0.3)),
    }


@pytest.mark.parametrize(
    ("groups", "says"),
    [({"lora": Group()}, "no trained parameter of that role"), ({"vectors": Group(name="muon")}, "needs matrices")],
)
def test_settings_of_a_role_that_cannot_have_them_are_refused(groups, says):
    with pytest.raises(InputError, match=says):
        make_optimizer(Mixed(), Optimizer(groups=groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_torch(dtype):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 5)).to(dtype) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    settings = Optimizer(lr=0.02, betas=(0.8, 0.99), weight_decay=0.3, groups={"vectors": Group(weight_decay=0.3)})
    optimizer = make_optimizer(ours, settings)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.02, betas=(0.8, 0.99), weight_decay=0.3)
    for step in range(5):
        for i, (mine, their) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            draw = torch.Generator().manual_seed(10 * step + i)
            mine.grad = torch.randn(mine.shape, generator=draw, dtype=dtype)
            their.grad = mine.grad.clone()
        optimizer.step()
        other.step()
    for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, their, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-7)
        for name, value in other.state[their].items():
            assert torch.allclose(optimizer.state[mine][name].to(dtype), value.to(dtype), rtol=1e-5, atol=1e-7)


def test_learning_rate():
    rates = [learning_rate(step, steps=11, peak=1.0, warmup=4, floor=0.2) for step in range(11)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[7] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[10] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert learning_rate(0, steps=1, peak=1.0, warmup=0, floor=0.0) == 1.0
