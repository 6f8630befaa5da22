"""What reports show of unusual layers: wrapped blocks by what they hold, wiring, differences, scales, what is
lifted."""

import odd_specs
import pytest

from dayzero.onboard.report import layers as report_layers
from dayzero.runtime.spec import BlockSpec, LayerKind, LayerRun, PartSpec, Proof


def norm(**more):
    return BlockSpec(block="RMSNorm", arguments={"width": 16, "eps": 1e-5, **more})


def attention(**more):
    return BlockSpec(
        block="GroupedQueryAttention",
        arguments={"hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "scale": 0.3, **more},
    )


FFN = BlockSpec(block="GatedFeedForward", arguments={"hidden": 16, "width": 24, "act": "silu"})


@pytest.fixture(scope="module")
def base():
    return odd_specs.read("recurrent_gemma")


def test_streams_are_named_by_what_stands_between_them():
    spec = odd_specs.read("deepseek_v4")
    rows = report_layers.kinds(spec)
    assert len(rows) == len(spec.layer_kinds)
    assert all(row["mixer"].startswith("CompressedAttention") for row in rows)
    assert any(row["mixer"].endswith("+ CompressedIndexer in HyperConnected") for row in rows)
    assert {row["ffn"] for row in rows} == {"MixtureOfExperts in HyperConnected"}
    around = dict(report_layers.around(spec))
    assert around["streams"] == f"{spec.streams} copies of the residual between layers"
    assert around["merge"] == "StreamMerge"
    assert len([name for name in around if name.startswith("rotary table")]) == len(spec.rotaries)
    assert report_layers.lifted(spec) == []


def test_layers_of_one_name_tell_what_differs(base):
    kinds = [LayerKind.pre_norm(norm(), attention(**more), norm(), FFN) for more in ({}, {"window": 512})]
    runs = [LayerRun(first=0, count=2, kind=0), LayerRun(first=2, count=1, kind=1), LayerRun(first=3, count=1, kind=0)]
    rows = report_layers.kinds(base.model_copy(update={"layer_kinds": kinds, "layers": runs}))
    assert [(row["name"], row["differs"]) for row in rows] == [
        ("layers 0-1, 3", ""),
        ("layer 2", "mixer.window 512"),
    ]
    assert [(part["name"], part["reads"]) for part in rows[1]["parts"]] == [
        ("mixer_norm", "x"),
        ("mixer", "mixer_norm"),
        ("ffn_norm", "x + mixer"),
        ("ffn", "ffn_norm"),
    ]
    assert rows[1]["gives"] == "x + mixer + ffn"


def test_scales_of_embedding_and_logits_are_shown(base):
    spec = base.model_copy(
        update={"embed_scale": 12.0, "logit_scale": 0.25, "logit_softcap": 30.0, "logit_rows": 190, "tied": True}
    )
    around = dict(report_layers.around(spec))
    assert around["embedding"] == f"{spec.vocabulary} x {spec.hidden}, times 12"
    assert around["head"] == "the embedding's matrix, times 0.25, softcap 30, 190 of its rows are tokens"


def test_parts_that_layers_share_are_named_with_their_layers():
    spec = odd_specs.read("zamba")
    run = next(run for run in spec.layers if run.shared is not None)
    more = run.model_copy(update={"first": run.first + 1})
    rows = dict(report_layers.around(spec.model_copy(update={"layers": [*spec.layers, more]})))
    shown = f"mixer_norm, mixer, ffn_norm, ffn of layers {run.first}-{run.first + 1}, held once"
    assert rows["shared parts 0"] == shown


def test_lifted_parts_are_named_with_their_layers(base):
    proof = Proof(status="lifted", module="model.layers.{layer}.odd", error=1e-12, why="no block is like it")
    odd = BlockSpec(
        block="Lifted", arguments={"module": "OddMixer", "settings": {}, "handed": {}, "tables": []}, proof=proof
    )
    kind = LayerKind(parts=[PartSpec(name="mixer", block=odd, reads="x")], gives="x + mixer")
    spec = base.model_copy(update={"layer_kinds": [kind], "layers": [LayerRun(first=0, count=3, kind=0)]})
    assert report_layers.lifted(spec) == [("model.layers.{layer}.odd", "mixer of layers 0-2", "no block is like it")]
    (row,) = report_layers.kinds(spec)
    assert (row["mixer"], row["ffn"]) == ("OddMixer, lifted", "-")
    assert row["parts"][0]["status"] == "lifted"


def test_every_distinct_block_is_shown_once_with_its_layers():
    for name in odd_specs.NAMES:
        spec = odd_specs.read(name)
        shown = report_layers.uses(spec)
        assert all(any(block == other for other, _ in shown) for block in spec.blocks())
        of_layers = [block for block, where in shown if " of layer" in where]
        assert all(of_layers.count(block) == 1 for block in of_layers)
