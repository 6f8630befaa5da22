"""RMS normalisation: x / sqrt(mean(x^2) + eps) * (offset + weight) (Zhang and Sennrich 2019, arXiv:1910.07467).

x: [..., H]; weight: [H] or None for no scale. Returns [..., H] in x.dtype. The mean runs over H.
offset: 0 as in Llama; 1 as in Gemma, whose weights are stored as the difference from 1.
weight_after_cast: round the normalised value to x.dtype before the weight multiplies it (Llama), else after (Gemma).
Statistics are float32, for float64 inputs float64; offset + weight is float32, since bfloat16 cannot hold 1 + 0.003.
Raises ValueError if weight is not [H].
"""

from dayzero.kernels.devices import lazy, triton_supports
from dayzero.kernels.registry import Backend, operator
from dayzero.kernels.rms_norm import blocked, npu, reference

_triton = Backend(
    "triton",
    lambda x, weight, *_, **__: triton_supports(x, *([] if weight is None else [weight])),
    lazy("dayzero.kernels.rms_norm.kernel:rms_norm"),
)

rms_norm = operator(
    "rms_norm", reference=reference.rms_norm, backends=[npu.backend, _triton, blocked.backend], check=reference.check
)
