import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.onboard.inspect.tensor_names import fold, pattern_of, ranges
from dayzero.runtime.headers import TensorHeader


@pytest.mark.parametrize(
    ("name", "pattern", "numbers"),
    [
        ("model.layers.7.mlp.experts.12.w1.weight", "model.layers.{layer}.mlp.experts.{expert}.w1.weight", (7, 12)),
        ("lm_head.weight", "lm_head.weight", ()),
        ("model.mtp_0.norm1.w2", "model.mtp_{layer}.norm1.w2", (0,)),
        ("0.weight", "0.weight", ()),
        ("block10.x", "block10.x", ()),
    ],
)
def test_patterns(name, pattern, numbers):
    assert pattern_of(name) == (pattern, numbers)


def test_the_numbers_of_a_name_are_kept_in_order():
    assert pattern_of("h.0.a.1.b.2.c.3")[1] == (0, 1, 2, 3)


def header(dtype="F32", shape=(2, 3), start=0):
    return TensorHeader(dtype, shape, "f", start, start + 24)


def test_groups_differ_by_pattern_dtype_and_shape():
    headers = {f"layers.{layer}.experts.{expert}.w": header() for layer in (0, 2) for expert in (0, 1, 5)}
    headers |= {"layers.1.experts.0.w": header("BF16"), "layers.3.experts.0.w": header(shape=(3, 2)), "top": header()}
    groups = fold(headers)
    assert sum(len(group.names) for group in groups) == len(headers)
    assert [(g.pattern, g.dtype, g.shape, g.layers, g.experts, g.bytes) for g in groups] == [
        ("layers.{layer}.experts.{expert}.w", "BF16", (2, 3), [1], [0], 24),
        ("layers.{layer}.experts.{expert}.w", "F32", (2, 3), [0, 2], [0, 1, 5], 6 * 24),
        ("layers.{layer}.experts.{expert}.w", "F32", (3, 2), [3], [0], 24),
        ("top", "F32", (2, 3), [], [], 24),
    ]


def test_the_order_of_the_headers_does_not_matter():
    headers = {name: header(start=n) for n, name in enumerate(["b.1.x", "a.0.x", "b.0.x", "a.1.y"])}
    backwards = dict(reversed(headers.items()))
    assert [group.pattern for group in fold(headers)] == [group.pattern for group in fold(backwards)]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([0, 1, 2], "0-2"), ([0, 2, 4], "0, 2, 4"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_number_once(numbers):
    parts = [part.split("-") for part in ranges(sorted(numbers)).split(", ") if part]
    named = [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]
    assert named == sorted(numbers)
