"""INT4 as compressed-tensors packs it: eight columns in an int32 word, the first in the lowest bits, each code - 8.

Symmetric: value = (code - 8) x scale, with a scale for each group of columns, mostly bfloat16. `weight_shape` beside
them holds [R, C] once more.
"""

import torch
from torch import Tensor

from dayzero.runtime.packed import INT4_PACKED
from dayzero.runtime.quantisation.format import Format

ZERO = 8  # the code of 0: codes 0 .. 15 stand for -8 .. 7


def unpack(words: Tensor) -> Tensor:
    """words: int32 [..., C/8]. Returns float32 [..., C] of whole numbers."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return (codes - ZERO).reshape(*words.shape[:-1], 8 * words.shape[-1]).to(torch.float32)


def pack(numbers: Tensor) -> Tensor:
    """numbers: [..., C] of whole numbers -8 .. 7, C a multiple of 8. Returns int32 [..., C/8]."""
    codes = (numbers.to(torch.int64) + ZERO).unflatten(-1, (-1, 8))
    words = (codes << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


PACKED = Format(**vars(INT4_PACKED), unpack=unpack, multipliers=lambda scales, _: scales.to(torch.float32))
