"""Operators: a PyTorch reference each, faster backends beside it, one registry that chooses.

Importing this package imports torch only; Triton and torch_npu are loaded by the first call that needs them.
"""

from dayzero.kernels import grouped_gemm, rms_norm, swiglu

__all__ = ["grouped_gemm", "rms_norm", "swiglu"]
