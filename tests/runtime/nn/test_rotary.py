"""Tables against the papers' formulas, rotations against complex numbers."""

import math

import pytest
import torch

from dayzero.runtime.nn.rotary import Rotary, document_length, rotate

POSITION = torch.tensor([0, 1, 2, 3, 0, 1, 2])


def table(position=POSITION, **arguments):
    return Rotary(**{"dim": 8, "theta": 100.0, **arguments})(position, torch.float64)


def frequencies(**arguments):
    return Rotary(**{"dim": 8, "theta": 100.0, **arguments}).frequencies(torch.device("cpu"), torch.float64).tolist()


def test_each_frequency_stands_once():
    cos, sin = table()
    assert cos.shape == sin.shape == (7, 4)
    assert cos[3].tolist() == pytest.approx([math.cos(3 * 100 ** (-i / 4)) for i in range(4)], rel=1e-14)
    assert sin[6].tolist() == pytest.approx([math.sin(2 * 100 ** (-i / 4)) for i in range(4)], rel=1e-14)


def test_an_odd_size_has_its_own_exponents():
    assert frequencies(dim=5) == pytest.approx([1.0, 100 ** (-2 / 5), 100 ** (-4 / 5)], rel=1e-14)


def test_attention_factor_lengthens_the_table():
    cos, sin = table(attention_factor=1.3)
    assert (cos.square() + sin.square()).flatten().tolist() == pytest.approx([1.69] * 28, rel=1e-14)


def test_float32_is_computed_in_float32_and_bfloat16_too():
    position = torch.tensor([100_003])
    cos, _ = Rotary(8, 1e4)(position, torch.bfloat16)
    wide, _ = Rotary(8, 1e4)(position, torch.float32)
    assert cos.dtype == torch.bfloat16
    assert torch.equal(cos, wide.to(torch.bfloat16))


