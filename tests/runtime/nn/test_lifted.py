"""The reference's own code behind the interface of our blocks: documents, arguments, what constructors compute."""

import json

import pytest
import torch
from torch import nn

from dayzero.runtime.nn import Context, Inside, Lifted, RMSNorm
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.nn.context import lengths_of, positions_of
from dayzero.runtime.nn.lifted_operator import beside
from dayzero.runtime.nn.lifted_settings import settings_value
from dayzero.runtime.nn.lifted_source import classes_of
from dayzero.runtime.spec import BlockSpec

SOURCE = '''
import torch
from torch import nn

from dayzero.runtime.nn.upstream import ACT2FN


class Sum(nn.Module):
    """Each token's sum over the tokens that its mask shows, times a computed vector, plus its position."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.width = nn.Linear(config.hidden, config.hidden)
        self.register_buffer("powers", 2.0 ** torch.arange(config.hidden) / 7, persistent=False)
        self.register_buffer("bias", torch.zeros(config.hidden))
        self.inner = nn.Identity()
        self.act = ACT2FN["silu"]

    def forward(self, hidden_states, attention_mask=None, position_ids=None, rotary=None, ids=None):
        if attention_mask is not None:
            weights = (attention_mask == 0).to(hidden_states.dtype)[:, 0]
            hidden_states = weights @ hidden_states
        hidden_states = self.inner(self.width(hidden_states)) * self.powers + self.bias
        if position_ids is not None:
            hidden_states = hidden_states + position_ids[..., None] * self.config.slope
        if rotary is not None:
            hidden_states = hidden_states + rotary[0].sum(-1, keepdim=True) - rotary[1].sum(-1, keepdim=True)
        return self.act(hidden_states.float()).to(hidden_states.dtype), None
'''
SETTINGS = {"config": {"namespace": {"hidden": 6, "slope": 0.5}}, "layer_idx": 0}
HANDED = {
    "hidden_states": "hidden",
    "attention_mask": {"mask": "added", "window": 3, "chunk": None, "axes": "b1st"},
    "position_ids": {"position": "bs"},
    "rotary": {"table": 0, "style": "half", "axes": "bsd", "part": "pair"},
}


def context(*lengths, dtype=torch.float64):
    tokens = sum(lengths)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    position = positions_of(lengths_of(bounds, tokens), bounds.device)
    angles = [position[:, None].to(dtype) * 0.3 * number for number in (1, 2)]
    tables = tuple((angle.cos(), angle.sin()) for angle in angles)
    return Context(bounds, tuple(lengths), position, tables, torch.arange(tokens))


def block(handed=None, **options):
    torch.manual_seed(0)
    return Lifted(classes_of(SOURCE)["Sum"], SETTINGS, handed or HANDED, **{"tables": [1], **options}).double()


def test_documents_are_exact_alone_and_together():
    made = block()
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed = made(x, context(5, 0, 4, 3))
    for start, length in ((0, 5), (5, 4), (9, 3)):
        alone = made(x[start : start + length], context(length))
        assert torch.equal(packed[start : start + length], alone)
    even = made(x, context(4, 4, 4))
    assert torch.allclose(even[4:8], made(x[4:8], context(4)), rtol=1e-14)


def test_against_the_definition():
    made, x = block(), torch.randn(5, 6, dtype=torch.float64)
    where = context(5)
    place = torch.arange(5)
    seen = ((place[:, None] >= place) & (place[:, None] - place < 3)).double()
    cos, sin = where.tables[1]
    want = made.module.width(seen @ x) * (2.0 ** torch.arange(6, dtype=torch.float64) / 7)
    want = want + place[:, None] * 0.5 + 2 * (cos - sin)
    assert torch.allclose(made(x, where), nn.functional.silu(want), rtol=1e-13)


def test_all_documents_as_one_where_nothing_mixes_tokens():
    handed = {"hidden_states": "hidden", "position_ids": {"position": "bs"}, "attention_mask": {"value": None}}
    apart, as_one = block(handed), block(handed, together=True)
    x = torch.randn(9, 6, dtype=torch.float64)
    assert torch.allclose(apart(x, context(5, 4)), as_one(x, context(5, 4)), rtol=1e-14)


@pytest.mark.parametrize(
    ("what", "shape"),
    [
        ({"ones": "bs", "dtype": "int64"}, (2, 4)),
        ({"ids": "bs"}, (2, 4)),
        ({"position": "3bs"}, (3, 2, 4)),
        ({"position": "s"}, (4,)),
        ({"table": 0, "style": "once", "axes": "bsd", "part": "complex"}, (2, 4, 1)),
        ({"table": 0, "style": "interleaved", "axes": "bs1d", "part": "cos"}, (2, 4, 1, 2)),
        ({"mask": "visible", "window": None, "chunk": 3, "axes": "b1st"}, (2, 1, 4, 4)),
        ({"distance": -1, "axes": "st"}, (4, 4)),
    ],
)
def test_arguments_have_the_shapes_that_their_axes_name(what, shape):
    from dayzero.runtime.nn.lifted_document import Document

    made = Document(torch.zeros(8, 6), context(4, 4), [1], False).give(what)
    assert made.shape == shape


