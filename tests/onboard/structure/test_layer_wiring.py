import pytest
import strange
import torch
from torch import nn

from dayzero.onboard.oracle.calls import Undiscovered, record_calls
from dayzero.onboard.oracle.reference import redraw
from dayzero.onboard.structure.layer_wiring import layer_parts
from dayzero.onboard.structure.sums import solve

IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    model = strange.build()
    redraw(model, torch.Generator().manual_seed(0))
    return model


def wiring(model, forward=None, expanded=()):
    """Layer 1 as discovered, after its forward was replaced."""
    for tier in model.tower if forward else ():
        tier.forward = lambda z, pair, veil, tier=tier: forward(tier, z, pair, veil)
    calls, _ = record_calls(model, IDS)
    parts = layer_parts(calls, "tower.1", expanded)
    return [(unit.name, unit.path, unit.role, unit.reads) for unit in parts.units], parts.gives


def test_a_pre_norm_layer(model):
    units, gives = wiring(model)
    assert units == [
        ("mixer_norm", "zig", "norm", {"x": 1.0}),
        ("mixer", "see", "mixer", {"mixer_norm": 1.0}),
        ("ffn_norm", "zag", "norm", {"x": 1.0, "mixer": 1.0}),
        ("ffn", "do", "ffn", {"ffn_norm": 1.0}),
    ]
    assert gives == {"x": 1.0, "mixer": 1.0, "ffn": 1.0}


@pytest.mark.parametrize(
    ("forward", "reads", "gives"),
    [
        pytest.param(
            lambda t, z, p, v: (n := t.zig(z)) * 0 + z + t.see(n, p, v) + t.do(n),
            [("norm", {"x": 1.0}), ("mixer", {"norm": 1.0}), ("ffn", {"norm": 1.0})],
            {"x": 1.0, "mixer": 1.0, "ffn": 1.0},
            id="parallel, one norm",
        ),
        pytest.param(
            lambda t, z, p, v: (y := z + 0.22 * t.see(t.zig(z), p, v)) + 3.0 * t.do(t.zag(y)),
            [
                ("mixer_norm", {"x": 1.0}),
                ("mixer", {"mixer_norm": 1.0}),
                ("ffn_norm", {"x": 1.0, "mixer": 0.22}),
                ("ffn", {"ffn_norm": 1.0}),
            ],
            {"x": 1.0, "mixer": 0.22, "ffn": 3.0},
            id="multipliers",
        ),
        pytest.param(
            lambda t, z, p, v: (y := z + t.zig(t.see(z, p, v))) + t.zag(t.do(y)),
            [
                ("mixer", {"x": 1.0}),
                ("mixer_post_norm", {"mixer": 1.0}),
                ("ffn", {"x": 1.0, "mixer_post_norm": 1.0}),
                ("ffn_post_norm", {"ffn": 1.0}),
            ],
            {"x": 1.0, "mixer_post_norm": 1.0, "ffn_post_norm": 1.0},
            id="post-norm",
        ),
        pytest.param(
            lambda t, z, p, v: 0.5 * (n := t.zig(z)) + 2.0 * t.see(n, p, v),
            [("mixer_norm", {"x": 1.0}), ("mixer", {"mixer_norm": 1.0})],
            {"mixer_norm": 0.5, "mixer": 2.0},
            id="residual from the normed value, no feed-forward",
        ),
    ],
)
def test_other_wirings_are_solved(model, forward, reads, gives):
    units, total = wiring(model, forward)
    assert [(name, terms) for name, _, _, terms in units] == reads
    assert total == gives


def test_a_last_part_that_mixes_tokens_too_is_the_feed_forward(model):
    for tier in model.tower:
        plain = tier.do.forward
        tier.do.forward = lambda z, plain=plain: plain(z) + 0.5 * z.roll(1, 1)
    units, gives = wiring(model)
    assert [(name, role) for name, _, role, _ in units] == [
        ("mixer_norm", "norm"), ("mixer", "mixer"), ("ffn_norm", "norm"), ("ffn", "mixer"),
    ]  # fmt: skip
    assert gives == {"x": 1.0, "mixer": 1.0, "ffn": 1.0}
    side_by_side, _ = wiring(model, lambda t, z, p, v: z + t.see(n := t.zig(z), p, v) + t.do(n))
    assert [name for name, *_ in side_by_side] == ["norm", "mixer", "mixer_2"]


