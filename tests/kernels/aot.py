"""Compile every Triton kernel for NVIDIA sm_90 on a machine without a GPU; print one JSON object of what came out.

A script of its own, since Triton cannot be interpreted and compiled in one process. The operators are called on CPU
tensors with the launch replaced, so that what is compiled is what would be launched: dtypes, strides, tile sizes.
"""

import json
from typing import Any

import torch
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from dayzero.kernels.grouped_gemm import kernel as grouped_gemm
from dayzero.kernels.rms_norm import kernel as rms_norm
from dayzero.kernels.swiglu import kernel as swiglu

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}

compiled: dict[str, int] = {}  # kernel, dtype and constants -> bytes of machine code


def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **constants: Any) -> None:
    """Compile `kernel` as a launch with these arguments would: 1 is a constant, multiples of 16 are known as such."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | constants
    constants |= {name: 1 for name, value in bound.items() if type(value) is int and value == 1}
    signature = {}
    for name, value in bound.items():
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    names = list(signature)
    aligned = [n for n in names if signature[n][0] == "*" or (signature[n] == "i32" and bound[n] % 16 == 0)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    key = f"{kernel.fn.__name__} {signature[names[0]]} {constants}"
    if key not in compiled:
        compiled[key] = len(triton_compile(source, target=TARGET, options={"num_warps": num_warps}).asm["cubin"])


def backward(out: torch.Tensor) -> None:
    out.backward(torch.ones_like(out))


if __name__ == "__main__":
    JITFunction.run = launch
    for dtype in (torch.bfloat16, torch.float32):

        def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.ones(shape, dtype=dtype, requires_grad=True)

        for limit in (None, 7.0):
            backward(swiglu.swiglu(leaf(32, 1536), leaf(32, 1536), limit))
        backward(rms_norm.rms_norm(leaf(32, 4096), leaf(4096), 1e-6))
        backward(rms_norm.rms_norm(leaf(32, 4096), leaf(4096), 1e-6, 1.0, weight_after_cast=False))
        backward(rms_norm.rms_norm(leaf(32, 4096), None, 1e-6))
        for tokens in (64, 1024):  # the smallest and the largest tile
            backward(grouped_gemm.grouped_gemm(leaf(tokens, 512), leaf(8, 256, 512), torch.full((8,), tokens // 8)))
    print(json.dumps(compiled))
