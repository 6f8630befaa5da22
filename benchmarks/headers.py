"""`onboard inspect` against what reading the same headers costs: python benchmarks/headers.py [NAME] [--repeats 5].

NAME is a manifest of tests/data (Kimi-K3 if left out), whose skeleton is written to a temporary folder first. Every
figure is a whole process, started anew, from the interpreter's start to its end; ours and the peers alternate, and each
figure is the least of the repeats: of the run that was disturbed least. On a busy machine look at the CPU time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import skeleton
from rich.console import Console
from rich.table import Table

SECONDS, BYTES, RATIO = 5.0, 1e9, 3.0  # what ours may take
_INDEX = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
files = sorted(set(weight_map.values()))
"""
PEERS = {
    "safetensors + json": _INDEX
    + """
from safetensors import safe_open
found = {}
for file in files:
    with safe_open(folder / file, framework="numpy") as shard:
        for name in shard.keys():
            part = shard.get_slice(name)
            found[name] = (part.get_dtype(), part.get_shape())
print(len(found))
""",
    "json alone": _INDEX
    + """
found = {}
for file in files:
    with (folder / file).open("rb") as stream:
        found |= json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
print(len(found) - 1)
""",
}


def measure(command: list[str]) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, peak bytes) of one process. Raises RuntimeError if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


def compare(folder: Path, repeats: int) -> dict[str, tuple[float, float, float]]:
    """Name -> the least of each figure."""
    commands = {
        "onboard inspect --json": [str(Path(sys.executable).with_name("onboard")), "inspect", str(folder), "--json"],
        **{name: [sys.executable, "-c", code, str(folder)] for name, code in PEERS.items()},
    }
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            taken[name].append(measure(command))
    return {name: tuple(map(min, zip(*runs, strict=True))) for name, runs in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="Kimi-K3", choices=skeleton.NAMES)
    parser.add_argument("--repeats", default=5, type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        with get_context("spawn").Pool(1) as pool:  # a process counts among its peak what its parent held at the start
            folder = pool.apply(skeleton.make, (options.name, Path(scratch) / options.name))
        figures = compare(folder, options.repeats)
    console, ours = Console(width=100), next(iter(figures.values()))
    console.print(f"{options.name}: {len(skeleton.tensors(options.name)):,} tensors; load {os.getloadavg()[0]:.1f}")
    table = Table("process", "wall s", "CPU s", "peak MB", "ours, wall", "ours, CPU", box=None)
    for name, (wall, cpu, peak) in figures.items():
        ratios = (f"{ours[0] / wall:.2f} x", f"{ours[1] / cpu:.2f} x")
        table.add_row(name, f"{wall:.2f}", f"{cpu:.2f}", f"{peak / 1e6:.0f}", *ratios)
    console.print(table)
    peers = [cpu for name, (_, cpu, _) in figures.items() if name in PEERS]
    good = ours[0] <= SECONDS and ours[2] <= BYTES and ours[1] <= RATIO * min(peers)
    limits = f"{SECONDS:.0f} s, {BYTES / 1e6:.0f} MB, {RATIO:.0f} x the faster peer's CPU time"
    console.print(f"limits: {limits}: {'kept' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