def test_what_the_output_does_not_depend_on_is_left_out(model):
    units, _ = wiring(model, lambda t, z, p, v: (t.do(t.zag(z)), z + t.see(t.zig(z), p, v))[1])
    assert [name for name, *_ in units] == ["mixer_norm", "mixer"]


def test_a_vector_that_the_layer_owns_is_a_part(model):
    for number, tier in enumerate(model.tower):
        tier.fade = nn.Parameter(1.0 + torch.arange(48.0, dtype=torch.float64) / (50 + number))
    units, gives = wiring(model, lambda t, z, p, v: z * t.fade + t.see(t.zig(z), p, v))
    assert units[-1] == ("residual_scale", "fade", "scale", {"x": 1.0})
    assert gives == {"mixer": 1.0, "residual_scale": 1.0}


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda t, z, p, v: z + t.see(t.zig(z), p, v).tanh(), "output of tower.1 is no sum"),
        (lambda t, z, p, v: z + t.see(t.zig(z).abs(), p, v), "input of tower.1.see is no sum"),
        (lambda t, z, p, v: z * 2.0, "nothing of what it computes is made by its children"),
    ],
)
def test_what_is_no_sum_is_said(model, forward, says):
    with pytest.raises(Undiscovered, match=says):
        wiring(model, forward)


def test_a_child_can_be_looked_into(model):
    units, _ = wiring(model)
    assert [path for _, path, _, _ in units] == ["zig", "see", "zag", "do"]
    units, gives = wiring(model, expanded={"do"})
    assert [(path, role) for _, path, role, _ in units[2:]] == [
        ("zag", "norm"),
        ("do.door", "routing"),
        ("do.hall", "ffn"),
    ]
    assert gives == {"x": 1.0, "mixer": 1.0, "ffn": 1.0}


def test_solving_for_coefficients():
    a, b, c = (torch.randn(2, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
    assert solve(a + 2.5 * b, {"a": a, "b": b, "c": c}) == {"a": 1.0, "b": 2.5}
    assert solve(a * b, {"a": a, "b": b, "c": c}) == {}
    assert solve(a, {"a": a, "other size": torch.ones(4, dtype=torch.float64)}) == {"a": 1.0}
    assert solve(a - b, {"a": a, "again": a.clone(), "b": b}) == {"a": 1.0, "b": -1.0}
    assert solve(torch.full((2, 3), float("nan")).double(), {"a": a}) == {}


class Blend(nn.Module):
    """Reads two values of the stream."""

    def __init__(self, width):
        super().__init__()
        self.share = nn.Parameter(torch.linspace(0.2, 0.7, width, dtype=torch.float64))

    def forward(self, a, b):
        return self.share * a + b


def test_a_part_may_read_two_values(model):
    for tier in model.tower:
        tier.mix = Blend(48)

    def forward(t, z, p, v):
        y = t.mix(t.see(t.zig(z), p, v), z)
        return y + t.do(t.zag(y))

    for tier in model.tower:
        tier.forward = lambda z, pair, veil, tier=tier: forward(tier, z, pair, veil)
    calls, _ = record_calls(model, IDS)
    parts = layer_parts(calls, "tower.1")
    read = {unit.name: unit.inputs for unit in parts.units}
    assert read == {
        "mixer_norm": [{"x": 1.0}],
        "mixer": [{"mixer_norm": 1.0}],
        "residual": [{"mixer": 1.0}, {"x": 1.0}],
        "ffn_norm": [{"residual": 1.0}],
        "ffn": [{"ffn_norm": 1.0}],
    }
    assert parts.gives == {"residual": 1.0, "ffn": 1.0}
