"""The ladder's verdicts, and that its rungs see what is wrong."""

import dataclasses
import math
import shutil
from pathlib import Path

import onboarded
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dayzero.onboard.align import THRESHOLDS, Alignment, Rung, blocks_rung, coverage_rung, model_rung
from dayzero.onboard.align.climb import load_shrunk
from dayzero.onboard.align.ladder import judge, rounded_up
from dayzero.onboard.align.model import CannotLoad, beyond_rounding, real_weights_error
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.package import load_package
from dayzero.runtime.spec import SourceSpec


@pytest.fixture(scope="module")
def mixtral():
    """(checkpoint, specification, ledger)."""
    source = read_checkpoint(onboarded.checkpoint("mixtral"))
    return source, *specify_checkpoint(source, "x", {}, lambda line: None)


def rung(error, threshold=1e-9):
    return judge({"x": error}, threshold)


def test_the_thresholds_are_those_of_the_design():
    assert THRESHOLDS.items() >= {"L0": 0.0, "L1": 1e-9, "L2": 1e-8, "L2 float32": 1e-4}.items()


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(0.0, "PASS"), (1e-9, "PASS"), (1.0001e-9, "FAIL"), (math.nan, "FAIL"), (math.inf, "FAIL"), (-math.inf, "FAIL")],
)
def test_verdicts(error, verdict):
    assert rung(error).verdict == verdict


def test_the_worst_is_named_and_nothing_at_all_is_no_pass():
    found = judge({"a": 1e-12, "b": 3e-10, "c": 0.0}, 1e-9)
    assert (found.verdict, found.worst, found.where) == ("PASS", 3e-10, "b")
    found = judge({"a": 5.0, "b": math.nan, "c": 7.0}, 1e-9)
    assert (found.verdict, found.worst, found.where) == ("FAIL", math.inf, "b")
    assert judge({}, 1e-9).verdict == "UNVERIFIED"
    assert Alignment().verdict == "UNVERIFIED"


def test_what_the_reference_itself_rounds_away_in_float32_is_told_and_not_judged():
    exact = {f"float64: {name}": torch.tensor([1.0], dtype=torch.float64) for name in "abcd"}
    rounded = {f"float32: {name}": torch.tensor([1.0002 if name in "bc" else 1.0]) for name in "abcd"}
    errors = {"float32: a": 3e-4, "float32: b": 3e-4, "float32: c": 3e-3, "float32: d": 5e-5}
    judged, lines = beyond_rounding(errors, rounded, exact, {})
    assert judged == {"float32: a": 3e-4, "float32: c": 3e-3, "float32: d": 5e-5}
    assert lines == ["float32: b: 3.00e-04, not judged: the reference's own rounding is 2.00e-04"]
    assert beyond_rounding({"float32: a": math.nan}, rounded, exact, {})[0].keys() == {"float32: a"}


def test_a_gradient_that_is_zero_in_exact_arithmetic_is_as_large_as_its_floor():
    exact, rounded = {"float64: a": torch.zeros(1, dtype=torch.float64)}, {"float32: a": torch.tensor([1e-9])}
    assert beyond_rounding({"float32: a": 2e-3}, rounded, exact, {"float32: a": 1e-6})[0] == {}
    assert beyond_rounding({"float32: a": 2e-2}, rounded, exact, {"float32: a": 1e-6})[0] == {"float32: a": 2e-2}
    assert beyond_rounding({"float32: a": 2e-3}, rounded, exact, {})[0] == {"float32: a": 2e-3}


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.1])
def test_a_reference_that_is_lost_in_float32_excuses_nothing(value):
    exact, rounded = {"float64: a": torch.ones(1, dtype=torch.float64)}, {"float32: a": torch.tensor([value])}
    for error in (math.inf, 0.2):
        assert beyond_rounding({"float32: a": error}, rounded, exact, {}) == ({"float32: a": error}, [])


@pytest.mark.parametrize("worst", ["FAIL", "UNVERIFIED", "WARN", "PASS"])
def test_the_verdict_of_a_ladder_is_its_worst(worst):
    order = ["FAIL", "UNVERIFIED", "WARN", "PASS"]
    rungs = {v: Rung(verdict=v, worst=0, threshold=0, where="") for v in order[order.index(worst) :]}
    assert Alignment(rungs=rungs).verdict == worst


