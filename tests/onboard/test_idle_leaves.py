from types import SimpleNamespace

from dayzero.onboard.candidates.evidence import Candidate, literal
from dayzero.onboard.idle_leaves import taken_by, without_idle_leaves
from dayzero.runtime.spec import BlockSpec, LayerKind, PartSpec


def layer(**arguments):
    inner = Candidate("GroupedQueryAttention", {n: literal(value, "") for n, value in arguments.items()}, {})
    outer = Candidate("IndexedAttention", {"attention": inner}, {})
    return SimpleNamespace(all_parts=[SimpleNamespace(attempt=SimpleNamespace(candidate=outer))])


def kind(**more):
    arguments = {"hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "scale": 0.5, **more}
    part = PartSpec(name="mixer", block=BlockSpec(block="GroupedQueryAttention", arguments=arguments), reads="x")
    return LayerKind(parts=[part], gives="x + mixer")


def test_names_that_some_layer_takes():
    assert taken_by([layer(leaves="near"), layer(takes="far"), layer(scale=1.0)], None) == {"far"}


def test_nothing_is_left_that_nobody_takes():
    left = kind(leaves="near")
    assert without_idle_leaves(left, {"near"}) == left
    assert without_idle_leaves(left, {"far"}) == kind()
    assert without_idle_leaves(kind(takes="near"), set()) == kind(takes="near")
