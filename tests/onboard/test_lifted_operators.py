"""What is written by hand in the place of a lifted class: said what it must compute, used, and judged by the ladder."""

import functools
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from zoo import unseen

from dayzero.onboard import specify
from dayzero.onboard.agent import Run, execute
from dayzero.onboard.align.climb import climb, load_shrunk
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.generate import _lifted_tests, model_files
from dayzero.onboard.inspect.classify import classify, settle
from dayzero.onboard.install import write_files
from dayzero.onboard.lifted_operators import custom_operators, lifted_operators, operator_files
from dayzero.onboard.oracle import remote_code
from dayzero.onboard.package import align_package, check_package
from dayzero.onboard.rules.unmapped import fates
from dayzero.onboard.specify_checkpoint import real_shapes
from dayzero.runtime.custom_operators import differences
from dayzero.runtime.errors import InputError
from dayzero.runtime.nn.lifted_operator import custom_of
from dayzero.runtime.package import load_package

# Of each layer never seen: what its operator says, a faster forward, one that is wrong, one with a wrong gradient, and
# what of the right one's operations is another than the reference's.
LAYERS = {
    "mixer": (
        "running_sum",
        ["handed   x: float [B, S, hidden_size]", "runs     cumsum [B, S, hidden_size]; 1"],
        """
        before = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return module.back(torch.atan(before @ module.into(x)) * torch.cos(module.gate(x)))
        """,
        ("torch.cos", "torch.sin"),
        ("module.gate(x)", "module.gate(x).detach()"),
        "",
    ),
    "router": (
        "nearest_router",
        ["holds    weight: float [num_experts, hidden_size]", "with     the constants 2"],
        """
        x = x[:, None]
        distance = x.pow(2).mean(-1) - 2.0 * (x * module.weight).mean(-1) + module.weight.pow(2).mean(-1)
        weights, index = (1.0 / (1.0 + distance)).topk(module.top_k, -1)
        return torch.atan(weights), index
        """,
        ("1.0 + distance", "1.5 + distance"),
        ("torch.atan(weights)", "torch.atan(weights.detach())"),
        "",
    ),
    "residual": (
        "layer_around_before_between_mixer_mixture",
        ["calls    mixer: GroupedQueryAttention, which is proven and is called as it is", "runs     atan [B, S, 1]"],
        """
        mixed = module.mixer(module.before(x))
        tangent = (x * mixed).mean(-1, keepdim=True)
        x = (x + mixed * tangent) * torch.rsqrt(1.0 + tangent.pow(2))
        return x + module.mixture(module.between(x))
        """,
        ("1.0 + tangent", "2.0 + tangent"),
        ("module.between(x)", "module.between(x.detach())"),
        "reference only: step cos",
    ),
}
ODD = ["mixer", pytest.param("router", marks=pytest.mark.zoo), pytest.param("residual", marks=pytest.mark.zoo)]


@functools.cache
def specified(odd):
    """(checkpoint, specification, settled ledger), made once."""
    held = tempfile.TemporaryDirectory()
    FOLDERS.append(held)
    checkpoint = read_checkpoint(unseen.make(Path(held.name) / "own", odd))
    with using(checkpoint), mock.patch.object(specify, "intervene", return_value=[]):
        found = specify.specify(checkpoint.config, checkpoint.identity(), odd, headers=checkpoint.headers)
    shapes, others = real_shapes(found.spec), fates(found.idle, found.tables)
    return checkpoint, found, settle(classify(checkpoint), checkpoint, found.spec, shapes, found.towers, others)


FOLDERS = []


def using(checkpoint):
    return remote_code.using(remote_code.remote_code(checkpoint.path, checkpoint.config))


