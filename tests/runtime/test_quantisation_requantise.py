"""Trained weights back into their format: what was not trained keeps its bytes, what was costs a stated error."""

import pytest
import torch
from quantised import specimen
from torch import Tensor

from dayzero.runtime.quantisation import FORMATS, decode, encode
from dayzero.runtime.quantisation.requantise import OFFERED

SHAPES = [(40, 64), (130, 160), (2, 9, 96)]
# ||decoded - trained|| / ||trained|| of normally distributed weights, measured, rounded up
ERRORS = {"fp8_block": 0.028, "fp8_ue8m0": 0.028, "mxfp8": 0.028, "mxfp4_packed": 0.12, "mxfp4_blocks": 0.12,
          "int4_packed": 0.095}  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for role, tensor in theirs.items():
        assert (ours[role].dtype, ours[role].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(ours[role]), bits(tensor)), role


def test_what_is_offered():
    assert set(OFFERED) == FORMATS.keys() - {"nvfp4"} == ERRORS.keys()
    with pytest.raises(ValueError, match="nvfp4 is read but not written"):
        encode(FORMATS["nvfp4"], torch.zeros(40, 64), specimen("nvfp4", (40, 64)))
    parts = specimen("nvfp4", (40, 64))
    same_bits(encode(FORMATS["nvfp4"], decode(FORMATS["nvfp4"], parts), parts)[0], parts)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("shape", SHAPES)
def test_untrained_values_keep_their_bytes(name, shape):
    """Random bytes, NaN and both zeros among them, and any scale: not what our own encoder would have written."""
    parts = specimen(name, shape)
    made, cost = encode(FORMATS[name], decode(FORMATS[name], parts), parts)
    same_bits(made, parts)
    assert (cost.relative, cost.largest, cost.kept) == (0.0, 0.0, cost.blocks)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("shape", SHAPES)
def test_encoding_is_idempotent(name, shape):
    blank = {role: part if role == "shape" else torch.zeros_like(part) for role, part in specimen(name, shape).items()}
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    once, cost = encode(FORMATS[name], value, blank)
    assert 0 < cost.relative <= ERRORS[name]
    assert cost.kept == 0
    again, cost = encode(FORMATS[name], decode(FORMATS[name], once), blank)
    if name != "fp8_block":  # there, 448 x scale / 448 may be off by the last bit
        same_bits(again, once)
    assert cost.relative <= 1e-7
    same_bits(encode(FORMATS[name], decode(FORMATS[name], once), once)[0], once)


@pytest.mark.parametrize("name", OFFERED)
def test_only_trained_blocks_change(name):
    parts = specimen(name, (130, 160))
    made = FORMATS[name]
    if made.codes == "weight":
        parts["weight"] = torch.where(parts["weight"].float().isnan(), 0, parts["weight"].view(torch.uint8)).view(
            torch.float8_e4m3fn
        )
    value = decode(made, parts)
    value[0, 0] = 0.011
    after, cost = encode(made, value, parts)
    assert cost.kept == cost.blocks - 1
    changed = decode(made, after)
    rows, columns = {"fp8_block": (128, 128), "fp8_ue8m0": (32, 32)}.get(name, (1, 32))
    value[:rows, :columns] = changed[:rows, :columns] = 0
    assert torch.equal(changed.nan_to_num(), value.nan_to_num())


@pytest.mark.parametrize("name", OFFERED)
def test_values_rounded_on_loading_keep_their_bytes(name):
    parts = specimen(name, (40, 64))
    value = decode(FORMATS[name], parts).to(torch.bfloat16)
    same_bits(encode(FORMATS[name], value, parts, rounded=torch.bfloat16)[0], parts)


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite(name, bad):
    parts = specimen(name, (40, 64), seed=3)
    value = torch.zeros(40, 64)
    value[7, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode(FORMATS[name], value, parts)


def test_zeros_and_extremes():
    parts = specimen("mxfp4_packed", (2, 64))
    value = torch.zeros(2, 64)
    value[0, :32] = 3e38
    value[1, :32] = 1e-44
    after, _ = encode(FORMATS["mxfp4_packed"], value, parts)
    decoded = decode(FORMATS["mxfp4_packed"], after)
    assert torch.all(decoded[:, 32:] == 0)
    assert torch.allclose(decoded[0, :32], value[0, :32], rtol=0.2)
    assert torch.all(decoded[1].abs() <= 1e-38)


def test_the_better_of_two_scales():
    """Where the prescribed power of two would cut the largest value by a quarter, the next one is nearer."""
    parts = specimen("mxfp4_packed", (2, 32))
    value = torch.zeros(2, 32)
    value[0, 0] = 7.9  # 6 x 1 under the prescribed scale, 4 x 2 under the next
    value[1, :31], value[1, 31] = 0.5, 6.5  # 0.5 is lost under the next scale
    decoded = decode(FORMATS["mxfp4_packed"], encode(FORMATS["mxfp4_packed"], value, parts)[0])
    assert decoded[0, 0] == 8.0
    assert decoded[1].tolist() == [0.5] * 31 + [6.0]


@pytest.mark.parametrize("name", OFFERED)
def test_another_shape(name):
    with pytest.raises(ValueError, match=r"a value \[2, 64\] for a weight \[40, 64\]"):
        encode(FORMATS[name], torch.zeros(2, 64), specimen(name, (40, 64)))
