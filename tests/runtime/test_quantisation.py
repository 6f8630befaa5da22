"""Decoders bit for bit against independent ones: ml_dtypes' tables in numpy, transformers, compressed-tensors."""

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised import codes, grid_of, rng, specimen
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dayzero.runtime.quantisation import FORMATS, decode, decode_into, decoded_shape

SIZES = [(1, 32), (3, 64), (130, 160), (128, 256), (33, 288)]


def same(ours, theirs):
    """Equal bit for bit; any NaN equals any NaN."""
    ours, theirs = ours.contiguous(), torch.as_tensor(theirs).contiguous()
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.isnan(), theirs.isnan())
    bits = {4: torch.int32, 2: torch.int16}[ours.element_size()]
    assert torch.equal(ours.nan_to_num(nan=0.0).view(bits), theirs.nan_to_num(nan=0.0).view(bits))


def numpy_of(tensor, dtype):
    return tensor.contiguous().view(torch.uint8).numpy().view(dtype)


def spread(grid, block, shape):
    """Each scale over its block, by numpy: [R, C]."""
    return grid.repeat(block[0], 0)[: shape[0]].repeat(block[1], 1)[:, : shape[1]]


def float_scales(shape, seed=1):
    """Random floats over many magnitudes, a subnormal, a zero and the largest among them."""
    made = (rng(seed).standard_normal(shape) * 10.0 ** rng(seed).integers(-12, 12, shape)).astype(np.float32)
    made.flat[: min(3, made.size)] = np.float32([1e-42, 0.0, 3.4e38])[: made.size]
    return torch.from_numpy(made)


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32), (1, 128)])
@pytest.mark.parametrize("shape", [*SIZES, (5, 7), (257, 131)])
def test_fp8_with_float_scales(shape, block):
    weight, scale = codes(shape).view(torch.float8_e4m3fn), float_scales(grid_of(shape, block))
    with np.errstate(over="ignore"):
        want = numpy_of(weight, ml_dtypes.float8_e4m3fn).astype(np.float32) * spread(scale.numpy(), block, shape)
    same(decode(FORMATS["fp8_block"], {"weight": weight, "scale": scale}), want)


@pytest.mark.parametrize("scale", [torch.tensor(0.37), torch.tensor([0.37]), torch.tensor([[0.37]])])
def test_fp8_with_one_scale(scale):
    weight = codes((20, 30)).view(torch.float8_e4m3fn)
    want = numpy_of(weight, ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.37)
    same(decode(FORMATS["fp8_block"], {"weight": weight, "scale": scale}), want)


def test_fp8_with_a_scale_a_row_in_bfloat16():
    weight, scale = codes((20, 30)).view(torch.float8_e4m3fn), float_scales((20, 1)).to(torch.bfloat16)
    want = numpy_of(weight, ml_dtypes.float8_e4m3fn).astype(np.float32) * scale.float().numpy()
    same(decode(FORMATS["fp8_block"], {"weight": weight, "scale": scale}), want)


@pytest.mark.parametrize("name", ["fp8_ue8m0", "mxfp8"])
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32)])
@pytest.mark.parametrize("shape", [*SIZES, (300, 70)])
def test_fp8_with_powers_of_two(name, shape, block):
    weight, scale = codes(shape).view(torch.float8_e4m3fn), codes(grid_of(shape, block), seed=3)
    factors = numpy_of(scale, ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(all="ignore"):
        want = numpy_of(weight, ml_dtypes.float8_e4m3fn).astype(np.float32) * spread(factors, block, shape)
    for stored in (scale, scale.view(torch.float8_e8m0fnu)):
        same(decode(FORMATS[name], {"weight": weight, "scale": stored}), want)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32)])
def test_fp8_as_transformers_decodes_it(scale_dtype, block):
    shape = (256, 384)
    weight = codes(shape).view(torch.float8_e4m3fn)
    scale = float_scales(grid_of(shape, block))
    if scale_dtype != torch.float32:
        scale = (
            codes(grid_of(shape, block)).clamp(max=254).view(scale_dtype)
        )  # 255: infinity there, NaN in the standard
    name = "fp8_block" if scale_dtype == torch.float32 else "mxfp8" if block == (1, 32) else "fp8_ue8m0"
    for dtype in (torch.float32, torch.bfloat16):
        theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=dtype)
        same(decode(FORMATS[name], {"weight": weight, "scale": scale}).to(dtype), theirs)


