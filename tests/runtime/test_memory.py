"""What a plan says that a rank holds: against the bytes of real shards, and of real passes."""

import copy

import harness
import large_model
import odd_specs
import pytest
import ranks_plan
import torch

from dayzero.runtime.activations import measure_layers
from dayzero.runtime.communication import communication
from dayzero.runtime.config import Group, Optimizer
from dayzero.runtime.dry_pass import layer_bytes
from dayzero.runtime.lora import apply_lora
from dayzero.runtime.memory import host_memory, memory, state_memory
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.planned_model import Mesh, measure
from dayzero.runtime.spec import LoopSpec

# Blocks whose plans take seconds; the others cover the same lines of the plan.
HEAVY = {"deepseek_v4", "kimi_linear", "deepseek_v32"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def odd_cases(*modes):
    """Every model of odd blocks, in every mode."""
    return [slow(n, mode) if n in HEAVY else (n, mode) for n in sorted(odd_specs.NAMES) for mode in modes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout", "mode", "precision"),
    [
        (1, (1, 1, 1), "full", "bf16"),
        slow(4, (1, 4, 1), "lora", "bf16"),
        (4, (1, 4, 2), "full", "bf16"),  # 3 experts on each of 2 ranks: cut along the width
        slow(4, (1, 4, 2), "lora", "fp32"),
        slow(4, (2, 2, 2), "full", "fp32"),
        (3, (1, 3, 3), "full", "bf16"),  # hidden 40 and vocabulary 307 do not divide by 3
        (2, (1, 1, 2, 2), "full", "bf16"),
        slow(4, (1, 2, 2, 2), "lora", "bf16"),
        (4, (1, 1, 2, 2, 2), "full", "fp32"),
        slow(4, (2, 1, 1, 1, 2), "full", "fp32"),
    ],
)
def test_parameters_gradients_and_optimizer_are_exact(spec, world, layout, mode, precision):
    tp, cp = (*layout[3:], 1, 1)[:2]
    mesh = Mesh(dp_replicate=layout[0], dp_shard=layout[1], ep=layout[2], efsdp=world // layout[2], tp=tp, cp=cp)
    model = measure(spec, mode, precision, 4, tp=tp)
    want = memory(model, mesh, 8, recompute=True, loss_chunk=None)
    ranks = _ranks(spec, world, layout, mode, precision)
    assert {name: want[name] for name in ranks[0][0]} == ranks[0][0]
    assert host_memory(model, mesh) == ranks[0][1]
    assert all(rank[line] <= want[line] for rank, _ in ranks for line in rank)
    whole = 4 * sum(p.numel() for p in spec.build().parameters())
    if mode == "full" and layout[0] == 1:
        assert sum(rank["gradients"] for rank, _ in ranks) == whole


def _ranks(spec, world, layout, mode, precision, settings=None):
    arguments = (spec.model_dump_json(), layout, mode, precision, DTYPES["bf16"], settings or Optimizer(lr=1e-3))
    return harness.run(ranks_plan.held, world, *arguments, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", slow("lora")])
@pytest.mark.parametrize(
    "settings",
    [
        slow(Optimizer(name="muon")),
        slow(Optimizer(states="bf16")),
        Optimizer(states="8bit", groups={"router": Group(name="muon")}),
        Optimizer(states="bf16", name="muon", offload=True),
    ],
    ids=["muon", "bf16", "8bit", "offloaded"],
)
def test_moments_are_exact_however_they_are_kept(spec, settings, mode):
    if mode == "lora":
        settings = settings.model_copy(update={"groups": {}})
    model = measure(spec, mode, "fp32", 4, settings)
    mesh = Mesh(dp_replicate=1, dp_shard=2, ep=2, efsdp=1)
    lines, host = _ranks(spec, 2, (1, 2, 2), mode, "fp32", settings)[0]
    assert state_memory(model, mesh)["optimizer"] == lines["optimizer"]
    assert host_memory(model, mesh) == host
    assert host_memory(measure(spec, mode, "fp32", 4, settings, asynchronous=False), mesh) == {
        name: size for name, size in host.items() if name == "host_moments"
    }


@pytest.mark.slow
@pytest.mark.parametrize("states", ["8bit", slow("bf16")])
def test_moments_of_cut_rows_are_exact(spec, states):
    settings, mesh = Optimizer(states=states), Mesh(dp_replicate=1, dp_shard=1, ep=2, efsdp=1, tp=2)
    lines, host = _ranks(spec, 2, (1, 1, 2, 2), "full", "fp32", settings)[0]
    model = measure(spec, "full", "fp32", 4, settings, tp=2)
    assert state_memory(model, mesh)["optimizer"] == lines["optimizer"]
    assert host_memory(model, mesh) == host


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [*odd_cases("full"), slow("jamba", "lora")])
def test_models_of_odd_blocks_are_exact_too(name, mode):
    odd = odd_specs.read(name)
    world = 3 if odd_specs.has_experts(odd) else 2  # 15 experts
    mesh = Mesh(dp_replicate=1, dp_shard=world, ep=world if world == 3 else 1, efsdp=1 if world == 3 else 2)
    model = measure(odd, mode, "bf16", 4)
    want = memory(model, mesh, 8, recompute=True, loss_chunk=None)
    lines, host = _ranks(odd, world, (1, world, mesh.ep), mode, "bf16")[0]
    assert {name: want[name] for name in lines} == lines
    assert host_memory(model, mesh) == host


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), odd_cases("full", "lora"))
def test_activations_are_what_a_pass_leaves_alive(name, mode):
    """A pass without values counts the bytes of one with values."""
    odd = odd_specs.read(name)
    model = odd.build()
    if mode == "lora":
        apply_lora(model, 4, 8.0)
    initialise(model, 0.2, seed=0)
    for tokens in (24, 70):
        made = measure_layers(copy.deepcopy(model).to("meta"), tokens)
        for layer, real in zip(made, layer_bytes(model, tokens), strict=True):
            # A few integers, such as the documents' lengths, are on the host where a device has the tensors.
            assert vars(layer) == pytest.approx(vars(real), abs=64)
            assert layer.kept > layer.output > 0


