"""A training step against transformers: python -P benchmarks/train_step.py [--layers 8] [--tokens 4096] [--steps 3].

One model of 64 experts, 4 a token, hidden width 512, expert width 256, with the same weights for all: ours, and
transformers with its eager experts and with its grouped_mm experts, for LoRA with peft around those. On one process and
on two, where ours shares the experts (ep 2) and transformers is sharded by FSDP2. Every variant has processes of its
own; memory is their peak beyond what they held before the model. A step is forward, backward and AdamW; the fastest
counts.
`x` is ours against the row: times the tokens/s, part of the memory. The loss of the first step shows that all compute
the same.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard

from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.lora import apply_lora, reset_lora
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise

VOCABULARY = 4096
ADAPTED = {"q_proj", "k_proj", "v_proj", "o_proj"}
VARIANTS = ("ours", "eager", "grouped_mm")


def checkpoint(folder: Path, layers: int) -> None:
    """A random model in transformers' format, and our package for it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import handmade

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, intermediate_size=512, moe_intermediate_size=256, num_experts=64, num_experts_per_tok=4,
        norm_topk_prob=True, max_position_embeddings=1 << 15, mlp_only_layers=[], architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "checkpoint")
    handmade.write(folder / "checkpoint", folder / "package")


def our_model(folder: Path, dtype: torch.dtype, lora: bool) -> nn.Module:
    package = load_package(folder / "package")
    with torch.device("meta"):
        model = package.build()
        if lora:
            apply_lora(model, 16, 32.0)
    model.to(dtype)
    if dist.is_initialized():
        parallelise(model, make_meshes(Layout(1, dist.get_world_size(), dist.get_world_size()), "cpu"))
    model.to_empty(device="cpu")
    adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
    load_checkpoint(model, package.rules, package.checkpoint, read_headers(package.checkpoint), adapters)
    reset_lora(model, torch.Generator().manual_seed(0))
    return model


def their_model(folder: Path, dtype: torch.dtype, lora: bool, experts: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=dtype, experts_implementation=experts)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=sorted(ADAPTED)))
        model.to(dtype)
    if dist.is_initialized():
        for layer in next(m for n, m in model.named_modules() if n.endswith("layers")):
            fully_shard(layer)
        fully_shard(model)
    return model


def one(variant: str, folder: Path, dtype: torch.dtype, lora: bool, tokens: int, steps: int) -> dict[str, Any]:
    from threading import Event, Thread

    held, peak, done = _memory(), [0], Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], _memory())

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ours = variant == "ours"
    model = our_model(folder, dtype, lora) if ours else their_model(folder, dtype, lora, variant)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, VOCABULARY, (tokens + 1,), generator=torch.Generator().manual_seed(1))
    mine = slice(rank * tokens // world, (rank + 1) * tokens // world)
    inputs, labels = ids[:-1][mine], ids[1:][mine]
    bounds = torch.tensor([0, len(inputs)])
    watcher, seconds, losses = Thread(target=watch), [], []
    watcher.start()
    for _ in range(steps):
        if world > 1:
            dist.barrier()
        started = time.perf_counter()
        if ours:
            loss = model(inputs, bounds, labels) / tokens
        else:
            logits = model(input_ids=inputs[None]).logits[0]
            loss = F.cross_entropy(logits.float(), labels, reduction="sum") / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        total = loss.detach().double()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total))
    done.set()
    watcher.join()
    return {"speed": tokens / min(seconds), "memory": peak[0] - held, "loss": losses[0], "last": losses[-1]}


def _memory() -> int:
    """Bytes of this process's own memory (RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def measured(case: dict[str, Any], world: int, folder: Path) -> dict[str, Any]:
    """The case on `world` fresh processes: speed and loss of the first, memory of the largest."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-P", __file__, "--case", json.dumps(case), "--folder", str(folder)]
        command += ["--world", str(world), "--rendezvous", f"{place}/rendezvous", "--rank"]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for rank in range(world)
        ]
        answers = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return {**answers[0], "memory": max(answer["memory"] for answer in answers)}


def main(options: argparse.Namespace) -> None:
    console = Console(width=130)
    table = Table(
        "mode", "dtype", "processes", "variant", "tokens/s", "x", "memory MB", "x", "first loss", "difference"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint(folder, options.layers)
        for world, dtype, lora in itertools.product(
            options.worlds, options.dtypes, [mode == "lora" for mode in options.modes]
        ):
            found = {}
            for variant in VARIANTS:
                case = {
                    "variant": variant,
                    "dtype": dtype,
                    "lora": lora,
                    "tokens": options.tokens,
                    "steps": options.steps,
                }
                found[variant] = measured(case, world, folder)
            ours = found["ours"]
            for variant, row in found.items():
                title = variant if variant == "ours" else f"transformers {variant}" + (" + peft" if lora else "")
                table.add_row(
                    "lora" if lora else "full", dtype, str(world), title, f"{row['speed']:,.0f}",
                    f"{ours['speed'] / row['speed']:.2f}", f"{row['memory'] / 1e6:,.0f}",
                    f"{ours['memory'] / row['memory']:.2f}", f"{row['loss']:.5f}", f"{row['loss'] - ours['loss']:+.1e}",
                )  # fmt: skip
    console.print(f"torch {torch.__version__}, {options.layers} layers, {options.tokens} tokens, one thread a process")
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--modes", nargs="+", default=["lora", "full"])
    for hidden in ("--case", "--folder", "--rendezvous"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case is None:
        main(given)
    else:
        if given.world > 1:
            start = f"file://{given.rendezvous}"
            dist.init_process_group("gloo", init_method=start, rank=given.rank, world_size=given.world)
        what = json.loads(given.case)
        dtype = getattr(torch, what["dtype"])
        answer = one(what["variant"], Path(given.folder), dtype, what["lora"], what["tokens"], what["steps"])
        if given.world > 1:
            dist.destroy_process_group()
        print(json.dumps(answer))