@given(st.floats(1e-300, 1e300))
def test_errors_are_written_down_as_a_bound(error):
    bound = rounded_up(error)
    assert bound >= error
    assert bound >= 1e-12
    assert bound <= max(10.0001 * error, 1e-12)
    assert math.log10(bound) == pytest.approx(round(math.log10(bound)), abs=1e-9)


def test_zero_and_infinity_stay():
    assert rounded_up(0.0) == 0.0
    assert rounded_up(math.inf) == math.inf


def test_coverage_reads_and_writes_every_tensor(mixtral):
    source, specification, ledger = mixtral
    seen = []
    found, hashes = coverage_rung(source, ledger, specification.spec, lambda done, total: seen.append((done, total)))
    assert (found.verdict, found.worst) == ("PASS", 0.0)
    assert seen[-1] == (len(source.headers), len(source.headers))
    rules = [rule.build() for rule in specification.spec.rules]
    model = specification.spec.build()
    assert load_checkpoint(model, rules, source.path, source.headers, hashes=hashes) == source.total_bytes
    assert hashes.keys() == dict(model.named_parameters()).keys()


def test_coverage_fails_for_a_tensor_without_a_fate(mixtral):
    source, specification, ledger = mixtral
    found, _ = coverage_rung(source, ledger.model_copy(update={"unaccounted": ["lost.weight"]}), specification.spec)
    assert (found.verdict, found.worst) == ("FAIL", math.inf)
    assert "lost.weight" in found.where


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_bit_pattern_of_a_dtype_survives(dtype, tmp_path, mixtral):
    """Denormals, both zeros, the largest and the smallest: through float32 and back."""
    source, specification, ledger = mixtral
    folder = Path(shutil.copytree(source.path, tmp_path / "checkpoint"))
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    limits = torch.finfo(dtype)
    odd = [limits.max, limits.min, limits.tiny, limits.smallest_normal, -0.0, 0.0, float("inf"), -float("inf")]
    odd.append(limits.smallest_normal * limits.eps)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        flat[: len(odd)] = torch.tensor(odd, dtype=torch.float64).to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found, _ = coverage_rung(read_checkpoint(folder), ledger, specification.spec)
    assert (found.verdict, found.worst) == ("PASS", 0.0)


def swapped(source: SourceSpec) -> SourceSpec:
    """Gate and up the other way round."""
    if source.op == "concat":
        return source.model_copy(update={"parts": list(reversed(source.parts))})
    return source.model_copy(update={"parts": [swapped(part) for part in source.parts]})


def with_rule(specification, parameter, change):
    rules = [
        rule.model_copy(update={"source": change(rule.source)}) if rule.parameter.endswith(parameter) else rule
        for rule in specification.shrunk.rules
    ]
    return specification.model_copy(update={"shrunk": specification.shrunk.model_copy(update={"rules": rules})})


def with_block(specification, role, **arguments):
    kinds = []
    for kind in specification.shrunk.layer_kinds:
        block = kind.blocks[role]
        block = block.model_copy(update={"arguments": {**block.arguments, **arguments}})
        parts = [p.model_copy(update={"block": block}) if p.name == role else p for p in kind.parts]
        kinds.append(kind.model_copy(update={"parts": parts}))
    return specification.model_copy(update={"shrunk": specification.shrunk.model_copy(update={"layer_kinds": kinds})})


def with_router(specification, **arguments):
    (kind,) = specification.shrunk.layer_kinds
    router = kind.blocks["ffn"].arguments["router"]
    router = router.model_copy(update={"arguments": {**router.arguments, **arguments}})
    return with_block(specification, "ffn", router=router)


def test_the_model_rung_passes(mixtral):
    _, specification, _ = mixtral
    found = model_rung(lambda folder: load_shrunk(specification, folder), specification.shrunk_config)
    assert found.verdict == "PASS"
    assert 0 < found.worst <= 1e-8
    for text in (
        "float64, natural routing: logits",
        "float64, forced routing: loss",
        "float32, forced routing: logits",
    ):
        assert any(line.startswith(text) for line in found.details)
    parameters = sum(1 for line in found.details if line.startswith("float64, forced routing: gradient of"))
    assert parameters == len(specification.shrunk.rules)


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_it",
    [
        lambda s: with_rule(s, "experts.gate_up", swapped),
        lambda s: with_router(s, normalise=None),
        lambda s: with_router(s, scale=1.0 + 1e-7),
        lambda s: with_block(s, "mixer_norm", eps=1.01e-5),
        lambda s: with_block(s, "mixer", window=20),
        lambda s: with_block(s, "mixer", rotary="interleaved"),
    ],
    ids=["gate and up swapped", "not renormalised", "scale", "epsilon", "window", "rotary"],
)
def test_the_model_rung_fails_for_a_model_that_is_not_the_reference(mixtral, break_it):
    _, specification, _ = mixtral
    broken = break_it(specification)
    found = model_rung(lambda folder: load_shrunk(broken, folder), specification.shrunk_config)
    assert found.verdict == "FAIL"
    assert found.worst > THRESHOLDS["L2"]


