"""Blocks with random weights, and contexts of packed documents, for tests of single blocks."""

import itertools

import torch

from dayzero.runtime.nn import Context
from dayzero.runtime.nn.context import positions_of


def context_for(*lengths, ids=None, shared=None):
    """Documents of these lengths, end to end."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    return Context(bounds, tuple(lengths), positions_of(tuple(lengths), bounds.device), (), ids, dict(shared or {}))


def drawn(block, seed=0, bias=0.3):
    """The block with random parameters and buffers, in float64; biases of that size."""
    generator = torch.Generator().manual_seed(seed)
    block = block.to(torch.float64)
    with torch.no_grad():
        for name, tensor in block.state_dict().items():
            if tensor.is_floating_point():
                size = bias if "bias" in name else 1.0
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * size)
    return block
