"""Tensor parallelism: every dense block is cut over the ranks of `tp`, by the roles that it declares, and between
blocks each rank has some of the tokens (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022,
arXiv:2205.05198).

A block says in `parallel_roles` what becomes of its children: "column" is cut along its output (dimension 0), "row"
along its input (the last), a number is the dimension itself, "replicate" is left whole. `parallel_counts` names the
attributes that count what is dealt out, such as heads. "column:kv_heads" is cut if so many can be dealt out evenly, and
if there are fewer of them than ranks, each rank uses the rows of the one that its heads read.

There are three ways to run a part of a layer:
- cut: rows are gathered, the block computes with its share of the weights, and the results are summed and dealt out.
- by rows: what looks at each token by itself (norms, routers, routed experts) sees the rank's own tokens only; so does
  what says `parallel_sequence`: it sees across ranks, as for context parallelism.
- whole: what can neither be cut nor look at one token by itself runs on all tokens, on every rank.

Whatever is not cut sees each token once over all ranks, or gives each rank its own tokens only, so its gradient is the
sum over tp: FSDP shards it over these ranks as well. No parameter needs a factor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dayzero.runtime.errors import InputError
from dayzero.runtime.nn import CausalLM, RMSNorm
from dayzero.runtime.nn.context import Context
from dayzero.runtime.rows import gather, summed, summed_rows
from dayzero.runtime.split import Split


@dataclass(frozen=True)
class Cut:
    """One tensor of a block, cut over tp along `dim`. copies: 0, or the groups along `dim` where these are fewer than
    ranks: the tensor stays whole and a rank uses the rows of its group."""

    owner: nn.Module
    name: str
    path: str
    dim: int
    copies: int = 0

    @property
    def tensor(self) -> Tensor:
        return getattr(self.owner, self.name)

    @property
    def is_buffer(self) -> bool:
        return self.name in self.owner._buffers


def check_alone(model: CausalLM, tp: int, cp: int) -> None:
    """Raises InputError for a model whose layers look at an encoder: ranks that share a batch would need its source."""
    if model.encoder is not None and tp * cp > 1:
        raise InputError(
            "parallel.tp and parallel.cp",
            found=f"{tp} and {cp}",
            expected="1 for a model with an encoder: its layers look at the whole source of every document, of which "
            "each of the ranks that share a batch would have a part",
            hint="Leave both at 1; dp_shard, dp_replicate and ep divide such a model.",
        )


def check_tensor_parallel(model: CausalLM, tp: int) -> None:
    """Raises InputError, with the numbers, if a block cannot be dealt out to `tp` ranks."""
    for path, part in parts_of(model):
        cuts_of(part, tp, path)


def split_tensors(model: CausalLM, mesh: DeviceMesh, split: Split) -> None:
    """Cuts the model in place over the one dimension of `mesh`. Raises InputError as `check_tensor_parallel` does."""
    for path, part in parts_of(model):
        split_part(part, mesh, split, path)
    _split_vocabulary(model, mesh, split)


def parts_of(model: CausalLM) -> Iterator[tuple[str, nn.Module]]:
    """What runs as one: the parts of every layer and those that layers share; of parts that only hold others, those."""
    for stack, held in (("layers", model.layers), ("shared", model.shared)):
        for number, parts in enumerate(held):
            for name, part in parts.named_children():
                yield from inner_parts(f"{stack}.{number}.{name}", part)


def inner_parts(path: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inner = getattr(part, "parallel_inner", ())
    if not inner:
        yield path, part
    for name in inner:
        child = getattr(part, name, None)
        if child is not None:
            yield from inner_parts(f"{path}.{name}", child)


def cuts_of(block: nn.Module, tp: int, path: str) -> list[Cut]:
    """What of the block is cut; [] for one that is not. Raises InputError for sizes that do not fit."""
    roles = getattr(block, "parallel_roles", None)
    if not roles:
        return []
    used = {role.partition(":")[2] for role in roles.values() if isinstance(role, str)}
    for count in getattr(block, "parallel_counts", ()):
        value = getattr(block, count)
        if value % tp and (count not in used or tp % value):
            raise _misfit(tp, f"{value} {count} of {path} ({type(block).__name__})", value)
    found = []
    for name, role in roles.items():
        child = getattr(block, name, None)
        if child is None or role == "replicate":
            continue
        kind, _, count = role.partition(":") if isinstance(role, str) else (role, "", "")
        groups = getattr(block, count) if count else 0
        found += _cuts(block, name, child, kind, groups if groups % tp else 0, tp, f"{path}.{name}")
    for name, child in block.named_children():
        if name not in roles:
            found += cuts_of(child, tp, f"{path}.{name}")
    for cut in found:
        size = cut.tensor.shape[cut.dim]
        if not cut.copies and size % tp:
            raise _misfit(tp, f"dimension {cut.dim} of {cut.path} {list(cut.tensor.shape)}", size)
    return found


def _cuts(owner: nn.Module, name: str, child: Any, kind: str | int, copies: int, tp: int, path: str) -> Iterator[Cut]:
    if isinstance(child, Tensor):
        dim = kind if isinstance(kind, int) else 0 if kind == "column" else child.ndim - 1
        yield Cut(owner, name, path, dim, copies)
    elif isinstance(child, nn.Linear):
        for part in ("weight", "bias", "lora_b") if kind == "column" else ("weight", "lora_a"):
            if getattr(child, part, None) is not None:
                yield Cut(child, part, f"{path}.{part}", 0 if kind == "column" else 1, copies)
    elif getattr(child, "parallel_roles", None):
        yield from cuts_of(child, tp, path)
    else:
        if copies and isinstance(child, RMSNorm):
            raise InputError(
                "parallel.tp",
                found=str(tp),
                expected=f"at most {copies}: {path} norms all {copies} groups at once",
            )
        for part, parameter in child.named_parameters():
            holder, _, last = part.rpartition(".")
            if parameter is not None:
                yield Cut(child.get_submodule(holder), last, f"{path}.{part}", 0, copies)


def _misfit(tp: int, what: str, size: int) -> InputError:
    fitting = [ranks for ranks in range(1, size + 1) if size % ranks == 0]
    return InputError(
        "parallel.tp", found=str(tp), expected=f"a divisor of the {what}", hint=f"Choose one of {fitting}."
    )


def split_part(block: nn.Module, mesh: DeviceMesh, split: Split, path: str = "block") -> None:
    """Cuts one part of a layer over `mesh` and makes it take and give the rank's own rows."""
    tp, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    cuts = cuts_of(block, tp, path)
    if not cuts:
        if getattr(block, "parallel_sequence", False):
            block.forward = partial(_on_own_rows, block.forward, split)
        elif not getattr(block, "parallel_rows", False) and getattr(block, "uses_context", False):
            block.forward = partial(_on_all_rows, block.forward, split)
        return
    used: list[tuple[nn.Module, str, slice | None]] = []
    for cut in cuts:
        shares = cut.copies or tp
        share, place = cut.tensor.shape[cut.dim] // shares, rank * shares // tp
        if cut.copies or cut.is_buffer:
            if cut.dim:
                raise ValueError(f"{cut.path} has copies along dimension {cut.dim}")
            used.append((cut.owner, cut.name, slice(place * share, (place + 1) * share)))
        else:
            split_parameter(cut.owner, cut.name, mesh, cut.dim)
            used.append((cut.owner, cut.name, None))
    whole = {id(module) for module, _ in _kept_whole(block)}
    for module in block.modules():
        if id(module) not in whole:
            for count in getattr(module, "parallel_counts", ()):
                setattr(module, count, max(1, getattr(module, count) // tp))
    for module, role in _with_roles(block):
        if isinstance(module, RMSNorm) and role.startswith("column"):
            _split_norm(module, group, tp, path)
        if isinstance(module, nn.Linear) and role == "row" and module.bias is not None:
            module.forward = partial(_biased_once, module, module.forward, rank == 0)  # type: ignore[method-assign]
        if getattr(module, "sums_over_ranks", False):
            module.sum_over_ranks = partial(summed, group=group)  # type: ignore[assignment]
    block.forward = partial(_cut, block, block.forward, split, used)


def split_parameter(owner: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    parameter = owner._parameters[name]
    assert parameter is not None
    part = distribute_tensor(parameter.data, mesh, [Shard(dim)], src_data_rank=None)
    owner.register_parameter(name, nn.Parameter(part, parameter.requires_grad))


def _with_roles(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every module inside with what it is to its owner."""
    yield block, ""
    roles = getattr(block, "parallel_roles", None) or {}
    for name, child in block.named_children():
        role = roles.get(name, "")
        if role == "replicate":
            continue
        for module, inner in _with_roles(child):
            yield module, role if module is child else inner


def _kept_whole(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    roles = getattr(block, "parallel_roles", None) or {}
    for name, child in block.named_children():
        if roles.get(name) == "replicate":
            yield from ((module, name) for module in child.modules())
        else:
            yield from _kept_whole(child)


@contextmanager
def _local(used: list[tuple[nn.Module, str, slice | None]]) -> Iterator[None]:
    """Inside, the tensors are this rank's part of them, with their gradient."""
    before = []
    try:
        for owner, name, rows in used:
            held: dict[str, Any] = owner._buffers if name in owner._buffers else owner._parameters
            whole = held[name]
            before.append((held, name, whole))
            part = whole.to_local() if isinstance(whole, DTensor) else whole
            held[name] = part if rows is None else part[rows]
        yield
    finally:
        for held, name, whole in before:
            held[name] = whole


def _cut(
    block: nn.Module,
    forward: Callable[..., Any],
    split: Split,
    used: list[tuple[nn.Module, str, slice | None]],
    *args: Any,
) -> Any:
    if getattr(block, "index_loss_over", None) is not None:
        raise InputError(
            "parallel.tp",
            found=f"{dist.get_world_size(split.tp)}, and an indexer that learns",
            expected="1: the loss of an indexer needs the attention of all heads",
        )
    span = split.rows
    with _local(used):
        out = forward(*(gather(value, span) if isinstance(value, Tensor) else value for value in args))
    return summed_rows(out, span)


def _on_all_rows(forward: Callable[..., Any], split: Split, *args: Any) -> Any:
    span = split.rows
    out = forward(*(gather(value, span) if isinstance(value, Tensor) else value for value in args))
    return tuple(value[span.own] for value in out) if isinstance(out, tuple) else out[span.own]


def _on_own_rows(forward: Callable[..., Any], split: Split, x: Tensor, context: Context) -> Any:
    return forward(x, split.own_context(context))


def _biased_once(linear: nn.Linear, forward: Callable[[Tensor], Tensor], here: bool, x: Tensor) -> Tensor:
    """The product without bias, which one of the ranks whose results are summed adds. All of them have its gradient."""
    bias = linear._parameters["bias"]
    assert bias is not None
    linear._parameters["bias"] = None
    try:
        y = forward(x)
    finally:
        linear._parameters["bias"] = bias
    return y + (bias if here else bias * 0.0)


def _split_norm(norm: RMSNorm, group: ProcessGroup, tp: int, path: str) -> None:
    """A norm whose channels are cut: whole groups of them, or the mean over all ranks."""
    norm.width //= tp
    if norm.groups % tp == 0:
        norm.groups //= tp
    elif norm.groups == 1:
        norm.forward = partial(_norm_over_ranks, norm, group, norm.width * tp)
    else:
        raise _misfit(tp, f"{norm.groups} groups of a norm of {path}", norm.groups)


def _norm_over_ranks(norm: RMSNorm, group: ProcessGroup, width: int, x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    squares = summed(x.to(wide).square().sum(-1, keepdim=True), group)
    y = x.to(wide) * torch.rsqrt(squares / width + norm.eps)
    return (y if norm.weight is None else y * (norm.offset + norm.weight.to(wide))).to(x.dtype)


def _split_vocabulary(model: CausalLM, mesh: DeviceMesh, split: Split) -> None:
    """Embedding and head by their rows, if these can be dealt out evenly; else each rank has all for its own tokens."""
    if model.embed.num_embeddings % mesh.size():
        return
    split_parameter(model.embed, "weight", mesh, 0)
    if model.head is not None:
        split_parameter(model.head, "weight", mesh, 0)
    if model.head_bias is not None:
        split_parameter(model, "head_bias", mesh, 0)
    split.vocabulary = mesh.get_local_rank() * (model.embed.num_embeddings // mesh.size())
