"""A training step against transformers: python -P benchmarks/train_step.py [--layers 8] [--tokens 4096] [--steps 3].

One model of 64 experts, 4 a token, hidden width 512, expert width 256, with the same weights for all: ours, and
transformers with its eager experts and with its grouped_mm experts, for LoRA with peft around those. On one process and
on two, where ours shares the experts (ep 2) and transformers is sharded by FSDP2. The tokens are one document, or
documents of 64 to 1,024 tokens as in instruction tuning, the first fifth to three fifths of each a prompt without
labels: packed for ours, a padded batch for transformers, whose attention has no packing on a CPU; only real tokens
count. Every variant has processes of its own, which keep freed memory as those of `runtime train`; memory is their
peak beyond what they held before the model. A step is forward, backward and AdamW; the fastest counts. `x` is ours
against the row: times the tokens/s, part of the memory. The loss of the first step shows that all compute the same.
"""

import argparse
import itertools
import json
import os
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
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.lora import apply_lora, reset_lora
from dayzero.runtime.malloc import keep_freed_memory, without_thread_cache
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise

VOCABULARY = 4096
ADAPTED = {"q_proj", "k_proj", "v_proj", "o_proj"}
VARIANTS = ("ours", "eager", "grouped_mm")
LOSS_CHUNK = 512  # tokens whose logits exist at a time
LENGTHS = (64, 1024)  # of ragged documents
PROMPTS = (0.2, 0.6)  # parts of them without labels


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
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # numbers that both dtypes have
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder / "checkpoint")
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


def documents(layout: str, tokens: int) -> list[int]:
    """Lengths that sum to `tokens`."""
    if layout == "one":
        return [tokens]
    generator, lengths = torch.Generator().manual_seed(2), []
    while (left := tokens - sum(lengths)) > LENGTHS[0]:
        lengths.append(min(left, int(torch.randint(LENGTHS[0], LENGTHS[1] + 1, (), generator=generator))))
    return [*lengths[:-1], tokens - sum(lengths[:-1])]


def padded(ids: Tensor, labels: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """The batch as transformers takes it: [documents, longest]."""
    rows = zip(ids.split(lengths), labels.split(lengths), strict=True)
    batch = {"input_ids": [], "labels": [], "attention_mask": []}
    for document, wanted in rows:
        behind = (0, max(lengths) - len(document))
        batch["input_ids"].append(F.pad(document, behind))
        batch["labels"].append(F.pad(wanted, behind, value=-100))
        batch["attention_mask"].append(F.pad(torch.ones_like(document), behind))
    whole = {name: torch.stack(rows) for name, rows in batch.items()}
    return whole if len(lengths) > 1 else {name: whole[name] for name in ("input_ids", "labels")}


def one(variant: str, folder: Path, dtype: torch.dtype, lora: bool, lengths: list[int], steps: int) -> dict[str, Any]:
    """lengths: of the documents that this rank has."""
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
    tokens = sum(lengths)
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1 + rank))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    labels = ids.roll(-1)
    labels[bounds[1:] - 1] = -100
    if len(lengths) > 1:
        shares = torch.empty(len(lengths)).uniform_(*PROMPTS, generator=torch.Generator().manual_seed(3))
        for first, length, share in zip(bounds.tolist(), lengths, shares.tolist(), strict=False):
            labels[first : first + int(share * length)] = -100
    batch = padded(ids, labels, lengths)
    wanted = batch.pop("labels")

    def backward() -> Tensor:
        """The loss; nothing of its graph is left behind for the next step to find in memory."""
        if ours:
            loss = model(ids, bounds, labels, LOSS_CHUNK) / tokens
        else:
            logits = model(**batch).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="sum") / tokens
        loss.backward()
        return loss.detach().double()

    watcher, seconds, losses = Thread(target=watch), [], []
    watcher.start()
    for _ in range(steps):
        if world > 1:
            dist.barrier()
        started = time.perf_counter()
        total = backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world)
    done.set()
    watcher.join()
    return {"speed": world * tokens / min(seconds), "memory": peak[0] - held, "loss": losses[0], "last": losses[-1]}


def _memory() -> int:
    """Bytes of this process's own memory (RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def measured(case: dict[str, Any], world: int, folder: Path) -> dict[str, Any]:
    """The case on `world` fresh processes: speed and loss of the first, memory of the largest."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-P", __file__, "--case", json.dumps(case), "--folder", str(folder)]
        environment = without_thread_cache(dict(os.environ))
        command += ["--world", str(world), "--rendezvous", f"{place}/rendezvous", "--rank"]
        processes = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            for rank in range(world)
        ]
        said = [process.communicate() for process in processes]
        for process, (_, errors) in zip(processes, said, strict=True):
            if process.returncode:
                sys.exit(f"{case}: exit code {process.returncode}\n{errors[-2000:]}")
        answers = [json.loads(output.splitlines()[-1]) for output, _ in said]
    return {**answers[0], "memory": max(answer["memory"] for answer in answers)}


def main(options: argparse.Namespace) -> None:
    console = Console(width=120)
    title = f"torch {torch.__version__}, {options.layers} layers, {options.tokens} tokens, one thread a process"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint(folder, options.layers)
        for layout, world, dtype, lora in itertools.product(
            options.documents, options.worlds, options.dtypes, [mode == "lora" for mode in options.modes]
        ):
            lengths = documents(layout, options.tokens // world)
            shared = {"dtype": dtype, "lora": lora, "lengths": lengths, "steps": options.steps}
            found = {variant: measured({"variant": variant, **shared}, world, folder) for variant in VARIANTS}
            ours = found["ours"]
            what = f"{'lora' if lora else 'full'}, {dtype}, processes: {world}, documents: {world * len(lengths)}"
            table = Table(what, "tokens/s", "x", "memory MB", "x", "first loss", "difference", title=title)
            for variant, row in found.items():
                table.add_row(
                    variant if variant == "ours" else f"transformers {variant}" + (" + peft" if lora else ""),
                    f"{row['speed']:,.0f}", f"{ours['speed'] / row['speed']:.2f}", f"{row['memory'] / 1e6:,.0f}",
                    f"{ours['memory'] / row['memory']:.2f}", f"{row['loss']:.5f}", f"{row['loss'] - ours['loss']:+.1e}",
                )  # fmt: skip
            console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--documents", nargs="+", choices=["one", "ragged"], default=["one", "ragged"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--modes", nargs="+", default=["lora", "full"])
    for hidden in ("--case", "--folder", "--rendezvous"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if given.case is None:
        main(given)
    else:
        if given.world > 1:
            start = f"file://{given.rendezvous}"
            dist.init_process_group("gloo", init_method=start, rank=given.rank, world_size=given.world)
        what = json.loads(given.case)
        dtype = getattr(torch, what["dtype"])
        answer = one(what["variant"], Path(given.folder), dtype, what["lora"], what["lengths"], what["steps"])
        if given.world > 1:
            dist.destroy_process_group()
        print(json.dumps(answer))
