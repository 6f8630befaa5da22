import itertools
import math

import pytest
import torch

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
    make_optimizer(layer, 0.1, (0.9, 0.95), 1e-8, weight_decay=0.5).step()
    assert torch.allclose(layer.weight, before[0] * 0.95)
    assert torch.equal(layer.bias, before[1])
    layer.requires_grad_(False)
    with pytest.raises(ValueError, match="trainable"):
        make_optimizer(layer, 0.1, (0.9, 0.95), 1e-8, 0.0)


def test_learning_rate():
    rates = [learning_rate(step, steps=11, peak=1.0, warmup=4, floor=0.2) for step in range(11)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[7] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[10] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert learning_rate(0, steps=1, peak=1.0, warmup=0, floor=0.0) == 1.0
