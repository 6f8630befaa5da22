"""Float64 that stays float64: the casts to float32 that code insists on become casts to float64."""

import torch
from torch.overrides import TorchFunctionMode


class Promote(TorchFunctionMode):
    """Turns every cast to float32 into one to float64: a float64 proof needs no float32 islands."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if name == "float":
            return args[0].double()
        if name in {"to", "type"} and any(arg is torch.float32 for arg in args):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)
