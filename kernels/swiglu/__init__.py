"""SwiGLU: silu(gate) * up, the gate and the value of a gated feed-forward layer (Shazeer 2020, arXiv:2002.05202).

gate, up: [..., F], same dtype. Returns [..., F] in that dtype.
limit: clamp gate above and up on both sides before the product (gpt-oss); None for none.
Computed in float32 and rounded once, for float64 inputs in float64. `F.silu(gate) * up` in bfloat16 rounds twice; one
rounding is closer to the exact value, and it is what a fused kernel does on either device.
Raises ValueError if shapes, dtypes or devices differ.
"""

from dayzero.kernels.devices import lazy, triton_supports
from dayzero.kernels.registry import Backend, operator
from dayzero.kernels.swiglu import blocked, npu, reference

_triton = Backend(
    "triton", lambda gate, up, limit=None: triton_supports(gate, up), lazy("dayzero.kernels.swiglu.kernel:swiglu")
)

swiglu = operator(
    "swiglu", reference=reference.swiglu, backends=[npu.backend, _triton, blocked.backend], check=reference.check
)
