"""Trained weights back into the format that their checkpoint stores them in, with the error that this costs.

A block whose values are still what its bytes stand for keeps these bytes, so what was not trained comes back bit for
bit, whatever tool wrote it. Any other block gets a new scale:

- FP8: the largest magnitude becomes the largest code, 448.
- INT4: it becomes 7, 8 or 7.5, whichever has the smallest squared error.
- E8M0 scales: the power of two that the OCP specification prescribes (floor(log2(largest)) - exponent of the largest
  code), under which the largest values may saturate, or the next one, whichever has the smaller squared error.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dayzero.runtime.packed import block, decoded_shape
from dayzero.runtime.quantisation import e2m1, e8m0, fp8, int4, mxfp4
from dayzero.runtime.quantisation.format import Format, decode


class RoundTrip(NamedTuple):
    """What storing a weight cost. relative: ||decoded - trained|| / ||trained||. largest: of the absolute differences.
    kept: of `blocks` blocks, those that kept their bytes."""

    relative: float
    largest: float
    kept: int
    blocks: int


class _Codes(NamedTuple):
    """nearest: scaled values -> the nearest that a code stands for. pack: those [..., C] -> codes. largest: magnitudes
    that a block's largest value may be scaled to. exponent: floor(log2) of the largest code."""

    nearest: Callable[[Tensor], Tensor]
    pack: Callable[[Tensor], Tensor]
    largest: tuple[float, ...]
    exponent: int


def _to_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-fp8.LARGEST, fp8.LARGEST).to(torch.float8_e4m3fn)


_E4M3 = _Codes(lambda x: _to_e4m3(x).to(torch.float32), _to_e4m3, (fp8.LARGEST,), 8)
_E2M1 = _Codes(lambda x: e2m1.unpack(e2m1.pack(x)), e2m1.pack, (e2m1.LARGEST,), 2)
_INT4 = _Codes(lambda x: x.round().clamp(-8, 7), lambda x: int4.pack(x.round().clamp(-8, 7)), (7.0, 8.0, 7.5), 2)
_CODES = {
    fp8.BLOCK.name: _E4M3,
    fp8.UE8M0.name: _E4M3,
    fp8.MX.name: _E4M3,
    mxfp4.PACKED.name: _E2M1,
    mxfp4.BLOCKS.name: _E2M1,
    int4.PACKED.name: _INT4,
}
OFFERED = tuple(_CODES)


def encode(
    made: Format, value: Tensor, like: Mapping[str, Tensor], rounded: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], RoundTrip]:
    """(stored tensors by role, with `like`'s shapes and dtypes; what it cost). value: [..., R, C].

    like: the tensors that the checkpoint holds for this weight. rounded: the dtype that its values were rounded to when
    it was loaded. Raises ValueError for trained values in a format that is only decoded, a value of another shape, and
    one that is not finite where it was trained.
    """
    shapes = {role: tuple(tensor.shape) for role, tensor in like.items()}
    shape = decoded_shape(made, shapes)
    if tuple(value.shape) != shape:
        raise ValueError(f"a value {list(value.shape)} for a weight {list(shape)}")
    rows, columns = block(made, shapes, shape)
    grid = (-(-shape[-2] // rows), -(-shape[-1] // columns))
    trained = value.detach().to("cpu", torch.float32)
    before = decode(made, like).to(rounded).to(torch.float32)
    blocks = _in_blocks(trained, rows, columns)
    same = ((before == trained) & (before.signbit() == trained.signbit())) | (before.isnan() & trained.isnan())
    kept = _in_blocks(same, rows, columns, fill=True).all(-1).all(-2)
    if not bool((blocks.isfinite().all(-1).all(-2) | kept).all()):
        raise ValueError("values that are not finite")
    if bool(kept.all()):
        return dict(like), RoundTrip(0.0, 0.0, kept.numel(), kept.numel())
    if made.name not in _CODES:
        raise ValueError(f"{made.name} is read but not written; {', '.join(OFFERED)} are")
    codes = _CODES[made.name]
    stored, factor = _scale(blocks, codes, like[made.scale].dtype)
    fresh = codes.pack(_whole(blocks / factor[..., :, None, :, None], grid, rows, columns, shape))
    held = _in_elements(kept, rows, columns, shape)[..., :: made.per]  # no stored column is of two blocks
    packed = torch.where(held, _bytes(like[made.codes]).reshape(fresh.shape), _bytes(fresh))
    parts = dict(like)
    parts[made.codes] = packed.reshape(shapes[made.codes]).view(like[made.codes].dtype)
    scale = torch.where(
        kept.reshape(shapes[made.scale]), _bytes(like[made.scale]), _bytes(stored.reshape_as(like[made.scale]))
    )
    parts[made.scale] = scale.view(like[made.scale].dtype)
    return parts, _cost(decode(made, parts), trained, kept)


def _scale(blocks: Tensor, codes: _Codes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored scales in `dtype`, or uint8 for E8M0; the factors they stand for), [..., row blocks, column blocks]."""
    largest = blocks.abs().amax((-3, -1))
    tried = []
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        low = (e8m0.exponent(largest) - codes.exponent).where(largest > 0, torch.zeros((), dtype=torch.int32))
        tried = [(stored, e8m0.unpack(stored)) for stored in (e8m0.pack(low), e8m0.pack(low + 1))]
    else:
        for most in codes.largest:
            stored = torch.where(largest > 0, largest / most, 1.0).to(dtype)
            tried.append((stored, torch.where(stored > 0, stored.to(torch.float32), 1.0)))
    (stored, factor), *others = tried
    if others:
        error = _error(blocks, factor, codes)
        for other, its_factor in others:
            its_error = _error(blocks, its_factor, codes)
            better = its_error < error
            stored, factor = torch.where(better, other, stored), torch.where(better, its_factor, factor)
            error = torch.where(better, its_error, error)
    return stored, factor


def _error(blocks: Tensor, factor: Tensor, codes: _Codes) -> Tensor:
    wide = factor[..., :, None, :, None]
    return (codes.nearest(blocks / wide) * wide - blocks).square().sum((-3, -1))


def _in_blocks(tensor: Tensor, rows: int, columns: int, fill: bool = False) -> Tensor:
    """[..., R, C] -> [..., row blocks, rows, column blocks, columns]; what ragged blocks lack is `fill`."""
    missing = (0, -tensor.shape[-1] % columns, 0, -tensor.shape[-2] % rows)
    padded = pad(tensor, missing, value=fill)
    return padded.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))


def _whole(blocks: Tensor, grid: tuple[int, int], rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    joined = blocks.reshape(*shape[:-2], grid[0] * rows, grid[1] * columns)
    return joined[..., : shape[-2], : shape[-1]]


def _in_elements(grid: Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    by_row = grid.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return by_row.repeat_interleave(columns, -1)[..., : shape[-1]]


def _bytes(tensor: Tensor) -> Tensor:
    """The same bits as whole numbers, which `where` can choose among."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(width)


def _cost(after: Tensor, trained: Tensor, kept: Tensor) -> RoundTrip:
    away = (after - trained).nan_to_num()
    norm = float(trained.nan_to_num().norm())
    relative = float(away.norm()) / norm if norm else 0.0
    return RoundTrip(relative, float(away.abs().max()) if away.numel() else 0.0, int(kept.sum()), kept.numel())
