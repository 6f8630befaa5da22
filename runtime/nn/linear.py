"""Initial values of a projection."""

from torch import nn


def reset_linear(linear: nn.Linear, std: float) -> None:
    """Normal weights, zero bias."""
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
