"""What a run is asked to do, checked in full before any process starts."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dayzero.runtime.checkpointing import checkpoints
from dayzero.runtime.config import TrainConfig, fixed, load_config
from dayzero.runtime.context_parallel import check_context_parallel
from dayzero.runtime.data import Example, Examples, load_tokenizer, read_examples
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, read_headers
from dayzero.runtime.load import check_same_checkpoint
from dayzero.runtime.lora import LoRALinear, apply_lora
from dayzero.runtime.nn import CausalLM, Routed
from dayzero.runtime.nn.index_loss import freeze_indexers, train_indexers
from dayzero.runtime.optimizer import make_optimizer
from dayzero.runtime.package import Package, load_package
from dayzero.runtime.parallel import Layout
from dayzero.runtime.peft_adapter import without_place
from dayzero.runtime.processes import device_gib
from dayzero.runtime.tensor_parallel import check_alone, check_tensor_parallel

if TYPE_CHECKING:
    from dayzero.runtime.plan import Plan


@dataclass(frozen=True)
class Job:
    """A checked run. checkpoint: where the weights and the tokenizer are. notes: what to tell the user at the start."""

    package: Path
    checkpoint: Path
    data: Path
    eval_data: Path | None
    run: Path
    config: TrainConfig
    layout: Layout
    resume: bool
    notes: tuple[str, ...] = ()

    @property
    def batches_per_step(self) -> int:
        return self.layout.batches * self.config.train.accumulation


def prepare(
    package: Path,
    *,
    data: Path | None,
    eval_data: Path | None,
    run: Path,
    world: int,
    overrides: Iterable[str] = (),
    checkpoint: Path | None = None,
    resume: bool = False,
    write: bool = True,
) -> Job:
    """Checks package, checkpoint, settings, layout, data and run folder, and writes run.json and the tokenised data.

    A resumed run keeps the settings and data of its run.json where nothing else is said. write: leave the files alone
    if False (only one of several processes writes). Raises InputError.
    """
    made = load_package(package, checkpoint)
    if made.verdict == "FAIL":
        raise InputError(
            str(made.folder),
            found="a package whose alignment FAILED",
            expected="one that reproduces its reference",
            hint=f"Read {made.folder / 'REPORT.md'}: training it would train another model than the checkpoint's.",
        )
    resume = resume or _is_restart(run)
    before = _record_of(run) if resume else {}
    file, overrides = made.folder / "train.yaml", list(overrides)
    config = load_config(before.get("config", file if file.is_file() else None), overrides)
    warning = _unverified(made, config)
    config, plan, notes = _settled(made, config, world)
    notes = [*warning, *notes]
    tp, cp = sharing(config)
    config, more = _same_batches(config, overrides, before.get("batches_per_step"), max(1, world // (tp * cp)))
    notes += more
    data, eval_data = data or _path(before, "data"), eval_data or _path(before, "eval_data")
    if data is None:
        raise InputError("--data", found="left out", expected="a file of training examples")
    model = meta_model(made, config)
    make_optimizer(model, config.optimizer)  # refuses settings of a role that this model does not have
    if config.checkpoint.keep_best and eval_data is None:
        raise InputError(
            "checkpoint.keep_best",
            found=f"{config.checkpoint.keep_best}, and no held-out data",
            expected="--eval-data, whose loss tells which checkpoint is best",
        )
    layout = _layout(config, plan, world)
    layout.check_experts([m.experts.experts for m in model.modules() if isinstance(m, Routed)])
    _check_shared_batches(model, config)
    if made.checkpoint is None:
        raise InputError(
            str(made.folder / "checkpoint"),
            found="no such folder",
            expected="a link to the checkpoint that this package was made from",
            hint="Say where it is with --checkpoint DIR.",
        )
    headers = read_headers(made.checkpoint)
    if config.train.init == "checkpoint":
        check_same_checkpoint(made.checkpoint, headers, made.spec.checkpoint)
    _check_run(run, resume)
    _check_positions(made, config)
    tokenizer = load_tokenizer(made.checkpoint)
    examples = {"train": _read(data, tokenizer, made, config)}
    if eval_data is not None:
        examples["eval"] = _read(eval_data, tokenizer, made, config)
    notes += [f"{name}: {rows.summary()}" for name, rows in examples.items()]
    notes += _only_merged(made, headers, model)
    job = Job(
        made.folder.resolve(), made.checkpoint, data, eval_data, run.resolve(), config, layout, resume, tuple(notes)
    )
    if write:
        (run / "data").mkdir(parents=True, exist_ok=True)
        for name, rows in examples.items():
            store_examples(run / "data" / f"{name}.pt", rows)
        record = run / "run.json.partial"
        record.write_text(json.dumps(_record(job), indent=1) + "\n")
        record.replace(run / "run.json")
    return job


def _unverified(package: Package, config: TrainConfig) -> list[str]:
    """What to tell the user of a package that nothing was compared with. Raises InputError where they do not say that
    it is to be trained all the same."""
    if package.verdict != "UNVERIFIED" and not package.spec.unverified:
        return []
    report = package.folder / "REPORT.md"
    if not config.train.allow_unverified:
        raise InputError(
            str(package.folder),
            found="an UNVERIFIED package: nothing was compared with a reference",
            expected="one that reproduces its reference",
            hint=f"Read {report}. To train it all the same: --set train.allow_unverified=true",
        )
    return [
        "WARNING: this package is UNVERIFIED. Nothing was compared with a reference: what is trained may be another "
        f"model than the checkpoint's. Read {report}"
    ]


def _only_merged(package: Package, headers: Mapping[str, TensorHeader], model: CausalLM) -> list[str]:
    """What to tell the user of adapters that cannot be exported as such, before they are trained."""
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    left = without_place(headers, package.rules, adapted)
    if not left:
        return []
    return [
        f"runtime export will write merged weights only, no adapter: PEFT has no module for {len(left)} of "
        f"{len(adapted)} adapters, such as {left[0]} (lora.targets chooses others)"
    ]


def meta_model(package: Package, config: TrainConfig) -> CausalLM:
    """The model that the run trains, adapters included, without memory. Raises InputError for targets that miss."""
    with torch.device("meta"):
        model = package.build()
        if config.train.mode == "lora":
            lora = config.lora
            apply_lora(model, lora.rank, lora.alpha, lora.dropout, lora.targets)
    if config.train.indexer_loss == "none":
        freeze_indexers(model)
    else:
        _train_indexers(model, config)
    return model


def _train_indexers(model: CausalLM, config: TrainConfig) -> None:
    wanted = config.train.indexer_loss
    if config.train.mode == "lora":
        raise InputError(
            "train.indexer_loss",
            found=f"{wanted}, with train.mode=lora",
            expected="none, or train.mode=full: indexers have no adapters",
        )
    if not train_indexers(model, None if wanted == "none" else wanted):
        raise InputError(
            "train.indexer_loss", found=f"{wanted}, and no layer with an indexer", expected="none for this model"
        )


def store_examples(file: Path, examples: Sequence[Example]) -> None:
    """Tokenised examples, end to end."""
    flat = {
        "ids": torch.tensor([token for example in examples for token in example.ids], dtype=torch.int32),
        "labels": torch.tensor([label for example in examples for label in example.labels], dtype=torch.int32),
        "lengths": torch.tensor([len(example.ids) for example in examples]),
    }
    torch.save(flat, file)


def stored_examples(file: Path) -> list[Example]:
    """What `store_examples` wrote."""
    flat = torch.load(file, weights_only=True)
    lengths = flat["lengths"].tolist()
    parts = zip(flat["ids"].split(lengths), flat["labels"].split(lengths), strict=True)
    return [Example(ids.tolist(), labels.tolist()) for ids, labels in parts]


def _record_of(run: Path) -> dict[str, Any]:
    file = run / "run.json"
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_text())
        return {name: record[name] for name in ("data", "eval_data", "config", "batches_per_step")}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(str(file), found=f"{type(error).__name__}: {error}", expected="the record of a run") from None


def _is_restart(run: Path) -> bool:
    """Whether the launcher that started this process has started processes for this run before: it restarts them with
    the same command, which says nothing of --resume. Its restart count is not asked: every node counts its own."""
    launcher = _launcher()
    if launcher is None or not (run / "run.json").is_file():
        return False
    try:
        return json.loads((run / "run.json").read_text()).get("launcher") == launcher
    except ValueError:
        return False


def _launcher() -> str | None:
    """The id of torchrun's job, where it is one of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return name if name not in (None, "", "none") else None


