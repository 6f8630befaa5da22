"""MXFP4: E2M1 codes, an E8M0 scale for 32 columns (OCP Microscaling Formats 1.0, section 5.2).

`mxfp4_packed`: two columns a byte, [..., R, C/2], as compressed-tensors' `weight_packed` and `weight_scale`, or as an
int8 `weight` with a `scale`. `mxfp4_blocks`: the same bytes by group, [..., R, C/32, 16], as gpt-oss' `_blocks` and
`_scales`.
"""

from dayzero.runtime.packed import MXFP4_BLOCKS, MXFP4_PACKED, Layout
from dayzero.runtime.quantisation import e2m1, e8m0
from dayzero.runtime.quantisation.format import Format

GROUP = 32


def _made(layout: Layout) -> Format:
    return Format(**vars(layout), unpack=e2m1.unpack, multipliers=lambda scales, _: e8m0.unpack(scales))


PACKED, BLOCKS = _made(MXFP4_PACKED), _made(MXFP4_BLOCKS)
