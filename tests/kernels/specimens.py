"""Small Triton kernels that show what the interpreter makes of bfloat16. Run in the worker."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def specimen(a, b, added, rounded, product):
    """a, b, added, rounded: [16, 16] bfloat16; product: [16, 16] float32."""
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(added + at, x + y)
    tl.store(rounded + at, (x.to(tl.float32) / 3).to(tl.bfloat16))
    tl.store(product + at, tl.dot(x, y))


def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a + b, a / 3 and a @ b, as Triton computes them."""
    added, rounded, product = torch.empty_like(a), torch.empty_like(a), torch.empty(16, 16)
    specimen[(1,)](a, b, added, rounded, product)
    return added, rounded, product
