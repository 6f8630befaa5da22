"""Onboards every family of the conformance field and says how far each came.

    PYTHONPATH=tests python -m zoo.conformance                  all of them; writes docs/zoo.md (`make zoo`)
    PYTHONPATH=tests python -m zoo.conformance mixtral jamba    these, with every reason; writes nothing

For each family a small checkpoint of random weights is written as transformers saves it, and taken through the steps of
`onboard`: specify, settle, L0, L1, L2. Two processes work, each on one family after another.
"""

import argparse
import json
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from zoo import families

ROOT = Path(__file__).parents[2]
RUNGS = ("L0", "L1", "L2")
LONGEST = 300  # seconds for one family
WORKERS = 2


@dataclass
class Result:
    """How far a family came. rungs: verdict of those that ran. share: of the parameters of the layers, how much is in
    proven blocks; None where that cannot be said. lifted: (module whose code was taken over, where, why no
    block stands for it). why: what is not proven, or what went wrong, one line each."""

    family: str
    rungs: dict[str, str] = field(default_factory=dict)
    share: float | None = None
    lifted: list[tuple[str, str, str]] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(self.rungs.get(rung) in ("PASS", "WARN") for rung in RUNGS)


def write_checkpoint(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of the family's own config with random float32 weights, under the names that transformers saves."""
    import torch
    from safetensors.torch import save_file

    from dayzero.onboard.oracle.reference import build, on_disk, redraw

    config = families.config(family)
    model, _ = build(config)
    redraw(model, torch.Generator().manual_seed(seed))
    stored = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in on_disk(model).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def onboard(family: str, folder: Path, tell: Any = lambda line: None) -> Result:
    """Takes one family through the ladder. Never raises: what goes wrong is in the result."""
    from dayzero.onboard.align.climb import climb
    from dayzero.onboard.checkpoint import read_checkpoint
    from dayzero.onboard.prove.proven import NotProven
    from dayzero.onboard.report.layers import lifted
    from dayzero.onboard.specify_checkpoint import specify_checkpoint

    result, start = Result(family), time.monotonic()
    try:
        with _limited(LONGEST):
            checkpoint = read_checkpoint(write_checkpoint(family, folder / family))
            try:
                specification, ledger = specify_checkpoint(checkpoint, family, {}, tell)
            except NotProven as error:
                result.why = [f"{item.where}: {item.why}" for item in error.unproven]
                result.why += [f"    {line}" for item in error.unproven for line in item.tried[:1]]
                result.share = _share_left(families.config(family), [item.where for item in error.unproven])
            else:
                result.share, result.lifted = _share(specification.spec), lifted(specification.spec)
                alignment = climb(checkpoint, specification, ledger, tell)
                result.rungs = {name: rung.verdict for name, rung in alignment.rungs.items()}
                for name, rung in alignment.rungs.items():
                    if rung.verdict != "PASS":
                        result.why.append(f"{name}: {rung.where} ({rung.worst:.1e} of {rung.threshold:.0e})")
                        result.why += [f"    {line}" for line in rung.details[:3]]
    except Exception as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        said = " ".join(str(error).split())[:300]
        result.why = [f"{type(error).__name__} in {frames[-1]}: {said}", f"    by way of {' '.join(frames[-6:-1])}"]
    result.seconds = time.monotonic() - start
    return result


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread of this process after that long."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _share(spec: Any) -> float:
    """The share of the blocks' parameters that are in proven ones."""
    import torch

    from dayzero.runtime.nn.lifted_source import classes_of

    total, proven = 0, 0
    lifted_classes = classes_of(spec.lifted)
    with torch.device("meta"):
        blocks = [block for kinds in spec.stacks().values() for kind in kinds for block in kind.blocks.values()]
        for block in [*blocks, spec.norm, *(b for b in (spec.embed_norm, spec.merge) if b is not None)]:
            held = sum(parameter.numel() for parameter in block.build(lifted_classes).parameters())
            total += held
            if block.proof is not None and block.proof.status == "proven":
                proven += held
    return proven / max(1, total)


def _share_left(config: dict[str, Any], where: list[str]) -> float | None:
    """The share of the layers' parameters outside the modules that are not proven, on the small model."""
    from dayzero.onboard.oracle.reference import build
    from dayzero.onboard.shrink.layers import layer_list
    from dayzero.onboard.shrink.shrink import layer_signatures, part_signature, shrink

    try:
        model, _ = build(shrink(config), device="meta")
    except Exception:
        return None
    layers = layer_list(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    if any(not path.startswith(f"{prefix}.") for path in where):
        return None
    signatures = layer_signatures(model)
    open_names: set[str] = set()
    for path in where:
        number, _, part = path.removeprefix(f"{prefix}.").partition(".")
        alike = [
            index
            for index, signature in enumerate(signatures)
            if part and part_signature(signature, part) == part_signature(signatures[int(number)], part)
        ]
        for index in {int(number), *alike}:
            below = f"{index}.{part}." if part else f"{index}."
            open_names |= {name for name, _ in layers.named_parameters() if name.startswith(below)}
    sizes = {name: parameter.numel() for name, parameter in layers.named_parameters()}
    return 1 - sum(sizes[name] for name in open_names) / max(1, sum(sizes.values()))


def _work(family: str) -> Result:
    import logging
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return onboard(family, Path(folder))


def run_all(names: list[str], workers: int = WORKERS) -> Iterator[Result]:
    """Results as they come. A process that dies takes only its own family with it, and is replaced."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[Result] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def lane() -> None:
        pool = None
        with suppress(queue.Empty):
            while True:
                name = waiting.get_nowait()
                pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
                try:
                    done.put(pool.submit(_work, name).result())
                except Exception as error:
                    done.put(Result(name, why=[f"its process died: {type(error).__name__}"]))
                    pool.shutdown(wait=False)
                    pool = None
        if pool:
            pool.shutdown()

    for _ in range(workers):
        threading.Thread(target=lane, daemon=True).start()
    for _ in names:
        yield done.get()


def table(results: list[Result], seconds: float) -> str:
    """docs/zoo.md."""
    passed = [result for result in results if result.passed]
    counts = Counter(len(result.rungs) == len(RUNGS) for result in results)
    clean = [result for result in passed if not result.lifted]
    times = sorted(result.seconds for result in results)
    lines = [
        "# The conformance field",
        "",
        "Written by `make zoo`: every family of transformers with routed experts, recurrent or learned sparse",
        "attention, as a small checkpoint of random weights, onboarded with no human edit. Share: of the layers'",
        "parameters, how much is in proven blocks. PASS, WARN and FAIL are the rungs of the ladder",
        "(`architecture.md`); a dash is a rung that was not reached.",
        "",
        f"**{len(passed)} of {len(results)} families pass L0, L1 and L2; {len(clean)} of them with nothing lifted.**",
        f"Median {times[len(times) // 2]:.0f} s a family, longest {times[-1]:.0f} s, {seconds / 60:.0f} minutes in all"
        f" on {WORKERS} processes; {counts[False]} families end before the ladder.",
        "",
        "| family | L0 | L1 | L2 | share | lifted | not proven | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in sorted(results, key=lambda result: result.family):
        rungs = [result.rungs.get(rung, "-") for rung in RUNGS]
        share = "-" if result.share is None else f"{int(1000 * result.share) / 10:.1f}%"
        why = result.why[0].replace("|", "/")[:160] if result.why else ""
        modules = ", ".join(dict.fromkeys(module for module, _, _ in result.lifted))
        cells = [result.family, *rungs, share, modules, why, f"{result.seconds:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    reasons = [line for result in sorted(results, key=lambda result: result.family) for line in _reasons(result)]
    if reasons:
        lines += ["", "## What is lifted, and why", ""]
        lines += [
            "What the search says of each block that is the reference's own code: the block of the library that is"
        ]
        lines += [
            "nearest and what of the reference it has no explanation for, or what the reference has and runs.",
            "",
        ]
        lines += reasons
    return "\n".join(lines) + "\n"


def _reasons(result: Result) -> list[str]:
    """One line for each reason, with all modules that have it."""
    places: dict[str, list[str]] = {}
    for module, where, why in result.lifted:
        places.setdefault(why, []).append(f"`{module}` ({where})")
    return [f"- **{result.family}** {', '.join(held)}: {why or 'not said'}" for why, held in places.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Onboards the families of the conformance field.")
    parser.add_argument("families", nargs="*", help="only these, with all reasons; writes no file")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--json", type=Path, help="writes the results there as well")
    options = parser.parse_args()
    unknown = [name for name in options.families if name not in families.FAMILIES]
    if unknown:
        parser.error(f"no family {', '.join(unknown)}")
    names = options.families or list(families.FAMILIES)
    start, results = time.monotonic(), []
    for result in run_all(names, min(options.workers, len(names))):
        results.append(result)
        rungs = " ".join(f"{rung} {result.rungs.get(rung, '-')}" for rung in RUNGS)
        share = "" if result.share is None else f" {result.share:.0%} proven"
        print(f"{result.family:22} {rungs}{share} {result.seconds:.0f} s  {result.why[0][:150] if result.why else ''}")
        if options.families:
            for line in result.why[1:]:
                print(f"    {line}")
            for line in _reasons(result):
                print(f"    lifted: {line[2:]}")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    passed = sum(result.passed for result in results)
    print(f"{passed} of {len(results)} pass, {time.monotonic() - start:.0f} s")
    if not options.families:
        (ROOT / "docs" / "zoo.md").write_text(table(results, time.monotonic() - start))
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
