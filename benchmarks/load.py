"""Host memory and time of loading: python -P benchmarks/load.py [--experts 32] [--width 1024] [--stored bf16].

One table. Every rank loads its own part of one checkpoint; while it does, its anonymous memory (RssAnon: what the
process itself has allocated; mapped files are not in it) is sampled. `beyond` is what the peak was above the rank's own
parameters, and must not be more than the largest tensor of the checkpoint. `s` is with the comparison of content
hashes, `unhashed s` without. The peer is what most loaders do: every rank reads all tensors with safetensors'
load_file, then keeps its part. Exits with 1 if a limit is broken.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dayzero.runtime.content_hash import content_hash, hashed_dtype, hex_of
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint, local_part
from dayzero.runtime.quantisation import FORMATS, encode, quantised_groups
from dayzero.runtime.safetensors_reader import SafetensorsReader, TensorsReader
from dayzero.runtime.weights import Cast, Concat, Decoded, Rule, Stack, Stored, bind, whole

MB = 1e6
VOCABULARY = 32  # embedding rows, in units of the width


@dataclass(frozen=True)
class Case:
    """dtype: of the parameters. ranks, shard: over how many processes, and how: "none", "fsdp" or "ep"."""

    stored: str
    dtype: str
    ranks: int
    shard: str


CASES = [
    Case("bf16", "bfloat16", 1, "none"),
    Case("bf16", "float32", 1, "none"),
    Case("bf16", "float32", 4, "fsdp"),
    Case("bf16", "float32", 4, "ep"),
    Case("mxfp4_packed", "bfloat16", 1, "none"),
    Case("mxfp4_packed", "bfloat16", 4, "fsdp"),
    Case("mxfp4_packed", "bfloat16", 4, "ep"),
    Case("fp8_block", "float32", 4, "fsdp"),
    Case("fp8_block", "float32", 4, "ep"),
]


class Model(nn.Module):
    """An embedding and one layer of experts, on the meta device."""

    def __init__(self, experts: int, width: int, dtype: torch.dtype):
        super().__init__()
        options = {"dtype": dtype, "device": "meta"}
        self.embed = nn.Parameter(torch.empty(VOCABULARY * width, width, **options))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, width, **options))
        self.down = nn.Parameter(torch.empty(experts, width, width, **options))


def rules(folder: Path, experts: int, to: str) -> list[Rule]:
    """Gate above up, both by expert; decoded where the checkpoint is quantised."""
    groups = quantised_groups(read_headers(folder))

    def leaf(which: str):
        group = groups.get(f"experts.0.{which}.weight")
        if group is None:
            return Stored(f"experts.{{expert}}.{which}.weight")
        names = tuple((role, name.replace("experts.0.", "experts.{expert}.")) for role, name in group.parts.items())
        return Cast("bfloat16", Decoded(group.format, names))

    return [
        Rule("embed", Stored("embed.weight")),
        Rule("gate_up", Stack("expert", experts, Concat(0, (leaf("gate"), leaf("up"))))),
        Rule("down", Stack("expert", experts, leaf("down"))),
    ]


def make(folder: Path, stored: str, experts: int, width: int) -> None:
    """A checkpoint of random weights in shards of a few experts."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    files = {"embed.weight": "0.safetensors"}
    save_file({"embed.weight": new(VOCABULARY * width, width).bfloat16()}, folder / "0.safetensors")
    for first in range(0, experts, 8):
        tensors: dict[str, torch.Tensor] = {}
        for expert in range(first, min(first + 8, experts)):
            for which in ("gate", "up", "down"):
                name, value = f"experts.{expert}.{which}.weight", new(width, width)
                if stored == "bf16":
                    tensors[name] = value.bfloat16()
                elif stored == "mxfp4_packed":
                    like = {
                        "packed": torch.zeros(width, width // 2, dtype=torch.uint8),
                        "scale": torch.zeros(width, width // 32, dtype=torch.uint8),
                    }
                    parts, _ = encode(FORMATS[stored], value, like)
                    tensors |= {f"{name}_{role}": part for role, part in parts.items()}
                else:
                    like = {
                        "weight": torch.zeros(width, width, dtype=torch.float8_e4m3fn),
                        "scale": torch.zeros(-(-width // 128), -(-width // 128)),
                    }
                    parts, _ = encode(FORMATS[stored], value, like)
                    tensors |= {name: parts["weight"], f"{name}_scale_inv": parts["scale"]}
        file = f"{first + 1}.safetensors"
        save_file(tensors, folder / file)
        files |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def hashes_of(folder: Path, experts: int, to: str) -> dict[str, str]:
    """What onboarding records of the checkpoint."""
    shapes = {name: header.shape for name, header in read_headers(folder).items()}
    found, reader = {}, SafetensorsReader(folder)
    for name, rule in bind(rules(folder, experts, to)).items():
        value = rule.read(reader, shapes)
        shape = tuple(value.shape)
        found[name] = hex_of(content_hash(value, shape, whole(shape), hashed_dtype(value.dtype)))
    return found


class Sampler(threading.Thread):
    """The peak of this process's anonymous memory, every millisecond."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.running = 0, True

    def run(self) -> None:
        while self.running:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.001)


def anonymous() -> int:
    """Bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def rank_main(rank: int, case: Case, folder: Path, experts: int, width: int, how: str, out: Path) -> None:
    """One rank: builds its shards, loads, and writes what it measured. how: "hashed", "unhashed" or "peer"."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["LOAD_PORT"]}
    dist.init_process_group("gloo", rank=rank, world_size=case.ranks)
    model = Model(experts, width, getattr(torch, case.dtype))
    if case.shard != "none":
        mesh = init_device_mesh("cpu", (case.ranks,))
        if case.shard == "ep":
            for name in ("gate_up", "down"):
                model.register_parameter(name, nn.Parameter(distribute_tensor(getattr(model, name), mesh, [Shard(0)])))
            ignored = {model.gate_up, model.down}
            fully_shard(model, mesh=mesh, ignored_params=ignored)
        else:
            fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    bound, headers = rules(folder, experts, case.dtype), read_headers(folder)
    hashes = json.loads((folder / "hashes.json").read_text()) if how == "hashed" else None
    own = sum(local_part(parameter)[0].nbytes for parameter in model.parameters())
    dist.barrier()
    before, sampler, start = anonymous(), Sampler(), time.perf_counter()
    sampler.start()
    if how == "peer":
        everything: dict[str, torch.Tensor] = {}
        for file in sorted({header.file for header in headers.values()}):
            everything |= {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
        shapes = {name: header.shape for name, header in headers.items()}
        for name, rule in bind(bound).items():
            local, region = local_part(model.get_parameter(name))
            local.copy_(rule.read(TensorsReader(everything), shapes)[region])
        read = sum(tensor.nbytes for tensor in everything.values())
    else:
        read = load_checkpoint(model, bound, folder, headers, hashes=hashes)
    seconds = time.perf_counter() - start
    sampler.running = False
    sampler.join()
    made = {"own": own, "beyond": sampler.peak - before - own, "read": read, "seconds": seconds}
    (out / f"{rank}.json").write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, folder: Path, experts: int, width: int, how: str) -> dict[str, float]:
    """The worst rank of each figure."""
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(rank_main, (case, folder, experts, width, how, Path(out)), nprocs=case.ranks)
        found = [json.loads(file.read_text()) for file in Path(out).iterdir()]
    return {figure: max(rank[figure] for rank in found) for figure in found[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--stored", choices=sorted({case.stored for case in CASES}), help="only this format")
    parser.add_argument("--port", default="29617")
    options = parser.parse_args()
    os.environ["LOAD_PORT"] = options.port
    table = Table(title="loading, worst rank; beyond: peak RssAnon above the rank's own parameters, MB")
    words = ("stored", "parameters", "ranks")
    for column in (*words, "own", "read", "beyond", "limit", "s", "unhashed s", "peer MB", "peer s"):
        table.add_column(column, justify="left" if column in words else "right")
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for stored in dict.fromkeys(case.stored for case in CASES if options.stored in (None, case.stored)):
            place = Path(folder) / stored
            place.mkdir()
            make(place, stored, options.experts, options.width)
            (place / "hashes.json").write_text(json.dumps(hashes_of(place, options.experts, "bfloat16")))
            limit = max(header.end - header.start for header in read_headers(place).values())
            for case in (case for case in CASES if case.stored == stored):
                ours, plain, peer = (
                    measure(case, place, options.experts, options.width, how) for how in ("hashed", "unhashed", "peer")
                )
                broken += ours["beyond"] > limit
                table.add_row(
                    stored,
                    case.dtype,
                    f"{case.ranks} {case.shard}",
                    *(f"{value / MB:.0f}" for value in (ours["own"], ours["read"], ours["beyond"], limit)),
                    f"{ours['seconds']:.2f}",
                    f"{plain['seconds']:.2f}",
                    f"{peer['beyond'] / MB:.0f}",
                    f"{peer['seconds']:.2f}",
                )
    Console(width=120).print(table)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
