"""Rotary tables are read in every spelling."""

import torch
from torch import nn

from dayzero.onboard.oracle.calls import Call
from dayzero.onboard.structure.handed import context_of, handed_tables, made_already, tables_in

BATCH, LENGTH, PAIRS = 2, 5, 3
ANGLE = torch.arange(LENGTH, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
COS, SIN = ANGLE.cos() * 1.2, ANGLE.sin() * 1.2  # [S, pairs]
WANTED = (COS.repeat(BATCH, 1), SIN.repeat(BATCH, 1))


def call(*args, **kwargs):
    hidden = torch.zeros(BATCH, LENGTH, 8, dtype=torch.float64)
    return Call("x", nn.Identity(), (hidden, *args), kwargs, hidden)


def is_wanted(tables):
    (table,) = tables
    return torch.equal(table.cos, WANTED[0]) and torch.equal(table.sin, WANTED[1])


def pair(change):
    return change(COS), change(SIN)


SPELLINGS = {
    "half, batch": pair(lambda t: torch.cat((t, t), -1).expand(BATCH, -1, -1)),
    "half, one document": pair(lambda t: torch.cat((t, t), -1)[None]),
    "two dimensions": pair(lambda t: torch.cat((t, t), -1)),
    "interleaved": pair(lambda t: t.repeat_interleave(2, -1)[None]),
    "once": pair(lambda t: t[None]),
    "heads": pair(lambda t: torch.cat((t, t), -1)[None, None]),
    "heads after": pair(lambda t: torch.cat((t, t), -1)[None, :, None]),
    "kinds of positions": pair(lambda t: torch.cat((t, t), -1).expand(3, BATCH, -1, -1)),
    "complex": torch.complex(COS, SIN)[None],
    "a list": list(pair(lambda t: t[None])),
}


def test_every_spelling_is_one_table():
    for name, value in SPELLINGS.items():
        assert is_wanted(handed_tables(call(value))), name
        assert is_wanted(handed_tables(call(tables={"local": value}))), name


def test_an_odd_width_is_whole():
    (table,) = tables_in(pair(lambda t: t[None]), 1, LENGTH)
    assert table.cos.shape == (LENGTH, PAIRS)


def test_what_is_no_table():
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(1, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    for value in (
        tuple(noise),
        (COS[None], COS[None]),
        (COS[None], SIN[None, :3]),
        (COS[:4], SIN[:4]),
        COS,
        (COS[None], SIN[None], COS[None]),
    ):
        assert handed_tables(call(value)) == []


def test_different_tables_in_order_and_equal_ones_once():
    local, far = SPELLINGS["complex"], pair(lambda t: (t * 0 + t.flip(-1))[None])
    found = handed_tables(call(local, far, again=SPELLINGS["half, batch"]))
    assert len(found) == 2
    assert is_wanted(found[:1])
    assert found[1].is_made_of(far)
    assert not found[1].is_made_of(pair(lambda t: t[None]))
    assert not found[0].equals(found[1])


class Spin(nn.Module):
    def forward(self, position):
        self.count = getattr(self, "count", 0) + 1
        angle = position[..., None].double() * torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
        return angle.cos() * 1.2, angle.sin() * 1.2


def test_tables_that_a_module_makes_for_itself_count_as_handed():
    spin, position = Spin(), torch.arange(LENGTH)[None]
    inner = {"spin": Call("spin", spin, (position,), {}, spin(position))}
    outer = call(position)
    context = context_of(outer, inner)
    assert torch.equal(context.tables[0][0], WANTED[0])
    assert context_of(outer).tables == ()
    assert context.lengths == (LENGTH, LENGTH)
    assert context.position.tolist() == [*range(LENGTH)] * 2
    with made_already(inner):
        assert spin(position) is inner["spin"].output
    assert spin.count == 1
    spin(position)
    assert spin.count == 2


def test_a_temperature_by_position_is_handed_on():
    scale = torch.linspace(1, 2, LENGTH, dtype=torch.float64)
    context = context_of(call(scale[None, None, :, None]))
    assert torch.equal(context.shared["query_scale"], scale.repeat(BATCH))
    assert "query_scale" not in context_of(call(-scale[None])).shared
    assert "query_scale" not in context_of(call()).shared
