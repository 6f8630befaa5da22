"""What a parameter holds, as 64 bits that add up: the hashes of disjoint regions give the hash of the whole.

    hash = sum over words of  word * column(c) * row(r)   modulo 2^64

A value is one or more words of 16 bits; c is its word's place in the last dimension, r the place of its row among all
rows. column and row are odd numbers from a fixed generator (splitmix64: Steele, Lea, Flood 2014,
doi:10.1145/2660193.2660195). So any one word that changes changes the hash, values that change places do, and how the
parameter is cut into shards does not. This finds accidents, of which one in 2^48 stays unseen; it is no signature.
"""

import numpy as np
import torch
from torch import Tensor

from dayzero.runtime.weights import Region, Shape
from dayzero.runtime.weights.node import as_range

_ROWS, _COLUMNS = 0x243F6A8885A308D3, 0x13198A2E03707344  # where the two series begin: digits of pi
_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 24  # words at a time: what fits into a core's cache; what keeps a device busy


def hashed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose bits are hashed for tensors that are stored in `dtype`; it holds all their values."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def content_hash(value: Tensor, shape: Shape, region: Region, dtype: torch.dtype) -> int:
    """The share that `value`, this region of a tensor of this shape, has in its hash: 0 <= hash < 2^64.

    value: in any dtype; dtype: `hashed_dtype` of what is stored, which must hold the values exactly.
    """
    if not value.numel():
        return 0
    value, shape, region = (value, shape, region) if shape else (value[None], (1,), (slice(0, 1),))
    words = dtype.itemsize // 2
    columns = as_range(region[-1])
    places = np.arange(columns.start * words, columns.stop * words, dtype=np.uint64)
    column = _odd(places, _COLUMNS).to(value.device)
    row = _odd(_row_numbers(shape[:-1], region[:-1]), _ROWS).to(value.device)
    flat = value.detach().reshape(-1, value.shape[-1])
    chunk = _CHUNK * torch.get_num_threads() if value.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // len(column))
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, len(flat), step):
        bits = flat[start : start + step].to(dtype).contiguous().view(torch.int16).to(torch.int64)
        total += bits.mul_(column).sum(-1).mul_(row[start : start + step]).sum()
    return int(total) % 2**64


def _row_numbers(shape: Shape, region: Region) -> np.ndarray:
    """The numbers that the rows of `region` have among all rows of a tensor with these leading dimensions."""
    numbers = np.zeros(1, dtype=np.uint64)
    for size, part in zip(shape, region, strict=True):
        inside = np.arange(part.start, part.stop, dtype=np.uint64)
        numbers = (numbers[:, None] * np.uint64(size) + inside).ravel()
    return numbers


def _odd(numbers: np.ndarray, start: int) -> Tensor:
    """An odd 64-bit number for each of these, int64: the outputs of splitmix64 from `start` on."""
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed | np.uint64(1)).view(np.int64))


def hex_of(number: int) -> str:
    """16 digits."""
    return f"{number % 2**64:016x}"