def test_windows_and_chunks():
    from dayzero.runtime.nn.lifted_document import Document

    document = Document(torch.zeros(5, 6), context(5), [], False)
    seen = document.give({"mask": "visible", "window": None, "chunk": 2, "axes": "st"})
    assert seen.tolist()[3] == [False, False, True, True, False]
    added = document.give({"mask": "added", "window": 2, "chunk": None, "axes": "st"})
    assert (added == 0).tolist()[3] == [False, False, True, True, False]
    assert added.min() == torch.finfo(torch.float32).min
    together = Document(torch.zeros(5, 6), context(2, 3), [], False, (2, 3))
    assert together.give({"mask": "visible", "window": None, "chunk": None, "axes": "st"}).tolist()[3] == [
        False, False, True, True, False,
    ]  # fmt: skip


def test_what_a_constructor_computes_is_there_after_the_meta_device():
    with torch.device("meta"):
        made = Lifted(classes_of(SOURCE)["Sum"], SETTINGS, HANDED, tables=[0])
    assert not dict(made.named_buffers())
    assert {name for name, p in made.named_parameters() if not p.requires_grad} == {"module.bias"}
    made.to_empty(device="cpu")
    initialise(made, 0.02, seed=0)
    x = torch.randn(4, 6)
    out = made(x, context(4, dtype=torch.float32))
    assert torch.equal(made.module.powers, 2.0 ** torch.arange(6) / 7)
    assert torch.isfinite(out).all()
    made.double()(x.double(), context(4))
    assert made.module.powers.dtype == torch.float64
    assert torch.equal(made.module.powers, 2.0 ** torch.arange(6, dtype=torch.float64) / 7)


def test_blocks_of_ours_inside_see_their_documents():
    class Doubles(nn.Module):
        uses_context = True

        def forward(self, x, context):
            seen.append(context.lengths)
            return 2 * x

    seen: list = []
    made = block(replace={"inner": Inside(Doubles())})
    plain = block()
    x = torch.randn(9, 6, dtype=torch.float64)
    made(x, context(5, 4))
    assert seen == [(5,), (4,)]
    assert made.lora_targets == ("module.width",)
    assert set(made.state_dict()) == set(plain.state_dict())


def test_evaluation_mode_is_what_was_proven():
    made = block(replace={"inner": Inside(RMSNorm(6, 1e-5))}).train()
    assert made.training
    assert not made.module.training
    assert made.module.inner.block.training


def test_as_data():
    norm = {"block": "RMSNorm", "arguments": {"width": 6, "eps": 1e-5}}
    inside = {"inner": {"block": "Inside", "arguments": {"block": norm}}}
    arguments = {"module": "Sum", "settings": SETTINGS, "handed": HANDED, "tables": [0], "replace": inside}
    spec = BlockSpec(block="Lifted", arguments=arguments)
    assert BlockSpec.model_validate_json(spec.model_dump_json()) == spec
    json.dumps(spec.model_dump())
    built = spec.build(classes_of(SOURCE))
    assert type(built.module.inner.block) is RMSNorm
    assert {inner.block for inner in spec.walk()} == {"Lifted", "Inside", "RMSNorm"}
    with pytest.raises(ValueError, match="no lifted class 'Sum'; there are none"):
        spec.build()


def test_settings():
    made = settings_value({"namespace": {"a": 1, "b": {"namespace": {"c": [1, 2]}}, "t": {"dtype": "float32"}}})
    assert (made.a, made.b.c, made.t) == (1, [1, 2], torch.float32)
    with pytest.raises(AttributeError):
        _ = made.absent
    picked = settings_value({"picked": {"3": {"namespace": {"x": 5}}, "word": {"namespace": {"x": 6}}}})
    assert (picked[3].x, picked["word"].x) == (5, 6)


def test_a_package_reads_the_file_beside_it(tmp_path):
    (tmp_path / "lifted.py").write_text(SOURCE)
    (tmp_path / "operators").mkdir()
    loads = "from dayzero.runtime.nn.lifted_operator import operator\n\nSum = operator(__file__, 'Sum')\n"
    (tmp_path / "operators" / "sum.py").write_text(loads)
    assert beside(str(tmp_path / "model.py"), ["sum"]).Sum is classes_of(SOURCE)["Sum"]
