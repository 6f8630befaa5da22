"""FP8 E4M3 weights with a scale for each block.

`fp8_block`: float32 (or bfloat16) scales of 128 x 128 blocks, `weight_scale_inv` (DeepSeek-V3, arXiv:2412.19437,
section 3.3); also one scale a row, or one for the whole tensor. `fp8_ue8m0`: the same with power-of-two scales stored
as E8M0. `mxfp8`: 1 x 32 blocks with E8M0 scales (OCP Microscaling Formats 1.0), stored as such or as plain bytes.
"""

import torch

from dayzero.runtime.packed import FP8_BLOCK, FP8_UE8M0, MXFP8, Layout
from dayzero.runtime.quantisation import e8m0
from dayzero.runtime.quantisation.format import Format

LARGEST = 448.0


def _made(layout: Layout, multipliers) -> Format:
    return Format(**vars(layout), unpack=lambda codes: codes.to(torch.float32), multipliers=multipliers)


BLOCK = _made(FP8_BLOCK, lambda scales, _: scales.to(torch.float32))
UE8M0 = _made(FP8_UE8M0, lambda scales, _: e8m0.unpack(scales))
MX = _made(MXFP8, lambda scales, _: e8m0.unpack(scales))
