"""Plans: the search, what ranks receive, and what a person reads."""

import io
import time

import families
import large_model
import odd_specs
import pytest
import tiny
from rich.console import Console

from dayzero.runtime.communication import communication
from dayzero.runtime.errors import InputError
from dayzero.runtime.plan import make_plan, plan_text, read_plan
from dayzero.runtime.planned_model import GIB, Mesh, measure
from dayzero.runtime.spec import LayerKind


def test_communication_of_a_small_case(spec):
    model = measure(spec, "full", "bf16", 4)
    one = Mesh(dp_replicate=1, dp_shard=1, ep=1, efsdp=1)
    assert all(not any(parts.values()) for parts in communication(model, one, 8, True, 8).values())
    mesh = Mesh(dp_replicate=1, dp_shard=4, ep=2, efsdp=2)
    moved = communication(model, mesh, 8, recompute=False, per_node=2)
    built = spec.build()
    experts = sum(p.numel() for n, p in built.named_parameters() if ".experts." in n) // 2  # of this ep rank
    root = sum(p.numel() for n, p in built.named_parameters() if not n.startswith("layers."))
    dense = sum(p.numel() for p in built.parameters()) - 2 * experts - root
    assert moved["all_gather"]["inside"] == pytest.approx((2 * 2 * dense + 2 * root) / 4, abs=8)
    assert moved["all_gather"]["across"] == pytest.approx((2 * 2 * dense + 2 * root) / 2 + 2 * 2 * experts / 2, abs=8)
    assert moved["reduce_scatter"]["across"] == pytest.approx(4 * (dense + root) / 2 + 4 * experts / 2, abs=8)
    assert moved["all_to_all"] == {"inside": 2 * 4 * (2 * 8 * 3 * 40 // 2) // 2, "across": 0}  # 1.5 of 2 ranks
    assert communication(model, mesh, 8, True, 2)["all_to_all"]["inside"] == moved["all_to_all"]["inside"] * 3 // 2
    replicated = Mesh(dp_replicate=2, dp_shard=2, ep=2, efsdp=2)
    assert communication(model, replicated, 8, False, 4)["all_reduce"]["inside"] > 0


def test_a_large_model_is_planned_in_seconds(large):
    start = time.perf_counter()
    plan = make_plan(large, devices=64, hbm_gib=80, mode="lora", tokens_per_device=4096)
    assert time.perf_counter() - start < 3
    assert plan.fits
    assert plan.total_bytes == sum(plan.per_rank_bytes.values()) <= plan.hbm_bytes == 80 * GIB
    mesh = plan.mesh
    assert mesh.dp_replicate * mesh.dp_shard == mesh.ep * mesh.efsdp == 64
    assert 256 % mesh.ep == 0
    experts = 58 * 256 * 3 * 7168 * 2048 * 2
    assert plan.per_rank_bytes["parameters_experts"] == experts // 64  # bf16, each held once over the 64 ranks
    assert plan.lora_targets == [f"mixer.{n}" for n in ("query", "key", "value", "output")] + [
        f"ffn.{n}" for n in ("gate", "up", "down")
    ]
    counts = {unit.name: unit.count for unit in plan.units}
    assert counts["layers of kind 1: ffn.experts"] == 58
    assert sum(unit.count * unit.parameters for unit in plan.units) > 650e9


def test_the_plan_is_the_cheapest_that_fits(large):
    for devices, hbm, mode in ((64, 80, "lora"), (512, 80, "full")):
        plan = make_plan(large, devices=devices, hbm_gib=hbm, mode=mode, tokens_per_device=4096)
        assert plan.fits
        assert plan.alternatives
        for other in plan.alternatives:
            assert other.mesh != plan.mesh
            if other.total_bytes <= plan.hbm_bytes:
                assert other.weighted_bytes >= plan.weighted_bytes
                assert "times as much" in other.reason or other.weighted_bytes == plan.weighted_bytes
            else:
                assert other.reason == f"needs {other.total_bytes / GIB:.1f} GiB of {hbm}.0"


def test_tighter_memory_gives_up_replicas_then_recomputes(large):
    roomy, tight = (make_plan(large, devices=64, hbm_gib=hbm, mode="lora", tokens_per_device=2048) for hbm in (140, 52))
    assert roomy.fits
    assert tight.fits
    assert (roomy.recompute, tight.recompute) == (False, True)
    assert tight.mesh.dp_replicate < roomy.mesh.dp_replicate
    assert tight.weighted_bytes > roomy.weighted_bytes


@pytest.mark.slow
def test_nothing_fits_and_what_would(large):
    plan = make_plan(large, devices=128, hbm_gib=64, mode="full", tokens_per_device=4096)
    assert not plan.fits
    assert plan.total_bytes == min([plan.total_bytes, *(other.total_bytes for other in plan.alternatives)])
    (line,) = [line for line in plan.advice if "devices of this size would fit" in line]
    more = int(line.split()[0])
    assert make_plan(large, devices=more, hbm_gib=64, mode="full", tokens_per_device=4096).fits
    assert not make_plan(large, devices=more // 2, hbm_gib=64, mode="full", tokens_per_device=4096).fits
    assert any("lora" in line for line in plan.advice)


def test_unknown_memory_replicates_nothing(spec):
    plan = make_plan(spec, devices=4, mode="full", tokens_per_device=64)
    assert (plan.fits, plan.hbm_bytes, plan.mesh.dp_replicate, plan.recompute) == (True, None, 1, True)
    assert plan.mesh.ep in (1, 2)  # 6 experts on 4 ranks
    assert make_plan(spec, devices=1, mode="lora", tokens_per_device=64).mesh.ep == 1


def test_a_dense_model_has_no_ep(tmp_path):
    dense = families.specify(tiny.make("llama", tmp_path, tokenizer=False))
    plan = make_plan(dense, devices=8, hbm_gib=16, mode="full", tokens_per_device=64)
    assert {plan.mesh.ep, *(other.mesh.ep for other in plan.alternatives)} == {1}
    assert plan.communication_bytes["all_to_all"] == 0


@pytest.mark.slow
def test_render_reads_well_in_80_columns(large):
    for hbm in (80, 20, None):
        plan = make_plan(large, devices=64, hbm_gib=hbm, mode="lora", tokens_per_device=4096)
        console = Console(file=io.StringIO(), width=120)
        plan.render(console)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert f"{plan.total_bytes / GIB:.2f} GiB" in text
        assert "_" not in text.replace("dp_shard", "")  # every line has words of its own
        assert ("does NOT fit" in text) == (hbm == 20)


def test_yaml_round_trip_and_errors(spec, tmp_path):
    plan = make_plan(spec, devices=4, hbm_gib=8, mode="lora", tokens_per_device=64, lora_rank=4)
    file = tmp_path / "plan.yaml"
    file.write_text(plan_text(plan))
    assert read_plan(file) == plan
    file.write_text(file.read_text().replace("fits: true", "fits: true\nfit: true"))
    with pytest.raises(InputError, match="fit"):
        read_plan(file)
    with pytest.raises(InputError, match="No such file"):
        read_plan(tmp_path / "none.yaml")
    for wrong in ({"devices": 0}, {"tokens_per_device": 0}, {"devices_per_node": 0}):
        with pytest.raises(InputError, match="1 or more"):
            make_plan(spec, **{"devices": 1, "mode": "lora", "tokens_per_device": 1, **wrong})


def test_tensor_and_context_parallelism_divide_what_a_rank_holds(large):
    """A batch of the same tokens for each device, on as many devices."""
    alone, shared = (
        make_plan(large, devices=64, mode="lora", tokens_per_device=tokens, tp=tp, cp=cp)
        for tokens, tp, cp in ((8192, 1, 1), (8192 * 16, 8, 2))
    )
    assert str(shared.mesh).startswith("dp_shard 4, tp 8, cp 2, ep")
    assert shared.mesh.devices == 64
    one, many = alone.per_rank_bytes, shared.per_rank_bytes
    assert one["parameters_dense"] <= many["parameters_dense"] <= 1.02 * one["parameters_dense"]
    assert many["gathered"] < 0.6 * one["gathered"]  # experts are gathered as before
    assert many["activations"] <= one["activations"]
    assert many["logits"] <= one["logits"]  # a chunk of all tokens, an eighth of the vocabulary
    assert many["shared_rows"] > 0
    assert "shared_rows" not in one
    assert shared.communication_bytes["shared_rows"] > 0
    assert [unit.parameters for unit in alone.units] == [unit.parameters for unit in shared.units]


def test_tp_and_cp_that_do_not_fit_are_refused(large):
    with pytest.raises(InputError, match=r"tp\n.*3\n.*64 heads of layers.0.mixer"):
        make_plan(large, devices=6, mode="lora", tokens_per_device=64, tp=3)
    with pytest.raises(InputError, match=r"tp\n.*4, with cp 4\n.*divides the 8 devices"):
        make_plan(large, devices=8, mode="lora", tokens_per_device=64, tp=4, cp=4)


LONG = {"devices": 64, "hbm_gib": 80, "mode": "lora", "tokens_per_device": 65536}


@pytest.mark.slow
def test_as_few_ranks_as_will_do_share_a_batch_that_fits_into_none(large):
    plan = make_plan(large, **LONG)
    assert plan.fits
    assert (plan.mesh.tp, plan.mesh.cp, plan.mesh.dp_replicate * plan.mesh.dp_shard) == (2, 2, 16)
    assert not any(make_plan(large, **LONG, tp=tp, cp=cp).fits for tp, cp in ((1, 1), (1, 2), (2, 1)))
    assert {other.mesh.tp * other.mesh.cp for other in plan.alternatives if other.total_bytes <= plan.hbm_bytes} == {4}
    assert plan.refused == []
    console = Console(file=io.StringIO(), width=120)
    plan.render(console)
    assert "65536 tokens a batch\n" in console.file.getvalue()
    assert "tp 2, cp 2, ep 8" in console.file.getvalue()
    assert "a batch does not fit into one device: 4 share it" in console.file.getvalue()


def test_one_of_both_can_be_fixed(large):
    for fixed, other in (("tp", "cp"), ("cp", "tp")):
        mesh = make_plan(large, **LONG, **{fixed: 1}).mesh
        assert (getattr(mesh, fixed), getattr(mesh, other)) == (1, 4)


def test_what_fits_alone_is_not_shared(large):
    plan = make_plan(large, **{**LONG, "tokens_per_device": 4096})
    assert {(mesh.tp, mesh.cp) for mesh in (plan.mesh, *(other.mesh for other in plan.alternatives))} == {(1, 1)}
    without = make_plan(large, **{**LONG, "hbm_gib": None})
    assert (without.mesh.tp, without.mesh.cp) == (1, 1)


@pytest.mark.slow
def test_blocks_without_a_form_for_cp_leave_it_to_tp(tmp_path):
    odd = odd_specs.read("mistral_large4")
    wanted = {"devices": 4, "mode": "lora", "tokens_per_device": 1 << 21}
    least = make_plan(odd, **wanted, hbm_gib=1.6, tp=1, cp=1)
    assert not least.fits
    plan = make_plan(odd, **wanted, hbm_gib=0.8 * least.total_bytes / GIB)
    assert plan.fits
    assert (plan.mesh.tp, plan.mesh.cp) == (2, 1)
    (reason,) = plan.refused
    assert reason.startswith("cp has to be 1: LatentAttention of layers.0.mixer has no form")
    (tmp_path / "plan.yaml").write_text(plan_text(plan))
    assert read_plan(tmp_path / "plan.yaml") == plan
    console = Console(file=io.StringIO(), width=80)
    plan.render(console)
    assert "cp has to be 1: LatentAttention" in console.file.getvalue()


def test_heads_that_cannot_be_dealt_out_leave_it_to_cp(large):
    arguments = {"hidden": 7168, "heads": 63, "kv_heads": 63, "head_dim": 128, "scale": 0.1}
    mixer = large_model.block("GroupedQueryAttention", **arguments)
    norm = large.norm
    kinds = [LayerKind.pre_norm(norm, mixer, norm, kind.blocks["ffn"]) for kind in large.layer_kinds]
    plan = make_plan(large_model.with_fields(large, layer_kinds=kinds), **LONG)
    assert plan.fits
    assert (plan.mesh.tp, plan.mesh.cp) == (1, 4)
    assert plan.refused == ["tp has to be a divisor of the 63 heads of layers.0.mixer (GroupedQueryAttention)"]


@pytest.mark.slow
def test_prefetch_takes_the_room_that_is_left(large):
    """None where only that fits; the next layer; and its experts where there is room for them in the same layout."""
    large = large_model.uniform(large)
    wanted = {"devices": 64, "mode": "lora", "tokens_per_device": 4096}
    nothing, layer = (make_plan(large, **wanted, hbm_gib=2, tp=1, cp=1, prefetch=prefetch) for prefetch in (0, 1))
    tight = make_plan(large, **wanted, hbm_gib=(nothing.total_bytes + layer.total_bytes) / 2 / GIB)
    assert (tight.fits, tight.prefetch, tight.mesh.tp, tight.mesh.cp) == (True, 0, 1, 1)
    roomy = make_plan(large, **wanted, hbm_gib=200)
    before = make_plan(large, **wanted, hbm_gib=200, prefetch=1)
    assert roomy.prefetch == 2
    assert (before.mesh, before.recompute, before.weighted_bytes) == (roomy.mesh, roomy.recompute, roomy.weighted_bytes)
    assert before.total_bytes < roomy.total_bytes == sum(roomy.per_rank_bytes.values())
    narrow = make_plan(large, **wanted, hbm_gib=(before.total_bytes + 1000) / GIB)
    assert (narrow.mesh, narrow.prefetch) == (before.mesh, 1)
    assert make_plan(large, **wanted).prefetch == 1