def test_real_weights_are_compared_too(mixtral):
    source, _, _ = mixtral
    package = load_package(onboarded.get("mixtral").package)
    assert 0 < real_weights_error(package, source) <= 1e-5
    rules = list(package.rules)
    keys = {"layers.{layer}.mixer.key.weight": "value", "layers.{layer}.mixer.value.weight": "key"}
    other = {rule.parameter: rule.source for rule in rules}
    for number, rule in enumerate(rules):
        if rule.parameter in keys:
            exchanged = other[f"layers.{{layer}}.mixer.{keys[rule.parameter]}.weight"]
            rules[number] = dataclasses.replace(rule, source=exchanged)
    assert real_weights_error(dataclasses.replace(package, rules=rules), source) > 1e-2


def test_a_checkpoint_that_the_reference_itself_does_not_load(mixtral, tmp_path):
    """Rules may know what a reference does not: that a tensor is stored with fewer rows than it has."""
    source, _, _ = mixtral
    folder = shutil.copytree(source.path, tmp_path / "changed")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {name: tensor[:-1] if name == "lm_head.weight" else tensor for name, tensor in tensors.items()}
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file, {"format": "pt"})
    package = load_package(onboarded.get("mixtral").package)
    with pytest.raises(CannotLoad):
        real_weights_error(package, read_checkpoint(folder))


def with_wiring(specification, name, reads):
    (kind,) = specification.shrunk.layer_kinds
    parts = [part.model_copy(update={"reads": reads}) if part.name == name else part for part in kind.parts]
    kinds = [kind.model_copy(update={"parts": parts})]
    return specification.model_copy(update={"shrunk": specification.shrunk.model_copy(update={"layer_kinds": kinds})})


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda s: with_router(s, normalise=None), "layers.0.ffn, for model.layers.0.mlp"),
        (lambda s: with_block(s, "mixer", window=20), "layers.0.mixer, for model.layers.0.self_attn"),
        (lambda s: with_wiring(s, "ffn_norm", "x"), "what layers.0.ffn_norm reads, 'x'"),
    ],
    ids=["router", "window", "residual"],
)
def test_the_model_rung_names_the_first_part_that_differs(mixtral, break_it, named):
    _, specification, _ = mixtral
    broken = break_it(specification)
    found = model_rung(lambda folder: load_shrunk(broken, folder), specification.shrunk_config)
    assert found.where.endswith(f"first to differ: {named}")


def test_the_blocks_rung_proves_what_was_generated(mixtral, tmp_path):
    _, specification, _ = mixtral
    found = blocks_rung(load_shrunk(specification, tmp_path / "right"), specification.shrunk_config)
    assert (found.verdict, len(found.details)) == ("PASS", 6)  # rotary table, two norms, mixer, experts, last norm
    broken = with_block(specification, "ffn_norm", eps=1e-5 + 1e-9)
    found = blocks_rung(load_shrunk(broken, tmp_path / "wrong"), specification.shrunk_config)
    assert found.verdict == "FAIL"
    assert found.where.startswith("layers.0.ffn_norm, for model.layers.0.post_attention_layernorm")


def test_a_model_that_its_rules_do_not_fill_fails_and_names_the_parameter(mixtral):
    _, specification, _ = mixtral
    rules = [rule for rule in specification.shrunk.rules if rule.parameter != "layers.1.mixer.key.weight"]
    broken = specification.model_copy(update={"shrunk": specification.shrunk.model_copy(update={"rules": rules})})
    found = model_rung(lambda folder: load_shrunk(broken, folder), specification.shrunk_config)
    assert (found.verdict, found.where) == ("FAIL", "layers.1.mixer.key.weight: no rule fills it")