def written(folder, odd, change=("", "")):
    """The custom folder with the faster forward of that layer, and a piece of it replaced."""
    name, body = LAYERS[odd][0], LAYERS[odd][2]
    assert change[0] in body
    lines = [line.removeprefix("    ") for line in body.strip("\n").splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    text = "import torch\n\n\ndef forward(module, x):\n" + "\n".join(lines) + "\n"
    (folder / f"{name}.py").write_text(text.replace(*change, 1) if change[0] else text)
    return folder


def aligned(odd, custom):
    checkpoint, found, ledger = specified(odd)
    with using(checkpoint), mock.patch("dayzero.onboard.align.climb.real_weights_error", return_value=None):
        return climb(checkpoint, found, ledger, lambda line: None, custom=custom)


@pytest.mark.parametrize("odd", ODD)
def test_the_operator_says_what_it_must_compute(odd):
    (operator,) = lifted_operators(specified(odd)[1].spec)
    assert operator.name == LAYERS[odd][0]
    assert set(LAYERS[odd][1]) <= set(operator.lines)


@pytest.mark.parametrize("odd", ODD)
def test_what_is_written_by_hand_is_used_and_judged(odd, tmp_path):
    _, found, _ = specified(odd)
    name, _, _, wrong, wrong_gradient, apart = LAYERS[odd]
    made = tmp_path / "made"
    write_files(made, {**model_files(found.spec), **_lifted_tests(found.spec, found.shrunk)})
    assert set(differences(made, [name]).values()) == {0.0}
    written(made / "custom", odd)
    errors = differences(made, [name])
    assert 0.0 < max(errors.values()) < 1e-9
    assert any("gradient of module." in what for what in errors)
    written(made / "custom", odd, wrong_gradient)
    errors = differences(made, [name])
    assert {what.split(": ")[1].split()[0] for what, error in errors.items() if not error <= 1e-9} == {"gradient"}

    right = aligned(odd, written(tmp_path / "right", odd, ("", "")))
    assert right.verdict == ("WARN" if apart else "PASS"), right.rungs
    assert apart in right.rungs["L1"].where
    rungs = aligned(odd, written(tmp_path / "wrong", odd, wrong)).rungs
    assert (rungs["L1"].verdict, rungs["L2"].verdict) == ("FAIL", "FAIL")
    assert re.search(rf"for model\.tiers\.0(\.mix\w*)?, by custom/{name}\.py: ", rungs["L1"].where)


def test_code_that_does_not_run_is_named(tmp_path):
    _, found, _ = specified("mixer")
    (tmp_path / "custom").mkdir()
    file = tmp_path / "custom" / "running_sum.py"
    file.write_text("def forward(module, x):\n    return x.nowhere\n")
    rung = aligned("mixer", tmp_path / "custom").rungs["L1"]
    assert rung.verdict == "FAIL"
    assert "custom/running_sum.py: AttributeError" in rung.where
    file.write_text("forwards = 1\n")
    with pytest.raises(InputError, match=r"custom/running_sum\.py\n.*no attribute 'forward'"):
        load_shrunk(found, tmp_path / "made", tmp_path / "custom")


def test_names_of_operators_are_their_own():
    spec = specified("mixer")[1].spec
    for lifted, name in (
        ("RMSNorm", "rms_norm_lifted"),
        ("DeepSeekV3MoE", "deep_seek_v3_mo_e"),
        ("Swiglu", "swiglu_lifted"),
    ):
        block = spec.layer_kinds[0].blocks["mixer"]
        other = block.model_copy(update={"arguments": {**block.arguments, "module": lifted}})
        kind = spec.layer_kinds[0].model_copy(
            update={"parts": [p.model_copy(update={"block": other}) for p in spec.layer_kinds[0].parts]}
        )
        assert operator_files(spec.model_copy(update={"layer_kinds": [kind]})) == {lifted: name}


def test_only_what_stands_for_a_lifted_class_counts(tmp_path):
    spec = specified("mixer")[1].spec
    (tmp_path / "mine.py").write_text("x = 1\n")
    for folder in (None, tmp_path / "none", tmp_path):
        assert not any(custom_operators(folder, spec).values())
    written(tmp_path, "mixer")
    assert {name: len(digest) for name, digest in custom_operators(tmp_path, spec).items()} == {
        "custom/running_sum.py": 64
    }


def test_a_package_knows_which_of_them_was_aligned(tmp_path):
    checkpoint, _, _ = specified("mixer")
    with using(checkpoint), mock.patch.object(specify, "intervene", return_value=[]):
        (*_, outcome) = execute(Run(checkpoint.path, tmp_path, "made", 8, 64.0))
        package = tmp_path / "made"
        assert (outcome.alignment.verdict, check_package(package)) == ("PASS", [])
        assert load_package(package).verdict == "PASS"
        written(package / "custom", "mixer")
        assert check_package(package) == ["custom/running_sum.py: not what was aligned; run onboard align"]
        assert load_package(package).verdict == "UNVERIFIED"
        alignment, _ = align_package(package, None, lambda line: None)
        assert (alignment.verdict, check_package(package)) == ("PASS", [])
        loaded = load_package(package)
    assert loaded.verdict == "PASS"
    assert custom_of(loaded.build()) == ["custom/running_sum.py"]
    assert "in the place of lifted classes: custom/running_sum.py." in (package / "REPORT.md").read_text()
    assert max(differences(package, ["running_sum"]).values()) < 1e-9
