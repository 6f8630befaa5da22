"""Quantised weights as checkpoints store them: which tensors belong together, and what numbers they stand for.

One file a format; `FORMATS` holds them by name. `quantised_groups` finds them by names, dtypes and shapes.
"""

from dayzero.runtime.packed import QuantizedTensor, decoded_shape, quantised_groups
from dayzero.runtime.quantisation import fp8, int4, mxfp4, nvfp4
from dayzero.runtime.quantisation.format import Format, decode, decode_into
from dayzero.runtime.quantisation.requantise import RoundTrip, encode

FORMATS: dict[str, Format] = {
    made.name: made for made in (fp8.BLOCK, fp8.UE8M0, fp8.MX, mxfp4.PACKED, mxfp4.BLOCKS, int4.PACKED, nvfp4.PACKED)
}

__all__ = [
    "FORMATS",
    "Format",
    "QuantizedTensor",
    "RoundTrip",
    "decode",
    "decode_into",
    "decoded_shape",
    "encode",
    "quantised_groups",
]
