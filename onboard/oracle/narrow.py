"""The reference as it runs in bfloat16, where its own casts to float32 are what they say."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.calls import Call, floats


@contextlib.contextmanager
def in_bfloat16(model: nn.Module, wide: Collection[str] = (), buffers: torch.dtype = torch.float32) -> Iterator[None]:
    """Parameters in bfloat16 meanwhile, but for those with a part of their name in `wide`; buffers, and float64 tensors
    that modules hold beside, in the dtype `buffers`."""
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    held = [
        (owner, name, value)
        for module in model.modules()
        for owner in (module._buffers, vars(module))
        for name, value in list(owner.items())
        if isinstance(value, Tensor) and value.dtype == torch.float64
    ]
    try:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                kept = any(part in name for part in wide)
                parameter.data = parameter.data.to(torch.float32 if kept else torch.bfloat16)
        for owner, name, value in held:
            owner[name] = value.to(buffers)
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for owner, name, value in held:
            owner[name] = value


def replay_in_bfloat16(call: Call) -> Any:
    """The module called again with what it was handed in bfloat16. Not for arguments inside others."""

    def rounded(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and floats(value) else value

    with in_bfloat16(call.module):
        args, kwargs = call.arguments(rounded)
        return call.module(*args, **kwargs)
