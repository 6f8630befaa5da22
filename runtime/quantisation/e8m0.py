"""E8M0 scales: a power of two in one byte, 2^(code - 127). 255 is NaN.

Source: OCP Microscaling Formats (MX) 1.0, section 5.4.1.
"""

import torch
from torch import Tensor

NAN = 255
BIAS = 127


def unpack(codes: Tensor) -> Tensor:
    """codes: one byte each (uint8 or float8_e8m0fnu). Returns float32 of the same shape."""
    code = codes.contiguous().view(torch.uint8).to(torch.int32)
    bits = code << 23
    bits[code == 0] = 1 << 22  # 2^-127 is below float32's normal numbers
    bits[code == NAN] = 0x7FC00000
    return bits.view(torch.float32)


def pack(exponents: Tensor) -> Tensor:
    """The codes of 2^exponent, uint8; exponents outside -127 .. 127 become the nearest of these."""
    return (exponents.clamp(-BIAS, BIAS) + BIAS).to(torch.uint8)


def exponent(sizes: Tensor) -> Tensor:
    """floor(log2(size)) of finite float32 sizes, exactly, as int32; -127 for 0 and for subnormal numbers."""
    return (sizes.to(torch.float32).view(torch.int32) >> 23 & 0xFF) - BIAS
