"""The hash by which a parameter is known: any change shows, any way of cutting it adds up."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.runtime.content_hash import content_hash, hashed_dtype, hex_of
from dayzero.runtime.errors import InputError
from dayzero.runtime.recorded_hashes import hashes_as_data, read_hashes
from dayzero.runtime.weights import Rule, Stored, whole

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def new(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hash_of(value, dtype=None):
    shape = tuple(value.shape)
    return content_hash(value, shape, whole(shape), dtype or hashed_dtype(value.dtype))


def by_the_definition(value):
    """Word by word in Python's own integers."""

    def odd(number, start):
        mixed = ((number + 1) * 0x9E3779B97F4A7C15 + start) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return (mixed ^ mixed >> 31) | 1

    words = value.reshape(-1, value.shape[-1]).view(torch.int16).tolist()
    return sum(
        word * odd(c, 0x13198A2E03707344) * odd(r, 0x243F6A8885A308D3)
        for r, row in enumerate(words)
        for c, word in enumerate(row)
    ) % (2**64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 7)])
def test_is_what_the_docstring_says(shape, dtype):
    value = new(shape, dtype)
    assert hash_of(value) == by_the_definition(value)


def test_stays_what_it_is():
    """Packages hold these numbers: a change of the function makes all of them wrong."""
    value = torch.arange(-6, 6, dtype=torch.float32).view(3, 4)
    assert hex_of(hash_of(value)) == "39513fbceebbb800"
    assert hex_of(hash_of(value.bfloat16())) == "f86b93af4c85cb40"


@st.composite
def cut(draw):
    """(shape, the regions of a grid over it)."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    regions = [()]
    for size in shape:
        inner = sorted(draw(st.sets(st.integers(1, size), max_size=3)))
        edges = [0, *inner, size]
        pieces = [slice(a, b) for a, b in itertools.pairwise(edges)]
        regions = [(*region, piece) for region in regions for piece in pieces]
    return shape, regions


@settings(max_examples=60, deadline=None)
@given(cut(), st.sampled_from(DTYPES))
def test_parts_add_up(case, dtype):
    shape, regions = case
    value = new(shape, dtype)
    total = sum(content_hash(value[region], shape, region, dtype) for region in regions)
    assert total % 2**64 == hash_of(value)


def test_large_tensors_go_in_chunks():
    value = new((70_000, 3), torch.bfloat16)
    halves = [content_hash(value[part], (70_000, 3), (part, slice(0, 3)), torch.bfloat16)
              for part in (slice(0, 33_333), slice(33_333, 70_000))]  # fmt: skip
    assert sum(halves) % 2**64 == hash_of(value)
    wide = new((2, 90_000))
    assert hash_of(wide) == hash_of(wide.clone())
    assert hash_of(wide) != hash_of(wide.flip(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_of_the_parameter_does_not_matter(dtype):
    """A bfloat16 file in a float32 parameter is the same content."""
    value = new((4, 5), dtype)
    wider = value.to(torch.promote_types(dtype, torch.float32))
    assert hash_of(wider, dtype) == hash_of(value)
    assert hash_of(value.mT.contiguous().mT) == hash_of(value)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 19), st.integers(0, 15), st.sampled_from(DTYPES))
def test_one_bit_shows(place, bit, dtype):
    value = new((4, 5), dtype)
    words = value.clone().view(torch.int16)
    words.view(-1)[place * (dtype.itemsize // 2)] ^= int(np.int16(1 << bit if bit < 15 else -(1 << 15)))
    assert hash_of(words.view(dtype)) != hash_of(value)


def test_places_and_signs_show():
    value = new((6, 8), torch.bfloat16)
    rows, columns = torch.tensor([1, 0, 2, 3, 4, 5]), torch.tensor([0, 1, 3, 2, 4, 5, 6, 7])
    pair = value.clone()
    pair[0, :2] *= -1
    zero = torch.zeros(3)
    others = [value[rows], value[:, columns], pair, -value, value * 2, value.reshape(8, 6), value.mT.contiguous()]
    assert len({hash_of(other) for other in [value, *others]}) == 8
    assert hash_of(zero) == 0
    assert hash_of(-zero) != 0


def test_no_values_and_no_dimensions():
    assert hash_of(torch.empty(0, 4)) == 0
    assert hash_of(torch.tensor(3.0)) == hash_of(torch.tensor([3.0])) != 0


def test_narrow_and_whole_numbers():
    assert hashed_dtype(torch.float8_e4m3fn) == torch.bfloat16
    assert hashed_dtype(torch.int32) == torch.int64
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert hash_of(table) == hash_of(table.float(), torch.int64) != hash_of(table + 1)


RULES = [
    Rule("embed.weight", Stored("e")),
    Rule("layers.{layer}.a", Stored("h.{layer}.a"), {"layer": range(2)}),
    Rule("layers.{layer}.a", Stored("h.{layer}.b"), {"layer": range(3, 4)}),
]
HASHES = {"embed.weight": "0" * 16, "layers.0.a": "1" * 16, "layers.1.a": "2" * 16, "layers.3.a": "f" * 16}


def test_the_file_is_by_pattern_and_reads_back(tmp_path):
    data = hashes_as_data(HASHES, RULES)
    layers = {"0": "1" * 16, "1": "2" * 16, "3": "f" * 16}
    assert data == {"parameters": {"embed.weight": "0" * 16, "layers.{layer}.a": layers}}
    (tmp_path / "hashes.json").write_text(json.dumps(data))
    assert read_hashes(tmp_path, RULES) == HASHES


def test_not_read_is_written_down_as_such(tmp_path):
    (tmp_path / "hashes.json").write_text(json.dumps(hashes_as_data(None, RULES)))
    assert read_hashes(tmp_path, RULES) is None


def test_a_package_of_a_version_without_hashes(tmp_path):
    assert read_hashes(tmp_path, RULES) is None
    (tmp_path / "onboard.lock").write_text("{}")
    with pytest.raises(InputError, match=r"(?s)hashes\.json.*no such file.*Onboard again"):
        read_hashes(tmp_path, RULES)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"parameters": {"embed.weight": "xyz"}}', '{"parameters": 3}'])
def test_a_file_that_is_not_what_onboard_wrote(tmp_path, text):
    (tmp_path / "hashes.json").write_text(text)
    with pytest.raises(InputError, match="no hash for every parameter"):
        read_hashes(tmp_path, RULES)
