"""The rungs that onboarding climbs, L0 to L2, on the generated code."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from dayzero.onboard.align import Alignment, Rung, blocks_rung, coverage_rung, model_rung
from dayzero.onboard.align.ladder import THRESHOLDS, Float32, judge, not_compared
from dayzero.onboard.align.model import CannotLoad, real_weights_error
from dayzero.onboard.align.precision import float32_steps
from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.generate import model_files
from dayzero.onboard.inspect.classify import Ledger
from dayzero.onboard.install import write_files
from dayzero.onboard.lifted_operators import custom_operators
from dayzero.onboard.specify import Specification
from dayzero.runtime.package import Package, load_package
from dayzero.runtime.packed import quantised_groups
from dayzero.runtime.spec import ModelSpec


def load_shrunk(specification: Specification, folder: Path, custom: Path | None = None) -> Package:
    """The shrunk package: model.py and weights.py by the same templates as the real ones, written and imported.

    custom: a folder of hand-written code, of which it runs what is for its lifted classes."""
    return _load(specification.shrunk, folder, custom)


def _load(spec: ModelSpec, folder: Path, custom: Path | None) -> Package:
    write_files(folder, model_files(spec))
    for name, there in custom_operators(custom, spec).items():
        if there and custom is not None:
            (folder / "custom").mkdir(exist_ok=True)
            shutil.copy(custom / Path(name).name, folder / name)
    return load_package(folder)


def climb(
    checkpoint: Checkpoint,
    specification: Specification,
    ledger: Ledger,
    tell: Callable[[str], None],
    count: Callable[[int, int], None] = lambda done, total: None,
    custom: Path | None = None,
) -> Alignment:
    """Rungs L0 to L2. custom: the package's folder of hand-written code, which stands in for lifted classes."""
    rungs: dict[str, Rung] = {}
    tell("L0: every tensor in and out")
    rungs["L0"], hashes = coverage_rung(checkpoint, ledger, specification.spec, count, specification.tables)
    if specification.unverified:
        for name in ("L1", "L2"):
            rungs[name] = not_compared(f"no reference: {specification.unverified}", THRESHOLDS[name])
        blocks = {"proven": 0, "lifted": 0, "unverified": len(specification.spec.blocks())}
        return Alignment(rungs=rungs, blocks=blocks, hashes=hashes)
    tell("L1: every block against its module")
    rungs["L1"], float32 = _blocks_rung(specification, custom)
    tell("L2: the generated model against the reference")
    rung = model_rung(lambda folder: load_shrunk(specification, folder, custom), specification.shrunk_config, tell)
    rungs["L2"] = _with_real_weights(rung, checkpoint, specification, tell, custom)
    proofs = [block.proof for block in specification.shrunk.blocks() if block.proof is not None]
    lifted = len({proof.module for proof in proofs if proof.status == "lifted"})
    blocks = {"proven": len(specification.tried) - lifted, "lifted": lifted, "unverified": 0}
    return Alignment(rungs=rungs, blocks=blocks, float32=float32, hashes=hashes)


def _blocks_rung(specification: Specification, custom: Path | None) -> tuple[Rung, list[Float32]]:
    """L1: what the search proved, and the generated blocks once more; and what a run in bfloat16 computes in float32.
    A warning where a person has accepted a config field that only its present value is proven for, where the reference
    contradicts itself, and where what is written by hand computes by other operations."""
    rung = judge({tried.module: tried.error for tried in specification.tried}, THRESHOLDS["L1"])
    with tempfile.TemporaryDirectory() as folder:
        shrunk = load_shrunk(specification, Path(folder), custom)
        again = blocks_rung(shrunk, specification.shrunk_config)
        float32 = float32_steps(shrunk, specification.shrunk_config)
    if rung.verdict == "PASS":
        rung = again.model_copy(update={"details": rung.details + again.details})
    open_fields = sorted({item.field for item in specification.interventions if item.effect == "unexplained"})
    said = [f"{module}: {wrong}" for module, wrong in specification.contradictions.items()]
    said += [f"proven at the present {', '.join(open_fields)} only"] if open_fields else []
    if rung.verdict == "WARN":
        said.append(rung.where)
    if rung.verdict not in {"PASS", "WARN"} or not said:
        return rung, float32
    return rung.model_copy(update={"verdict": "WARN", "where": "; ".join(said)}), float32


def _with_real_weights(
    rung: Rung,
    checkpoint: Checkpoint,
    specification: Specification,
    tell: Callable[[str], None],
    custom: Path | None,
) -> Rung:
    """The rung, joined by the logits on the real weights where both models fit into memory."""
    if quantised_groups(checkpoint.headers):
        skipped = "real weights: not compared, the reference would need its own quantised kernels"
        return rung.model_copy(update={"details": [*rung.details, skipped]})
    tell("L2: the real weights, float32")
    spec = specification.spec
    with tempfile.TemporaryDirectory() as folder:
        try:
            error = real_weights_error(_load(spec, Path(folder), custom), checkpoint)
        except CannotLoad as refused:
            skipped = f"real weights: not compared, the reference does not load them: {refused}"
            return rung.model_copy(update={"details": [*rung.details, skipped]})
    if error is None:
        return rung.model_copy(update={"details": [*rung.details, "real weights: not compared, too large for memory"]})
    real = judge({"real weights, float32: logits": error}, THRESHOLDS["L2 float32"])
    details = [*rung.details, *real.details]
    return (rung if real.verdict == "PASS" else real).model_copy(update={"details": details})