def test_inputs_of_layers_are_kept_for_all_of_them():
    model, mesh = measure(odd_specs.read("gemma4"), "full", "bf16", 4), Mesh(dp_replicate=1, dp_shard=1, ep=1, efsdp=1)
    both = memory(model, mesh, 8, recompute=False, loss_chunk=None)["activations"]
    model.built.layer_inputs = None  # what layers keep is measured already
    assert both - memory(model, mesh, 8, recompute=False, loss_chunk=None)["activations"] == 2 * 2 * 8 * 4 * 14


def test_a_looped_layer_is_held_once_and_runs_every_time(large):
    mesh = Mesh(dp_replicate=2, dp_shard=4, ep=8, efsdp=1)
    uneven = large_model.uniform(large, dense=58)  # and three mixtures, which run four times
    alone, looped = (
        measure(spec, "full", "bf16", 4)
        for spec in (uneven, large_model.with_fields(uneven, loop=LoopSpec(first=58, count=3, passes=4)))
    )
    assert state_memory(looped, mesh) == state_memory(alone, mesh)
    assert host_memory(looped, mesh) == host_memory(alone, mesh)
    one, other = (memory(model, mesh, 64, recompute=True, loss_chunk=None)["activations"] for model in (alone, looped))
    mixture = alone.layer_bytes(64)[alone.order[-1]]
    assert other - one == 9 * (mixture.output + mixture.routing)
    moved, more = (communication(model, mesh, 64, False, 8) for model in (alone, looped))
    assert more["reduce_scatter"] == moved["reduce_scatter"]
    assert more["all_reduce"] == moved["all_reduce"]
    assert more["all_gather"]["inside"] > moved["all_gather"]["inside"]
    assert more["all_to_all"]["inside"] == 4 * moved["all_to_all"]["inside"]


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_kept_activations_of_a_layer_counted_by_hand(spec, mode):
    """Queries, keys, values and their norms' inputs, attention's result and log-sum-exp, two norms, the routed part."""
    with torch.device("meta"):
        model = spec.build()
        if mode == "lora":
            apply_lora(model, 4, 8.0)
    T, H, N, G, D, K, F = 64, 40, 4, 2, 12, 2, 24
    attention = next(kind.blocks["mixer"] for kind in spec.layer_kinds).arguments
    assert (attention["hidden"], attention["heads"], attention["kv_heads"], attention["head_dim"]) == (H, N, G, D)
    (layer,) = [
        made for made, run in zip(layer_bytes(model, T), spec.kinds_in_order(), strict=True) if made.by_experts
    ][:1]
    lower = 4 * T * (H + 2 * (N + G) * D + G * D + N * D + H + K * 2 * F)
    assert lower <= layer.kept <= 2.5 * lower
    assert layer.output == 4 * T * H
    assert layer.routing == 12 * T * K


def test_long_batches_follow_a_parabola(spec):
    with torch.device("meta"):
        model = spec.build()
    exact = layer_bytes(model, 10240)
    for guess, want in zip(measure_layers(model, 10240), exact, strict=True):
        assert guess.kept == pytest.approx(want.kept, rel=0.01)
        assert guess.output == pytest.approx(want.output, rel=0.001)


def test_what_is_gathered_early_has_its_place(large):
    model, mesh = (
        measure(large_model.uniform(large), "lora", "bf16", 4),
        Mesh(dp_replicate=1, dp_shard=4, ep=2, efsdp=2),
    )
    layer, experts = (2 * unit.elements(mesh) for unit in (model.kinds[0].dense, model.kinds[0].experts[0]))
    held = [state_memory(model, mesh, prefetch)["gathered"] for prefetch in (0, 1, 2)]
    assert held == [held[0], held[0] + layer, held[0] + layer + experts]
    # Layers of two kinds: in the backward pass the one before the first mixture is a dense one, which is larger.
    model, mesh = (
        measure(large_model.uniform(large, 1), "lora", "bf16", 4),
        Mesh(dp_replicate=1, dp_shard=64, ep=64, efsdp=1),
    )
    first, mixture = model.kinds
    of_both = first.dense.elements(mesh) + mixture.dense.elements(mesh) + mixture.experts[0].elements(mesh)
    rest = model.root.elements(mesh) + max(unit.elements(mesh) for unit, _ in model.units)
    assert state_memory(model, mesh, 1)["gathered"] == 2 * (of_both + rest)
