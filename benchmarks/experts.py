"""What more experts cost at the same top-k: python -P benchmarks/experts.py [--tokens 16384 32768] [--experts 64 896].

A mixture of experts, hidden width 256, expert width 256, 8 experts a token: ours, and transformers' with its eager and
its grouped_mm experts, on the same weights and tokens, forward and backward, with experts that are trained or frozen as
under LoRA. `x` is the time of a row against the same implementation with the fewest experts, `of ours` the time against
ours. The router is part of it: with 896 experts its float32 product alone is 0.15 of the operations of the 8 experts.
The other part of `x` is how few rows an expert has: every expert's matrices are read and packed for them once, so that
more tokens at a time cost less each. 16,384 and 32,768 tokens are 146 and 293 rows for each of 896 experts; in a group
of 64 ranks with 4,096 tokens each they would be 2,341.
Every table is a process of its own; times are its own seconds on one thread, variants take turns and the fastest of
each counts. Freed memory is kept for all of them, as in `runtime train`.
"""

import argparse
import itertools
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dayzero.runtime.malloc import keep_freed_memory, start_without_thread_cache
from dayzero.runtime.nn import Experts, MixtureOfExperts, Router
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.nn.selection import Normalise

HIDDEN, WIDTH, TOP_K = 256, 256, 8
PEERS = ("eager", "grouped_mm")


def ours(experts: int) -> nn.Module:
    moe = MixtureOfExperts(
        Router(HIDDEN, experts, TOP_K, normalise=Normalise()), Experts(experts, HIDDEN, WIDTH, "silu")
    )
    initialise(moe, 0.05, 0)
    return moe


def theirs(mine: nn.Module, experts: int, implementation: str) -> nn.Module:
    """transformers' block with the same weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=experts, num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config)
    weights = {"gate.weight": mine.router.weight, "experts.gate_up_proj": mine.experts.gate_up}
    block.load_state_dict(weights | {"experts.down_proj": mine.experts.down})
    return block


def call(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x) if isinstance(block, MixtureOfExperts) else block(x[None])
    return (y[0] if isinstance(y, tuple) else y).reshape(x.shape)


def timed(block: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """(seconds of a forward and a backward pass, the output)."""
    started = time.process_time()
    y = call(block, x)
    y.sum().backward()
    return time.process_time() - started, y.detach()


def measure(
    options: argparse.Namespace, tokens: int, dtype: torch.dtype, frozen: bool
) -> dict[tuple[str, int], tuple[float, float]]:
    """(variant, experts) -> (fastest forward and backward in seconds, relative difference of its output from ours)."""
    found = {}
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    for experts in options.experts:
        mine = ours(experts)
        blocks = {"ours": mine} | {name: theirs(mine, experts, name) for name in options.peers}
        best, output = dict.fromkeys(blocks, float("inf")), {}
        for block in blocks.values():
            block.to(dtype)
            if frozen:
                block.experts.requires_grad_(False)
        for _ in range(options.repeats):
            for name, block in blocks.items():
                took, output[name] = timed(block, x)
                best[name] = min(best[name], took)
                block.zero_grad()
        for name in blocks:
            away = float((output[name] - output["ours"]).norm() / output["ours"].norm())
            found[name, experts] = best[name], away
    return found


def prepare() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()


def main(options: argparse.Namespace) -> None:
    console = Console(width=100)
    console.print(f"torch {torch.__version__}, top-{TOP_K}, one thread")
    for tokens, dtype, frozen in itertools.product(options.tokens, options.dtypes, (False, True)):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare) as process:
            found = process.submit(measure, options, tokens, getattr(torch, dtype), frozen).result()
        what = f"{tokens:,} tokens, {dtype}, experts {'frozen' if frozen else 'trained'}"
        table = Table(what, "experts", "us a token", "x", "of ours", "difference")
        for name, experts in itertools.product(("ours", *options.peers), options.experts):
            took, away = found[name, experts]
            first, mine = found[name, options.experts[0]][0], found["ours", experts][0]
            each = f"{1e6 * took / tokens:.1f}"
            table.add_row(name, str(experts), each, f"{took / first:.2f}", f"{took / mine:.2f}", f"{away:.0e}")
        console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 896])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    start_without_thread_cache()
    main(parser.parse_args())
