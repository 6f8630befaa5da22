"""How an optimizer keeps the gradient's moments between steps: float32, bfloat16 or 8 bits, on the device or the host.

A moment has its parameter's shape and mesh, whatever it is kept in, so that a checkpoint of it can be read on any other
mesh. Rounding is stochastic, so that an average that moves by less than a rounding step still moves; the noise is a
function of the element's place in the whole parameter and of the step, so that copies on several ranks stay copies, and
a run on other ranks or after a restart rounds the same way.

bf16: 8 significant bits, error below 2^-7 of the value. 8bit: blocks of 256 along the last dimension, the last of a row
being shorter, each with its largest value as float32; dynamic tree codes (Dettmers 2022, arXiv:2110.02861), error below
1/70 of the block's largest value. Second moments are kept as their root, whose relative error is what the step feels,
with an error below 1/140 of the block's largest, and never round down to zero. Where a mesh cuts rows within blocks,
its ranks agree on each block's largest value, and all keep those of whole rows.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dayzero.runtime.errors import InputError

Kept = Literal["fp32", "bf16", "8bit"]
BLOCK = 256
SCALE = ".scale"


@dataclass(frozen=True)
class Moments:
    """kept: how moments of matrices are stored; vectors stay in float32. offload: in host memory between steps."""

    kept: Kept = "fp32"
    offload: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the stored tensor is the moment itself, to be updated where it is."""
        return self.kept == "fp32" and not self.offload

    def kind(self, parameter: Tensor) -> Kept:
        return self.kept if parameter.ndim > 1 and parameter.dtype == torch.float32 else "fp32"

    def bytes(self, shape: tuple[int, ...], width: int, dtype: torch.dtype = torch.float32) -> int:
        """What one moment takes of the first part, of that shape, of a parameter whose rows are so wide."""
        match self.kind(torch.empty(shape, dtype=dtype, device="meta")):
            case "fp32":
                return math.prod(shape) * dtype.itemsize
            case "bf16":
                return 2 * math.prod(shape)
        return math.prod(shape) + 4 * math.prod(shape[:-1]) * _blocks(width if shape[-1] % BLOCK else shape[-1])

    def zeros(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        """The stored tensors of a new moment. Raises InputError for 8 bits of a parameter whose rows are cut twice."""
        device = torch.device("cpu") if self.offload else parameter.device
        match self.kind(parameter):
            case "fp32":
                return {name: _zeros(parameter, parameter.dtype, device)}
            case "bf16":
                return {name: _zeros(parameter, torch.bfloat16, device)}
        return {
            name: _zeros(parameter, torch.uint8, device),
            name + SCALE: _no_scales(parameter).to(device),
        }

    def read(self, state: dict[str, Tensor], name: str, device: torch.device, rows: slice, root: bool) -> Tensor:
        """Rows (of dimension 0) of this rank's part of a moment, on `device`, in float32 or its own wider dtype.

        root: it is a second moment. The result is the stored tensor itself where the moments are `in_place`.
        """
        stored = local(state[name])[rows].to(device, non_blocking=True)
        if stored.dtype == torch.uint8:
            scale = local(state[name + SCALE])[rows].to(device, non_blocking=True)
            cut = _cut_of(state[name])
            value = _decode(stored, scale, root, cut.first if cut else 0)
            return value.square_() if root else value
        return stored.float() if stored.dtype == torch.bfloat16 else stored

    def write(
        self, state: dict[str, Tensor], name: str, value: Tensor, rows: slice, root: bool, noise: "Noise"
    ) -> None:
        """Stores what `read` gave and the step changed. Does nothing for moments that are `in_place`."""
        stored = local(state[name])[rows]
        if stored.dtype == torch.uint8:
            cut = _cut_of(state[name])
            codes, scale = _encode(value.sqrt() if root else value, noise.bits(value, rows.start), root, cut)
            stored.copy_(codes, non_blocking=True)
            local(state[name + SCALE])[rows].copy_(scale, non_blocking=True)
        elif stored.dtype == torch.bfloat16:
            stored.copy_(_to_bfloat16(value, noise.bits(value, rows.start)), non_blocking=True)
        elif self.offload:
            stored.copy_(value, non_blocking=True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Noise:
    """Bits for stochastic rounding of a parameter in one step: a hash of an element's place in the whole parameter."""

    def __init__(self, parameter: Tensor, seed: int):
        self.seed = seed
        self.shape, self.offset = parameter.shape, (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            _, self.offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)

    def bits(self, like: Tensor, first_row: int) -> Tensor:
        """int32 in 0 .. 2^16 - 1, in the shape of `like`: rows from `first_row` of this rank's part."""
        place = torch.zeros((), dtype=torch.int32, device=like.device)
        stride = 1
        for dim in reversed(range(like.ndim)):
            start = self.offset[dim] + (first_row if dim == 0 else 0)
            index = torch.arange(start, start + like.shape[dim], device=like.device, dtype=torch.int64)
            index = (index * stride) & 0x7FFFFFFF
            place = place + index.to(torch.int32).view(-1, *[1] * (like.ndim - 1 - dim))
            stride *= self.shape[dim]
        return _hash(_hash(place) ^ (self.seed * 0x9E3779B1 & 0x7FFFFFFF)) & 0xFFFF


def _hash(x: Tensor) -> Tensor:
    """Mixes the bits of int32: xor-shifts and products that wrap around, so that every bit moves half of all bits."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def _zeros(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the parameter's mesh, cut as the parameter is."""
    return torch.zeros_like(parameter.detach(), dtype=dtype, device=device)


def _no_scales(parameter: Tensor) -> Tensor:
    """A zero for every block of a parameter, on its mesh: with the rank that holds the block, or, where rows are cut
    within blocks, all of a row's on every rank."""
    shape = torch.Size((*parameter.shape[:-1], _blocks(parameter.shape[-1])))
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    part, cut, placements = local(parameter), _cut_of(parameter), list(parameter.placements)
    if cut is not None:
        placements[cut.dim] = Replicate()
    blocks = shape[-1] if cut is not None else _blocks(part.shape[-1])
    zeros = torch.zeros((*part.shape[:-1], blocks), device=part.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


@dataclass(frozen=True)
class _Cut:
    """Of rows that a mesh cuts within blocks: along dimension `dim` of the mesh, over `group`. first: where this rank's
    part of a row begins; width: of a whole row."""

    dim: int
    group: ProcessGroup
    first: int
    width: int


def _cut_of(tensor: Tensor) -> _Cut | None:
    """Raises InputError for rows that are cut along two dimensions of a mesh."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, last, width = tensor.device_mesh, tensor.ndim - 1, tensor.shape[-1]
    over = [
        dim
        for dim, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | _StridedShard) and placement.dim == last and mesh.size(dim) > 1
    ]
    if len(over) > 1:
        raise InputError(
            "optimizer.states",
            found=f"8bit, and a parameter {list(tensor.shape)} whose rows are cut {len(over)} times",
            expected="rows that are cut along one dimension of a mesh",
            hint="Use --set optimizer.states=bf16.",
        )
    if not over or -(-width // mesh.size(over[0])) % BLOCK == 0:
        return None
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return _Cut(over[0], mesh.get_group(over[0]), offset[last], width)


def _blocks(width: int) -> int:
    return -(-width // BLOCK)


def _to_bfloat16(value: Tensor, noise: Tensor) -> Tensor:
    """Up or down at random, with the probability that keeps the mean."""
    bits = value.contiguous().view(torch.int32) + noise
    return (bits & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


@cache
def _codes(root: bool, device: torch.device) -> Tensor:
    """The 256 values that a code stands for, ascending, up to 1: signed, or for a root from 0.

    Of 7 bits (8 for a root) the leading zeros give the power of ten, a one ends them, and the bits that are left count
    through the decade in equal steps.
    """
    values = [0.0, 1.0]
    for power in range(7):
        steps = 2 ** (power + root)
        edges = torch.linspace(0.1, 1, steps + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (power - 6)).tolist()
        values += middles if root else [sign * middle for middle in middles for sign in (1, -1)]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def _decode(codes: Tensor, scale: Tensor, root: bool, first: int = 0) -> Tensor:
    """first: where codes begin in their rows; scale is that of whole rows then."""
    values, end = _codes(root, codes.device)[codes.int()], first + codes.shape[-1]
    here, lead = scale[..., first // BLOCK : _blocks(end)], first % BLOCK
    return values * here.repeat_interleave(BLOCK, -1)[..., lead : lead + codes.shape[-1]]


def _encode(value: Tensor, noise: Tensor, root: bool, cut: _Cut | None) -> tuple[Tensor, Tensor]:
    """(codes in the shape of value, the value of largest magnitude of every block, with its sign: it becomes a 1)."""
    width, first = value.shape[-1], cut.first if cut else 0
    lead, blocks = first % BLOCK, slice(first // BLOCK, _blocks(first + width))
    count = blocks.stop - blocks.start
    padded = F.pad(value, (lead, count * BLOCK - lead - width)).unflatten(-1, (count, BLOCK))
    scale = padded.gather(-1, padded.abs().argmax(-1, keepdim=True)).squeeze(-1)
    kept = scale
    if cut is not None:
        kept = _agreed(scale, blocks, cut)
        scale = kept[..., blocks]
    part = torch.where(scale.unsqueeze(-1) == 0, 0, padded / scale.unsqueeze(-1))
    part = part.flatten(-2)[..., lead : lead + width].contiguous()
    table = _codes(root, value.device)
    below = (torch.searchsorted(table, part, right=True, out_int32=True) - 1).clamp(0, len(table) - 2)
    low, high = table[below], table[below + 1]
    codes = below + ((part - low) / (high - low) * 65536 > noise + 0.5)
    if root:
        codes = torch.where(part > 0, codes.clamp(min=1), 0)
    return codes.to(torch.uint8), kept


def _agreed(scale: Tensor, blocks: slice, cut: _Cut) -> Tensor:
    """The scales of whole rows, from those of every rank's part: of a block's, the first of largest magnitude."""
    mine = scale.new_zeros(*scale.shape[:-1], _blocks(cut.width))
    mine[..., blocks] = scale
    every = mine.new_empty(cut.group.size() * mine.numel())
    dist.all_gather_into_tensor(every, mine.flatten(), group=cut.group)
    every = every.view(cut.group.size(), *mine.shape)
    return every.gather(0, every.abs().argmax(0, keepdim=True))[0]
