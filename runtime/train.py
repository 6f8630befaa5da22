"""The training loop, as every rank runs it."""

import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dayzero.runtime import checkpointing, stopping
from dayzero.runtime.async_save import Saver
from dayzero.runtime.balance import Balance, arrange_experts
from dayzero.runtime.headers import read_headers
from dayzero.runtime.job import Job, meta_model, stored_examples
from dayzero.runtime.load import load_checkpoint, load_random
from dayzero.runtime.lora import reset_lora
from dayzero.runtime.mesh import Layout, batch_of_rank, make_meshes
from dayzero.runtime.metrics import MetricsLog, StepMetrics
from dayzero.runtime.nn import CausalLM
from dayzero.runtime.nn.encoder import prompts
from dayzero.runtime.nn.index_loss import index_losses
from dayzero.runtime.optimizer import Optimizer, clip_gradients, gradient_norm, make_optimizer
from dayzero.runtime.package import Package, load_package
from dayzero.runtime.packing import Batch, Packer
from dayzero.runtime.parallel import parallelise
from dayzero.runtime.precision import compute_dtype, keep_parameters, stored_dtypes
from dayzero.runtime.processes import peak_bytes
from dayzero.runtime.recompute import recompute
from dayzero.runtime.schedule import learning_rate
from dayzero.runtime.skipped_steps import SkippedSteps, keep_batches


