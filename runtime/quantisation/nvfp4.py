"""NVFP4: E2M1 codes, an FP8 E4M3 scale for 16 columns, and one float32 scale for the whole tensor.

ModelOpt stores the tensor's scale as a factor (`weight_scale_2`), compressed-tensors as a divisor
(`weight_global_scale`). The two scales are combined first, in float32.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dayzero.runtime.packed import DIVISOR, FACTOR, NVFP4
from dayzero.runtime.quantisation import e2m1
from dayzero.runtime.quantisation.format import Format

GROUP = 16


def _multipliers(scales: Tensor, once: Mapping[str, Tensor]) -> Tensor:
    found = scales.to(torch.float32)
    if DIVISOR in once:
        return found / once[DIVISOR].to(torch.float32).reshape(())
    return found * once[FACTOR].to(torch.float32).reshape(())


PACKED = Format(**vars(NVFP4), unpack=e2m1.unpack, multipliers=_multipliers)