def test_linear_and_proportional():
    plain = frequencies()
    assert frequencies(scaling="linear", factor=4.0) == pytest.approx([f / 4 for f in plain], rel=1e-14)
    assert frequencies(scaling="proportional", rotated=2, factor=2.0) == [plain[0] / 2, plain[1] / 2, 0.0, 0.0]


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    settings = {"factor": 8.0, "original_length": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain, found = frequencies(dim=16), frequencies(dim=16, scaling="llama3", **settings)
    for frequency, got in zip(plain, found, strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            want = frequency
        elif wavelength > 64:
            want = frequency / 8
        else:
            smooth = (64 / wavelength - 1) / 3
            want = (1 - smooth) * frequency / 8 + smooth * frequency
        assert got == pytest.approx(want, rel=1e-14)
    assert found[0] == plain[0]
    assert found[-1] == plain[-1] / 8


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_what_turns_often(truncate):
    settings = {"factor": 8.0, "original_length": 400, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": truncate}
    plain, found = frequencies(dim=32), frequencies(dim=32, scaling="yarn", **settings)
    ends = [32 * math.log(400 / (turns * 2 * math.pi)) / (2 * math.log(100.0)) for turns in (8.0, 1.0)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    for pair, (frequency, got) in enumerate(zip(plain, found, strict=True)):
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        assert got == pytest.approx(frequency * (1 - stretched) + frequency / 8 * stretched, rel=1e-13)
    assert found[0] == plain[0]
    assert found[-1] == plain[-1] / 8


def test_dynamic_and_longrope_depend_on_the_own_document_only():
    factors = {"short_factors": [1.0, 2.0, 3.0, 4.0], "long_factors": [5.0, 6.0, 7.0, 8.0]}
    long, short = torch.arange(9), torch.arange(4)
    for arguments in ({"scaling": "dynamic", "factor": 4.0}, {"scaling": "longrope", **factors}):
        both = table(torch.cat((long, short)), original_length=6, **arguments)
        for got, want in zip(both, table(long, original_length=6, **arguments), strict=True):
            assert torch.equal(got[:9], want)
        for got, want in zip(both, table(short, original_length=6, **arguments), strict=True):
            assert torch.equal(got[9:], want)


def test_dynamic_grows_theta_beyond_the_original_length():
    cos, _ = table(torch.arange(12), scaling="dynamic", factor=4.0, original_length=6)
    theta = 100 * (4 * 12 / 6 - 3) ** (8 / 6)
    assert cos[11].tolist() == pytest.approx([math.cos(11 * theta ** (-i / 4)) for i in range(4)], rel=1e-12)
    assert torch.equal(
        table(torch.arange(6), scaling="dynamic", factor=4.0, original_length=6)[0], table(torch.arange(6))[0]
    )


def test_longrope_takes_the_long_factors_in_long_documents():
    factors = {"short_factors": [1.0, 2.0, 3.0, 4.0], "long_factors": [5.0, 6.0, 7.0, 8.0], "original_length": 6}
    for length, chosen in ((6, factors["short_factors"]), (7, factors["long_factors"])):
        cos, _ = table(torch.arange(length), scaling="longrope", **factors)
        want = [math.cos((length - 1) * 100 ** (-i / 4) / factor) for i, factor in enumerate(chosen)]
        assert cos[-1].tolist() == pytest.approx(want, rel=1e-13)


def test_a_trained_stretch_multiplies_each_frequency():
    block = Rotary(8, 100.0, trained=True).to(torch.float64)
    block.reset_parameters(0.02)
    assert torch.equal(block(POSITION, torch.float64)[0], table()[0])
    with torch.no_grad():
        block.log_stretch.copy_(torch.tensor([0.0, math.log(2.0), -1.0, 0.5], dtype=torch.float64))
    cos, sin = block(POSITION, torch.float64)
    plain = [100 ** (-i / 4) for i in range(4)]
    rates = [f * g for f, g in zip(plain, (1.0, 2.0, math.exp(-1), math.exp(0.5)), strict=True)]
    assert cos[3].tolist() == pytest.approx([math.cos(3 * rate) for rate in rates], rel=1e-13)
    (grad,) = torch.autograd.grad(sin[3].sum(), [block.log_stretch])  # d sin(3 f e^s) / ds = 3 f e^s cos(3 f e^s)
    assert grad.tolist() == pytest.approx([3 * rate * math.cos(3 * rate) for rate in rates], rel=1e-12)


def test_document_length():
    assert document_length(torch.tensor([0, 1, 2, 0, 0, 1])).tolist() == [3, 3, 3, 1, 2, 2]
    assert document_length(torch.tensor([7, 8, 0])).tolist() == [9, 9, 1]
    assert document_length(torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scaling": "yarn"}, "original_length"),
        ({"scaling": "llama3", "original_length": 8}, "low_freq_factor"),
        ({"scaling": "longrope", "original_length": 8}, "short_factors"),
        ({"scaling": "longrope", "original_length": 8, "short_factors": [1.0], "long_factors": [1.0]}, "4 frequencies"),
        ({"scaling": "proportional"}, "rotated"),
        ({"scaling": "proportional", "rotated": 5}, "rotated"),
    ],
)
def test_a_scaling_without_its_numbers_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Rotary(8, 100.0, **arguments)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotation_is_a_complex_product(style, last):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 11, generator=generator, dtype=torch.float64)
    cos, sin = table()
    turned = rotate(x, cos, sin, style, last)
    still = slice(0, 3) if last else slice(8, 11)
    assert torch.equal(turned[..., still], x[..., still])
    span = slice(3, 11) if last else slice(0, 8)

    def pairs(part):
        part = part[..., span]
        part = part.unflatten(-1, (2, 4)).transpose(-1, -2) if style == "half" else part.unflatten(-1, (4, 2))
        return torch.view_as_complex(part.contiguous())

    want = pairs(x) * torch.complex(cos, sin)[:, None]
    assert torch.linalg.vector_norm(pairs(turned) - want) <= 1e-14 * torch.linalg.vector_norm(want)


def test_a_table_wider_than_a_head_is_refused():
    with pytest.raises(ValueError, match="turn 8 channels; a head has 6"):
        rotate(torch.zeros(7, 1, 6), *table(), "half")