def train(job: Job, device: torch.device, stop: stopping.Request | None = None) -> None:
    """Trains on the process group that this process has joined, and leaves metrics and checkpoints in job.run.

    stop: ends the run after the step that is under way, with a checkpoint. Raises Diverged, on all ranks in the same
    step; InputError for weights or a checkpoint that do not fit; OSError if the last checkpoint cannot be written.
    """
    config, rank, own_batch = job.config, dist.get_rank(), batch_of_rank(job.layout)
    # Off the CPU an operation without a deterministic form warns; it does not end the run.
    torch.use_deterministic_algorithms(config.train.deterministic, warn_only=device.type != "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda" and config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
    console = Console() if rank == 0 else Console(quiet=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    package = load_package(job.package, job.checkpoint)
    model = build_model(package, job, device)
    for line in (*job.notes, _description(package, model, job, device)):
        say(line)
    optimizer = make_optimizer(model, config.optimizer)
    balance = Balance(model, config.balance, dist.group.WORLD)
    done = checkpointing.restore(job.run, model, optimizer, say) if job.resume else 0
    if job.resume:
        say(f"resuming after step {done}" if done else "no checkpoint yet: starting from step 0")

    # One packer rank for every batch of a step: the same data for 8 ranks as for 4 that accumulate 2.
    accumulation = config.train.accumulation
    data = stored_examples(job.run / "data" / "train.pt")
    packer = Packer(data, config.data.tokens_per_rank, job.batches_per_step, config.train.seed)
    held_out = None
    if job.eval_data is not None:
        held_out = Packer(
            stored_examples(job.run / "data" / "eval.pt"), config.data.tokens_per_rank, job.layout.batches, 0
        )

    log = MetricsLog(job.run, config.train.steps, done, config.log.tensorboard, console) if rank == 0 else None
    say = log.say if log is not None else say
    skipped = SkippedSteps(config.train.max_skipped)
    with log or nullcontext(), Saver(job.run, config.checkpoint, say) as saver:
        if held_out is not None and done == 0:
            _evaluate(model, held_out, job, 0, log, device)
        for step in range(done, config.train.steps):
            # Randomness (dropout) is a function of seed, step and batch: nothing about it needs saving.
            torch.manual_seed(((config.train.seed * 1_000_003 + step) * 100_003 + own_batch) % 2**63)
            batches = [packer.batch(step, own_batch * accumulation + micro) for micro in range(accumulation)]
            metrics = train_step(model, optimizer, batches, job, step, device, balance)
            if log is not None:
                log.step(metrics)
            skipped.count(metrics.step, metrics.loss, metrics.grad_norm, metrics.skipped)

            last, stopped = metrics.step == config.train.steps, stopping.agreed(stop, device)
            saving = last or stopped or metrics.step % config.checkpoint.every == 0
            judged = saving and config.checkpoint.keep_best > 0
            loss = None
            if held_out is not None and not stopped and (last or judged or metrics.step % config.eval.every == 0):
                loss = _evaluate(model, held_out, job, metrics.step, log, device)
            if saving:
                saver.save(metrics.step, model, optimizer, loss)
            if stopped:
                say(f"asked to stop: saving step {metrics.step}; continue with --resume --run {job.run}")
                break


def build_model(package: Package, job: Job, device: torch.device) -> CausalLM:
    """The sharded model with its weights, from the checkpoint or at random."""
    config = job.config
    headers = read_headers(job.checkpoint)
    model = meta_model(package, config)
    keep_parameters(model, config.train.precision, stored_dtypes(package.rules, headers))
    if config.memory.recompute:
        for layer in model.all_layers:
            recompute(layer)
    prefetch = 1 if config.parallel.prefetch == "auto" else config.parallel.prefetch
    parallelise(model, make_meshes(job.layout, device.type), compute_dtype(config.train.precision), prefetch)
    arrange_experts(model, config.experts)
    model.to_empty(device=device)
    adapters = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in ("lora_a", "lora_b")]
    if config.train.init == "random":
        with torch.device("meta"):
            fresh = package.build()
        load_random(model, fresh, package.spec.initializer_range, config.train.seed)
    else:
        load_checkpoint(model, package.rules, job.checkpoint, headers, adapters, package.hashes)
    reset_lora(model, torch.Generator().manual_seed(config.train.seed))
    return model


def train_step(
    model: CausalLM,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    job: Job,
    step: int,
    device: torch.device,
    balance: Balance,
) -> StepMetrics:
    """One optimizer step over this rank's `batches`. The loss is the mean over all trained tokens of all ranks, so a
    token weighs the same in whichever batch it is; that of indexers is a mean over all tokens. A step whose loss or
    gradient is not finite changes nothing."""
    config, started = job.config, time.perf_counter()
    batches = [_on_device(batch, device, job.layout.together) for batch in batches]
    totals = torch.tensor([sum((b.labels != -100).sum() for b in batches), sum(b.ids.numel() for b in batches)])
    valid, tokens = (int(total) // job.layout.together for total in _summed(totals.to(device)))

    model.train()
    optimizer.zero_grad()
    balance.begin(tokens)
    loss = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    indexer_loss = torch.zeros_like(loss)
    for batch in batches:
        part = summed_loss(model, batch, config.memory.loss_chunk) / max(1, valid)
        indexers = sum(index_losses(model), part.new_zeros(())) / tokens
        (part + indexers).backward()
        loss += part.detach()
        indexer_loss += indexers.detach()
        del part, indexers  # on a CPU, what is left of a graph cuts the memory that the next one needs into pieces
        balance.add()
    own_loss = float(loss)
    loss, indexer_loss = _summed(torch.stack((loss, indexer_loss))).tolist()
    norm = gradient_norm(model.parameters())
    settings = config.optimizer
    lr = learning_rate(step, steps=config.train.steps, peak=settings.lr, warmup=settings.warmup, floor=settings.floor)
    skipped = not (math.isfinite(loss) and math.isfinite(indexer_loss) and math.isfinite(norm))
    if skipped:
        keep_batches(job.run / "skipped", step + 1, dist.get_rank(), own_loss, loss, batches, model)
    else:
        clip_gradients(model.parameters(), settings.clip, norm)
        optimizer.set_lr(lr)
        optimizer.step()

    load = balance.finish(correct=not skipped)
    peak = torch.tensor(peak_bytes(device), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    shown = None if config.train.indexer_loss == "none" else indexer_loss
    seconds = time.perf_counter() - started
    share = None
    if balance.exchanges:
        share = float(_summed(torch.tensor(balance.waiting.take() / seconds, device=device))) / dist.get_world_size()
    return StepMetrics(
        step + 1, loss, float(norm), lr, tokens, tokens / seconds, int(peak), load.worst, skipped, shown,
        communication_share=share, expert_loads=load.busiest or None, router_losses=load.losses or None,
    )  # fmt: skip


def summed_loss(model: CausalLM, batch: Batch, loss_chunk: int | None) -> Tensor:
    """Of the batch's documents; an encoder beside the model reads their prompts."""
    source = None if model.encoder is None else prompts(batch.ids, batch.cu_seqlens, batch.labels)
    return model(
        batch.ids, batch.cu_seqlens, batch.labels, loss_chunk, **({} if source is None else {"source": source})
    )


@torch.no_grad()
def evaluate(model: CausalLM, packer: Packer, loss_chunk: int | None, device: torch.device, layout: Layout) -> float:
    """Mean loss over every trained token of the packer's examples, each seen once."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    for step in range(packer.steps_per_epoch):
        batch = _on_device(packer.batch(step, batch_of_rank(layout)), device, layout.together)
        total[0] += summed_loss(model, batch, loss_chunk)
        total[1] += (batch.labels != -100).sum()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward pass the root stays gathered, and a checkpoint would hold it whole
    loss, valid = _summed(total).tolist()
    return loss / (valid / layout.together)


def _description(package: Package, model: CausalLM, job: Job, device: torch.device) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layout, train = job.layout, job.config.train
    return (
        f"{package.spec.name}: {total:,} parameters, {trained:,} trained ({train.mode}, {train.precision}) on "
        f"{layout.world} x {device.type}: dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard}, "
        f"ep {layout.ep} x efsdp {layout.efsdp}" + (f", tp {layout.tp} x cp {layout.cp}" if layout.together > 1 else "")
    )


def _on_device(batch: Batch, device: torch.device, least: int) -> Batch:
    """A batch of fewer tokens than the ranks that share it gets untrained ones, in a document of their own:
    every rank takes part in every collective, and no gradient is missing on any of them."""
    if missing := max(0, least - batch.ids.numel()):
        ids, labels = torch.zeros(missing, dtype=torch.int64), torch.full((missing,), -100)
        batch = Batch(
            torch.cat((batch.ids, ids)),
            torch.cat((batch.labels, labels)),
            torch.cat((batch.cu_seqlens, batch.cu_seqlens.new_tensor([least]))),
        )
    return Batch(batch.ids.to(device), batch.labels.to(device), batch.cu_seqlens.to(device))


def _summed(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value


def _evaluate(
    model: CausalLM, packer: Packer, job: Job, step: int, log: MetricsLog | None, device: torch.device
) -> float:
    """The held-out loss after `step`, reported."""
    loss = evaluate(model, packer, job.config.memory.loss_chunk, device, job.layout)
    if log is not None:
        log.evaluation(step, loss)
    return loss