def e2m1(packed):
    """[R, C/2] bytes -> float32 [R, C], by ml_dtypes."""
    raw = numpy_of(packed, np.uint8)
    nibbles = np.stack((raw & 15, raw >> 4), -1).reshape(raw.shape[0], -1)
    return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@pytest.mark.parametrize("shape", SIZES)
def test_mxfp4_packed(shape):
    packed, scale = codes((shape[0], shape[1] // 2)), codes((shape[0], shape[1] // 32), seed=3)
    factors = numpy_of(scale, ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(all="ignore"):
        want = e2m1(packed) * spread(factors, (1, 32), shape)
    same(decode(FORMATS["mxfp4_packed"], {"packed": packed, "scale": scale}), want)
    as_deepseek = {"packed": packed.view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}
    same(decode(FORMATS["mxfp4_packed"], as_deepseek), want)


def test_mxfp4_values_are_exact_in_bfloat16():
    packed = codes((256, 16)).contiguous()
    scale = torch.arange(2, 252, dtype=torch.uint8).repeat(2)[:256, None]
    value = decode(FORMATS["mxfp4_packed"], {"packed": packed, "scale": scale})
    same(value.to(torch.bfloat16).float(), value)


def test_mxfp4_blocks_as_transformers_decodes_it():
    blocks, scales = codes((3, 10, 5, 16)), codes((3, 10, 5), seed=3).clamp(1, 250)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = decode(FORMATS["mxfp4_blocks"], {"blocks": blocks, "scales": scales})
    same(ours.mT.to(torch.bfloat16), theirs)
    flat = {"packed": blocks.flatten(-2), "scale": scales}
    same(decode(FORMATS["mxfp4_packed"], flat), ours)


def scheme(**arguments):
    weights = QuantizationArgs(symmetric=True, **arguments)
    return QuantizationScheme(targets=["Linear"], weights=weights)


@pytest.mark.parametrize(("shape", "group"), [((3, 64), 32), ((17, 96), 32), ((8, 256), 128), ((5, 24), 8)])
def test_int4(shape, group):
    packed = codes((shape[0], shape[1] // 2)).view(torch.int32)
    scale = torch.from_numpy(rng(4).standard_normal((shape[0], shape[1] // group)).astype(np.float32))
    scale = scale.to(torch.bfloat16)
    raw = numpy_of(packed, np.uint8)  # little-endian words: the lowest bits come first
    numbers = np.stack((raw & 15, raw >> 4), -1).reshape(shape).astype(np.float32) - 8
    parts = {"packed": packed, "scale": scale, "shape": torch.tensor(shape)}
    ours = decode(FORMATS["int4_packed"], parts)
    same(ours, numbers * spread(scale.float().numpy(), (1, group), shape))
    state = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(shape)}
    args = scheme(num_bits=4, type="int", strategy="group", group_size=group)
    same(ours.to(torch.bfloat16), PackedQuantizationCompressor.decompress(state, args)["weight"])


def test_int4_of_another_shape_than_it_says():
    parts = {"packed": torch.zeros(2, 4, dtype=torch.int32), "scale": torch.ones(2, 1), "shape": torch.tensor([2, 31])}
    with pytest.raises(ValueError, match=r"stand for \[2, 32\].*says \[2, 31\]"):
        decode(FORMATS["int4_packed"], parts)


@pytest.mark.parametrize("shape", SIZES)
def test_nvfp4(shape):
    packed = codes((shape[0], shape[1] // 2))
    scale = codes((shape[0], shape[1] // 16), seed=5).view(torch.float8_e4m3fn)
    grid = numpy_of(scale, ml_dtypes.float8_e4m3fn).astype(np.float32)
    factor = np.float32(0.00731)
    want = e2m1(packed) * spread(grid * factor, (1, 16), shape)
    same(decode(FORMATS["nvfp4"], {"packed": packed, "scale": scale, "scale_2": torch.tensor(factor)}), want)
    want = e2m1(packed) * spread(grid / factor, (1, 16), shape)
    same(decode(FORMATS["nvfp4"], {"packed": packed, "scale": scale, "global_scale": torch.tensor([factor])}), want)


def test_nvfp4_as_compressed_tensors_decodes_it():
    packed, scale = codes((33, 144)), codes((33, 18), seed=5).view(torch.float8_e4m3fn)
    state = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([64.0])}
    args = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    theirs = NVFP4PackedCompressor.decompress(state, args)["weight"]
    ours = decode(FORMATS["nvfp4"], {"packed": packed, "scale": scale, "global_scale": torch.tensor([64.0])})
    same(ours.to(torch.bfloat16), theirs)


@st.composite
def slices(draw, shape):
    made = []
    for size in shape:
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        made.append(slice(start, stop, draw(st.integers(1, 3))))
    return tuple(made)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_region_is_the_slice_of_the_whole_and_reads_only_its_blocks(data):
    made = FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))]
    shape = data.draw(st.sampled_from([(40, 64), (130, 160), (2, 9, 96), (3, 2, 8, 32)]))
    parts = specimen(made.name, shape)
    shapes = {role: tuple(tensor.shape) for role, tensor in parts.items()}
    assert decoded_shape(made, shapes) == shape
    region = data.draw(slices(shape))
    whole = decode(made, parts)
    read = SimpleNamespace(codes=0)

    def reader(role, where):
        assert len(where) == len(shapes[role])
        for part, size in zip(where, shapes[role], strict=True):
            assert 0 <= part.start <= part.stop <= size
        found = parts[role][where]
        read.codes += found.numel() if role == made.codes else 0
        return found

    out = torch.full_like(whole[region], -1)
    decode_into(out, made, reader, shapes, region)
    same(out, whole[region])
    unit = made.per * (made.inner or 1)
    last = [range(part.start, part.stop, part.step) for part in region]
    span = (last[-1][-1] // unit - last[-1][0] // unit + 1) * (made.inner or 1) if len(last[-1]) else 0
    assert read.codes <= len(last[-2]) * span * np.prod([len(numbers) for numbers in last[:-2]], initial=1)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_parts_that_do_not_fit(name):
    parts = specimen(name, (40, 64))
    shapes = {role: tuple(tensor.shape) for role, tensor in parts.items()}
    made = FORMATS[name]
    for wrong in [(41, 3), (7,), (40, 2, 2), (2, 0)]:
        with pytest.raises(ValueError, match="no grid"):
            decoded_shape(made, shapes | {made.scale: wrong})
    with pytest.raises(ValueError, match=r"not a matrix|do not end in"):
        decoded_shape(made, shapes | {made.codes: (40,)})


def test_every_byte_of_each_element_type():
    """All 256 codes of E4M3 and E8M0 and all 16 of E2M1, against ml_dtypes."""
    every = torch.arange(256, dtype=torch.uint8)
    one = torch.ones(1, 1)
    value = decode(FORMATS["fp8_block"], {"weight": every[None].view(torch.float8_e4m3fn), "scale": one})
    same(value[0], numpy_of(every, ml_dtypes.float8_e4m3fn).astype(np.float32))
    unit = torch.full((256, 16), 0x22, dtype=torch.uint8)  # 1.0 everywhere
    value = decode(FORMATS["mxfp4_packed"], {"packed": unit, "scale": every[:, None]})
    same(value[:, 0], numpy_of(every, ml_dtypes.float8_e8m0fnu).astype(np.float32))
    pairs = list(itertools.product(range(16), range(16)))
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    packed = torch.tensor([low | high << 4 for low, high in pairs], dtype=torch.uint8).reshape(16, 16)
    value = decode(FORMATS["mxfp4_packed"], {"packed": packed, "scale": torch.full((16, 1), 127, dtype=torch.uint8)})
    same(value.flatten(), np.float32([table[code] for pair in pairs for code in pair]))