def _same_batches(
    config: TrainConfig, overrides: list[str], before: int | None, world: int
) -> tuple[TrainConfig, list[str]]:
    """Settings under which a step of a resumed run has as many batches as before, where the ranks allow it, and notes.

    before: batches in a step of the run, None for a new one.
    """
    now = world * config.train.accumulation
    if before is None or now == before:
        return config, []
    if any(override.partition("=")[0].strip() == "train.accumulation" for override in overrides) or before % world:
        return config, ["other ranks or accumulation than before: the rest of the run sees the data in another order"]
    train = config.train.model_copy(update={"accumulation": before // world})
    note = f"{world} ranks accumulate {before // world}: a step has the {before} batches that it had before"
    return config.model_copy(update={"train": train}), [note]


def _path(record: dict[str, Any], name: str) -> Path | None:
    return Path(record[name]) if record.get(name) else None


def _settled(package: Package, config: TrainConfig, world: int) -> tuple[TrainConfig, "Plan | None", list[str]]:
    """Settings in which tp, cp and prefetch are numbers, the plan where one was needed, and notes. tp and cp are 1
    unless that does not fit."""
    from dayzero.runtime.plan import plan_for

    asked, hbm = config.parallel, device_gib()
    tp, cp = fixed(asked.tp) or 1, fixed(asked.cp) or 1
    chosen = {"tp": tp, "cp": cp, "prefetch": 1 if asked.prefetch == "auto" else asked.prefetch}
    open_here = hbm is not None and "auto" in (asked.tp, asked.cp, asked.prefetch)
    if world % (tp * cp) or not (open_here or asked.ep == "auto"):
        return config.model_copy(update={"parallel": asked.model_copy(update=chosen)}), None, []
    # Without a device's memory nothing has to fit: only the experts' ranks are open.
    plan = plan_for(package.spec, config, world, hbm, *(() if open_here else (tp, cp)))
    notes = []
    if open_here:
        chosen = {"tp": plan.mesh.tp, "cp": plan.mesh.cp, "prefetch": plan.prefetch}
        if (plan.mesh.tp, plan.mesh.cp) != (tp, cp):
            ranks, shared = plan.mesh.tp * plan.mesh.cp, f"tp {plan.mesh.tp}, cp {plan.mesh.cp}"
            notes = [f"a batch does not fit into a device: {ranks} ranks share one ({shared})"]
    return config.model_copy(update={"parallel": asked.model_copy(update=chosen)}), plan, notes


def sharing(config: TrainConfig) -> tuple[int, int]:
    """(tp, cp) of settings in which both are numbers."""
    tp, cp = fixed(config.parallel.tp), fixed(config.parallel.cp)
    assert tp is not None
    assert cp is not None
    return tp, cp


def _layout(config: TrainConfig, plan: "Plan | None", world: int) -> Layout:
    replicate, ep = config.parallel.dp_replicate, config.parallel.ep
    tp, cp = sharing(config)
    together = tp * cp
    if world % together:
        raise InputError(
            "parallel.tp", found=f"{tp}, with cp {cp}", expected=f"a product that divides the {world} ranks"
        )
    if ep == "auto":
        assert plan is not None
        ep = plan.mesh.ep
        replicate = plan.mesh.dp_replicate if replicate == "auto" else replicate
    replicate = 1 if replicate == "auto" else replicate
    batches = world // together
    if batches % replicate:
        what = f"{batches} batches at a time" if together > 1 else f"{world} ranks"
        raise InputError("parallel.dp_replicate", found=str(replicate), expected=f"a divisor of the {what}")
    return Layout(replicate, batches // replicate, ep, tp, cp)


def _check_shared_batches(model: CausalLM, config: TrainConfig) -> None:
    """Raises InputError for what cannot be dealt out to the ranks that share a batch."""
    tp, cp = sharing(config)
    check_alone(model, tp, cp)
    if tp > 1:
        check_tensor_parallel(model, tp)
    if cp > 1:
        check_context_parallel(model, cp)
    if tp > 1 and config.train.indexer_loss != "none":
        raise InputError(
            "train.indexer_loss",
            found=f"{config.train.indexer_loss}, with tp {tp}",
            expected="none: the loss of an indexer needs the attention of all heads",
        )


def _check_run(run: Path, resume: bool) -> None:
    if run.exists() and not run.is_dir():
        raise InputError(str(run), found="a file", expected="a folder, or none yet", hint="Choose another --run.")
    if not resume and checkpoints(run):
        raise InputError(
            str(run),
            found=f"a run with a checkpoint ({checkpoints(run)[0].name})",
            expected="a new folder",
            hint="Continue it with --resume, or choose another --run.",
        )


def _check_positions(package: Package, config: TrainConfig) -> None:
    longest = package.spec.max_positions
    if longest is not None and config.data.max_length > longest:
        raise InputError(
            "data.max_length",
            found=str(config.data.max_length),
            expected=f"at most the model's {longest} positions",
            hint=f"Set it with: --set data.max_length={longest}",
        )


def _read(file: Path, tokenizer: Any, package: Package, config: TrainConfig) -> Examples:
    examples = read_examples(file, tokenizer, max_length=config.data.max_length)
    largest = max(max(example.ids) for example in examples)
    largest = max(largest, max(max(example.labels) for example in examples))
    if largest >= package.spec.vocabulary:
        raise InputError(
            str(package.checkpoint),
            found=f"a tokenizer that makes token {largest}",
            expected=f"tokens under the model's vocabulary of {package.spec.vocabulary}",
            hint="Is the tokenizer of another model?",
        )
    return examples


def _record(job: Job) -> dict[str, Any]:
    return {
        "launcher": _launcher(),
        "package": str(job.package),
        "checkpoint": str(job.checkpoint),
        "data": str(job.data.resolve()),
        "eval_data": str(job.eval_data.resolve()) if job.eval_data else None,
        "layout": asdict(job.layout),
        "batches_per_step": job.batches_per_step,
        "config": job.config.model_dump(mode="json"),
    }
