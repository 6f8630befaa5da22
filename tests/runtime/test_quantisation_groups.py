"""Which tensors are one quantised weight: the layouts of published checkpoints, and files that do not fit."""

import time
from typing import NamedTuple

import pytest

from dayzero.runtime.errors import InputError
from dayzero.runtime.quantisation import FORMATS, quantised_groups


class Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def headers(**tensors):
    return {name.replace("__", "."): Header(*held) for name, held in tensors.items()}


EXPERT = "model__layers__3__mlp__experts__0__"
LAYOUTS = {
    "deepseek-v3": (
        {f"{EXPERT}up__weight": ("F8_E4M3", (2048, 7168)), f"{EXPERT}up__weight_scale_inv": ("F32", (16, 56))},
        ("fp8_block", (2048, 7168), "F32"),
    ),
    "ragged last block": (
        {"q__weight": ("F8_E4M3", (576, 7168)), "q__weight_scale_inv": ("F32", (5, 56))},
        ("fp8_block", (576, 7168), "F32"),
    ),
    "modelopt, one scale": (
        {"q__weight": ("F8_E4M3", (576, 7168)), "q__weight_scale": ("F32", ()), "q__input_scale": ("F32", ())},
        ("fp8_block", (576, 7168), "F32"),
    ),
    "a scale a row": (
        {"q__weight": ("F8_E4M3", (576, 7168)), "q__weight_scale": ("BF16", (576, 1))},
        ("fp8_block", (576, 7168), "F32"),
    ),
    "deepseek-v4": (
        {"layers__0__attn__wkv__weight": ("F8_E4M3", (512, 4096)), "layers__0__attn__wkv__scale": ("F8_E8M0", (4, 32))},
        ("fp8_ue8m0", (512, 4096), "BF16"),
    ),
    "32 x 32": (
        {"wkv__weight": ("F8_E4M3", (512, 4096)), "wkv__scale": ("F8_E8M0", (16, 128))},
        ("fp8_ue8m0", (512, 4096), "BF16"),
    ),
    "deepseek-v4 experts": (
        {"experts__0__w1__weight": ("I8", (2048, 2048)), "experts__0__w1__scale": ("F8_E8M0", (2048, 128))},
        ("mxfp4_packed", (2048, 4096), "BF16"),
    ),
    "minimax-m3": (
        {"w1__weight": ("F8_E4M3", (1536, 3072)), "w1__weight_scale": ("U8", (1536, 96))},
        ("mxfp8", (1536, 3072), "BF16"),
    ),
    "minimax-m3, inverse": (
        {"w1__weight": ("F8_E4M3", (1536, 3072)), "w1__weight_scale_inv": ("U8", (1536, 96))},
        ("mxfp8", (1536, 3072), "BF16"),
    ),
    "kimi k3": (
        {"w1__weight_packed": ("U8", (3072, 1792)), "w1__weight_scale": ("U8", (3072, 112))},
        ("mxfp4_packed", (3072, 3584), "BF16"),
    ),
    "gpt-oss": (
        {"gate_up_proj_blocks": ("U8", (32, 5760, 90, 16)), "gate_up_proj_scales": ("U8", (32, 5760, 90)),
         "gate_up_proj_bias": ("BF16", (32, 5760))},
        ("mxfp4_blocks", (32, 5760, 2880), "BF16"),
    ),
    "kimi k2.5": (
        {"w__weight_packed": ("I32", (2048, 896)), "w__weight_scale": ("BF16", (2048, 224)),
         "w__weight_shape": ("I32", (2,))},
        ("int4_packed", (2048, 7168), "F32"),
    ),
    "compressed-tensors nvfp4": (
        {"w__weight_packed": ("U8", (64, 128)), "w__weight_scale": ("F8_E4M3", (64, 16)),
         "w__weight_global_scale": ("F32", (1,)), "w__input_global_scale": ("F32", (1,))},
        ("nvfp4", (64, 256), "F32"),
    ),
    "modelopt nvfp4": (
        {"w__weight": ("U8", (64, 128)), "w__weight_scale": ("F8_E4M3", (64, 16)), "w__weight_scale_2": ("F32", ()),
         "w__input_scale": ("F32", ())},
        ("nvfp4", (64, 256), "F32"),
    ),
    "stacked experts": (
        {"experts__down_proj": ("F8_E4M3", (8, 256, 384)), "experts__down_proj_scale_inv": ("F32", (8, 2, 3))},
        ("fp8_block", (8, 256, 384), "F32"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts(layout):
    tensors, (format_, shape, dtype) = LAYOUTS[layout]
    groups = quantised_groups(headers(**tensors))
    (name, found), *others = groups.items()
    assert not others
    assert (found.format, found.shape, found.dtype) == (format_, shape, dtype)
    assert name.rpartition(".")[2] in {"weight", "down_proj", "gate_up_proj"}
    made = FORMATS[found.format]
    assert {made.codes, made.scale} <= found.parts.keys()
    used = set(found.parts.values())
    left = headers(**tensors).keys() - used
    assert all("input" in other or other.endswith("_bias") for other in left)


@pytest.mark.parametrize(
    "tensors",
    [
        {"q__weight": ("F8_E4M3", (8, 8))},
        {"q__weight": ("BF16", (8, 8)), "q__weight_scale": ("F32", (1, 1))},
        {
            "q__weight_packed": ("I32", (8, 8)),
            "q__weight_scale": ("BF16", (8, 2)),
            "q__weight_zero_point": ("I32", (1, 2)),
        },
        {"tokens_blocks": ("U8", (8, 8)), "mask": ("U8", (3, 3)), "ids__weight": ("I8", (3, 3))},
        {"w__weight_packed": ("U8", (64, 128)), "w__weight_scale": ("F8_E4M3", (64, 16))},
    ],
)
def test_no_group(tensors):
    assert quantised_groups(headers(**tensors)) == {}


@pytest.mark.parametrize("grid", [(17, 56), (16,), (0, 0), (16, 56, 1), (2, 16, 56)])
def test_scales_that_do_not_fit(grid):
    tensors = {"q__weight": ("F8_E4M3", (2048, 7168)), "q__weight_scale_inv": ("F32", grid)}
    with pytest.raises(InputError, match=r"q\.weight\n.*no grid over \[2048, 7168\]"):
        quantised_groups(headers(**tensors))


@pytest.mark.slow
def test_half_a_million_headers():
    every = {}
    for layer in range(1, 93):
        for expert in range(896):
            for name, rows, columns in (("w1", 3072, 3584), ("w2", 3584, 3072), ("w3", 3072, 3584)):
                base = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"
                every[f"{base}_packed"] = Header("U8", (rows, columns // 2))
                every[f"{base}_scale"] = Header("U8", (rows, columns // 32))
    start = time.process_time()
    groups = quantised_groups(every)
    assert time.process_time() - start < 5
    assert len(groups) == 92 * 896 * 3
    assert {part for group in groups.values() for part in group.parts.values()} == every.keys()
