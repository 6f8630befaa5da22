"""Operators against their peers: python benchmarks/kernels.py [--device cuda] [--repeats 15].

One table per operator. A ratio below 1 means ours takes less time. Ours and the peer alternate within one process, and
each figure is the median of the repeats.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dayzero.kernels.grouped_gemm import grouped_gemm
from dayzero.kernels.registry import choices
from dayzero.kernels.rms_norm import rms_norm
from dayzero.kernels.swiglu import swiglu

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16)
Call = Callable[..., Tensor]


def silu_times_up(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def indexed_loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """What a modelling file usually does: one slice of x and one element of weight for each expert."""
    ends = counts.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return torch.cat([x[a:b] @ weight[e].t() for e, (a, b) in enumerate(zip(starts, ends, strict=True))])


def torch_grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).int())


def timed(call: Call, inputs: tuple[Tensor, ...], backward: bool) -> float:
    """Milliseconds of one call."""
    synchronize = torch.accelerator.synchronize if inputs[0].device.type != "cpu" else lambda: None
    inputs = tuple(t.detach().requires_grad_(backward) if t.is_floating_point() else t for t in inputs)
    synchronize()
    start = time.perf_counter()
    out = call(*inputs)
    if backward:
        out.backward(out.detach())
    synchronize()
    return (time.perf_counter() - start) * 1e3


def compare(ours: Call, peer: Call, inputs: tuple[Tensor, ...], backward: bool, repeats: int) -> list[float]:
    """Milliseconds of ours and of the peer, called in turn, and their ratio in one round: medians of the rounds.
    The first two rounds only warm up."""
    rounds = [(timed(ours, inputs, backward), timed(peer, inputs, backward)) for _ in range(repeats + 2)][2:]
    return [statistics.median(values) for values in zip(*((*pair, pair[0] / pair[1]) for pair in rounds), strict=True)]


def tables(device: torch.device, repeats: int) -> list[Table]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def counts(experts: int, tokens: int) -> Tensor:
        share = torch.rand(experts, generator=generator)
        rows = torch.multinomial(share, tokens, replacement=True, generator=generator)
        return rows.bincount(minlength=experts).to(device)

    def norm_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return draw(2048, 2048, dtype=dtype), draw(2048, dtype=dtype)

    def gate_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return draw(2048, 1408, dtype=dtype), draw(2048, 1408, dtype=dtype)

    def expert_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return draw(2048, 512, dtype=dtype), draw(64, 256, 512, dtype=dtype), counts(64, 2048)

    subjects = [
        ("rms_norm", lambda x, weight: rms_norm(x, weight, EPS), norm_inputs, [torch_rms_norm], (EPS,)),
        ("swiglu", swiglu, gate_inputs, [silu_times_up], ()),
        ("grouped_gemm", grouped_gemm, expert_inputs, [indexed_loop, torch_grouped_mm], ()),
    ]
    made = []
    for name, ours, make, peers, more in subjects:
        table = Table("shapes", "dtype", "backend", "pass", "ours ms", "peer", "peer ms", "ratio", title=name)
        for dtype in DTYPES:
            inputs = make(dtype)
            shapes = " ".join(str(list(t.shape)) for t in inputs)
            backend = next(choice.backend for choice in choices(name, *inputs, *more) if choice.chosen)
            for peer in peers:
                for backward in (False, True):
                    mine, theirs, ratio = compare(ours, peer, inputs, backward, repeats)
                    kind = "forward + backward" if backward else "forward"
                    figures = f"{mine:.2f}", peer.__name__, f"{theirs:.2f}", f"{ratio:.2f}"
                    table.add_row(shapes, str(dtype).removeprefix("torch."), backend, kind, *figures)
        made.append(table)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--repeats", default=15, type=int)
    options = parser.parse_args()
    console = Console(width=160)
    console.print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    for table in tables(options.device, options.repeats):
        console.print(table)
