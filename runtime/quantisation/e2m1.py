"""FP4 E2M1: sign, two bits of exponent, one of mantissa. Sixteen values, no infinity, no NaN.

Source: OCP Microscaling Formats (MX) 1.0, section 5.3.3. Two codes a byte, the even column in the low nibble.
"""

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LARGEST = 6.0
_PAIRS = torch.tensor([[VALUES[byte & 15], VALUES[byte >> 4]] for byte in range(256)])


def unpack(codes: Tensor) -> Tensor:
    """codes: [..., C/2], one byte each (uint8 or int8). Returns float32 [..., C]."""
    flat = codes.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    return _PAIRS[flat].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def pack(values: Tensor) -> Tensor:
    """The nearest codes, ties to the even code, magnitudes over 6 to 6. values: [..., C], C even. uint8 [..., C/2]."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, even in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (size >= bound) if even else (size > bound)
    code |= values.signbit().to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)
