"""Grouped matrix product: each expert's rows times that expert's matrix.

x: [T, K], rows sorted by expert; weight: [E, N, K], as in nn.Linear; counts: [E] int64, rows of each expert, on the
device of x. Returns [T, N] with y = x_e @ weight[e].T for the rows of expert e.
Rows past sum(counts) are zero in the output and in the gradient of x. sum(counts) > T is an error,
which the NPU backend alone does not detect: it would have to wait for the device.
An expert without rows gets a zero gradient. Sums are float32, for float64 inputs float64.
Raises ValueError if shapes, dtypes or devices do not fit.
"""

from dayzero.kernels.devices import lazy, triton_supports
from dayzero.kernels.grouped_gemm import bucketed, grouped_mm, npu, reference
from dayzero.kernels.registry import Backend, operator

_triton = Backend(
    "triton",
    lambda x, weight, counts: triton_supports(x, weight),
    lazy("dayzero.kernels.grouped_gemm.kernel:grouped_gemm"),
)

grouped_gemm = operator(
    "grouped_gemm",
    reference=reference.grouped_gemm,
    backends=[npu.backend, bucketed.backend, grouped_mm.backend, _triton],
    check=reference.check,
)
