"""Muon: the momentum of a matrix, with all its singular values brought near one (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982).

    M <- mu M + (1 - mu) G;  U = mu M + (1 - mu) G;  W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) NS(U)

The factor 0.2 sqrt(max(rows, columns)) gives the step AdamW's size, so that both share a learning rate and a decay.
NS needs the whole matrix. Where its rows are cut over n ranks, n matrices are dealt out at a time, one to a rank: the
parts travel to the owner and the results travel back, so each matrix is computed once. Experts that a rank holds whole
are computed as one batch and do not travel.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
BATCH = 1 << 26  # elements that are brought to the singular values of one at a time


def newton_schulz(x: Tensor) -> Tensor:
    """x: [..., R, C] -> about U V' for x = U S V': singular values in 0.68 .. 1.14, in x's dtype.

    Five steps of a x + b (x x') x + c (x x')^2 x on x over its Frobenius norm.
    """
    a, b, c = COEFFICIENTS
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.reshape(-1, *shape[-2:])
    x = x.mT if tall else x
    norm = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum((-2, -1), keepdim=True).sqrt()
    x = x / norm.clamp(min=1e-7).to(x.dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # sums before it rounds: half the error in bfloat16
        x = torch.baddbmm(x, gram, x, beta=a)
    return (x.mT if tall else x).reshape(shape)


@dataclass(frozen=True)
class Update:
    """The momentum of one parameter: `value` is this rank's part of it, and is replaced by NS of it, scaled.

    joined: matrices that lie one below the other in the parameter's rows.
    """

    parameter: Tensor
    value: Tensor
    joined: int


def orthogonalise(updates: Sequence[Update], compute: torch.dtype) -> list[Tensor]:
    """This rank's parts of 0.2 sqrt(max(rows, columns)) NS(matrix) of every update, in `compute`.

    All ranks of the parameters' meshes call it with the same parameters in the same order.
    """
    results: list[Tensor | None] = [None] * len(updates)
    shared: dict[ProcessGroup, list[int]] = {}
    for i, update in enumerate(updates):
        groups = _cut_by_rows(update.parameter)
        if groups is None:
            results[i] = _gathered(update, compute)
        elif not groups:
            results[i] = _whole(update.value.to(compute), update.joined)
        else:
            shared.setdefault(groups[0], []).append(i)
    for group, members in shared.items():
        for i, part in zip(members, _exchanged([updates[i] for i in members], group, compute), strict=True):
            results[i] = part
    return [part for part in results if part is not None]


def _cut_by_rows(parameter: Tensor) -> list[ProcessGroup] | None:
    """The one group that cuts the rows of the parameter's matrices evenly spaced, none if each is whole on its rank;
    None for any other arrangement."""
    if not isinstance(parameter, DTensor):
        return []
    rows, groups = parameter.ndim - 2, []
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate) or parameter.device_mesh.size(dim) == 1:
            continue
        if not isinstance(placement, Shard | _StridedShard) or placement.dim > rows:
            return None
        if placement.dim == rows:
            if isinstance(placement, _StridedShard):
                return None
            groups.append(parameter.device_mesh.get_group(dim))
    return groups if len(groups) < 2 else None


def _whole(value: Tensor, joined: int) -> Tensor:
    """value: [..., joined * R, C], whole matrices."""
    matrices = value.unflatten(-2, (joined, -1))
    scale = 0.2 * math.sqrt(max(matrices.shape[-2:]))
    batch = matrices.reshape(-1, *matrices.shape[-2:])
    at_once = max(1, BATCH // max(1, batch[:1].numel()))
    parts = [newton_schulz(part) * scale for part in batch.split(at_once)]
    return torch.cat(parts).reshape(value.shape) if parts else value


def _gathered(update: Update, compute: torch.dtype) -> Tensor:
    """For arrangements that are rare: every rank gathers the whole and computes it."""
    parameter = update.parameter
    assert isinstance(parameter, DTensor)
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    stride = parameter.stride()
    value = update.value.to(compute)
    whole = DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    region = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
    return _whole(whole, update.joined)[region]


@dataclass(frozen=True)
class _Matrix:
    """One matrix whose rows are cut: rows first .. first + rows of the parameter's, of batch entry `batch`."""

    update: int
    batch: int
    first: int
    rows: int
    columns: int
    cut: int  # rows of the parameter, over all ranks

    def rows_of(self, rank: int, ranks: int) -> tuple[int, int]:
        """(first, end) of what `rank` holds of it, counted in the rank's own rows."""
        share = -(-self.cut // ranks)
        start, end = min(rank * share, self.cut), min((rank + 1) * share, self.cut)
        first, last = max(self.first, start), min(self.first + self.rows, end)
        return (first - start, last - start) if first < last else (0, 0)


def _exchanged(updates: Sequence[Update], group: ProcessGroup, compute: torch.dtype) -> list[Tensor]:
    ranks = dist.get_world_size(group)
    values = [update.value.to(compute) for update in updates]
    batches = [value.reshape(-1, *value.shape[-2:]) for value in values]
    results = [torch.empty_like(batch) for batch in batches]
    for matrices in _dealt(updates, batches, ranks):
        _one_each(matrices, batches, results, group)
    return [result.reshape(value.shape) for result, value in zip(results, values, strict=True)]


def _dealt(updates: Sequence[Update], batches: Sequence[Tensor], ranks: int) -> Iterator[list[_Matrix]]:
    """All matrices in order, one for every rank at a time."""
    every = []
    for i, (update, batch) in enumerate(zip(updates, batches, strict=True)):
        cut, columns = update.parameter.shape[-2:]
        rows = cut // update.joined
        places = [(entry, part * rows) for entry in range(len(batch)) for part in range(update.joined)]
        every += [_Matrix(i, entry, first, rows, columns, cut) for entry, first in places]
    for start in range(0, len(every), ranks):
        yield every[start : start + ranks]


def _one_each(
    matrices: list[_Matrix], batches: Sequence[Tensor], results: Sequence[Tensor], group: ProcessGroup
) -> None:
    """matrices[r] is computed on rank r of the group."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    held = [matrix.rows_of(rank, ranks) for matrix in matrices]
    pieces = [batches[m.update][m.batch, start:end].flatten() for m, (start, end) in zip(matrices, held, strict=True)]
    sizes = [piece.numel() for piece in pieces] + [0] * (ranks - len(pieces))
    mine = matrices[rank] if rank < len(matrices) else None
    spans = [mine.rows_of(other, ranks) if mine else (0, 0) for other in range(ranks)]
    received = [(end - start) * (mine.columns if mine else 0) for start, end in spans]

    outgoing = torch.cat(pieces)
    gathered = outgoing.new_empty(sum(received))
    dist.all_to_all_single(gathered, outgoing, received, sizes, group=group)
    if mine:
        gathered = _whole(gathered.view(mine.rows, mine.columns), 1).flatten()
    dist.all_to_all_single(outgoing, gathered.contiguous(), sizes, received, group=group)
    for matrix, (start, end), piece in zip(matrices, held, outgoing.split(sizes[: len(matrices)]), strict=True):
        results[matrix.update][matrix.batch, start:end] = piece.view(end - start, matrix.columns)
