"""Code that ships with a checkpoint: named, listed, refused, and run only where it may be."""

import json
import sys

import pytest
import remote_checkpoint
import torch

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.remote_code import current, files_to_run, remote_code, using
from dayzero.onboard.prove.proven import NotProven
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.errors import InputError


@pytest.fixture
def own(tmp_path):
    return read_checkpoint(remote_checkpoint.make(tmp_path / "own"))


def test_the_files_that_would_run_are_those_named_and_what_they_import(own):
    code = remote_code(own.path, own.config)
    assert (code.config, code.model) == ("configuration_own.OwnConfig", "modeling_own.OwnForCausalLM")
    (own.path / "more.py").write_text("x = 1")
    (own.path / "unused.py").write_text("x = 1")
    with (own.path / "configuration_own.py").open("a") as file:
        file.write("\nfrom .more import x\n")
    assert files_to_run(own.path, code) == ["configuration_own.py", "modeling_own.py", "more.py"]


def test_without_permission_it_is_listed_and_nothing_of_it_runs(own):
    for name in ("configuration_own.py", "modeling_own.py"):
        (own.path / name).write_text("raise SystemExit('it ran')\n")
    with pytest.raises(NotProven) as caught:
        specify_checkpoint(own, "own", {}, lambda line: None)
    (item,) = caught.value.unproven
    assert "--trust-remote-code" in item.why
    assert item.why.endswith("configuration_own.py, modeling_own.py")
    assert not any(name.startswith("checkpoint_code_") and "modeling_own" in name for name in sys.modules)


@pytest.mark.parametrize(
    "named",
    ["someone/else--modeling_own.Own", "../modeling_own.Own", "/etc/x.Y", "modeling_own", "a b.C", 3],
)  # fmt: skip
def test_code_of_elsewhere_is_refused(own, named):
    config = {**own.config, "auto_map": {**own.config["auto_map"], "AutoModelForCausalLM": named}}
    with pytest.raises(InputError) as caught:
        remote_code(own.path, config)
    assert "auto_map" in caught.value.where


def test_a_file_that_is_not_there_or_a_link_out_is_refused(own, tmp_path_factory):
    config = {**own.config, "auto_map": {"AutoModelForCausalLM": "absent.Model"}}
    with pytest.raises(InputError, match=r"absent\.py"):
        remote_code(own.path, config)
    elsewhere = tmp_path_factory.mktemp("other") / "x.py"
    elsewhere.write_text("")
    (own.path / "absent.py").symlink_to(elsewhere)
    with pytest.raises(InputError, match="a link to"):
        remote_code(own.path, config)


def test_a_checkpoint_without_a_model_in_its_map_has_no_code(own):
    assert remote_code(own.path, {**own.config, "auto_map": {"AutoTokenizer": ["tokenizer.T", None]}}) is None
    assert remote_code(own.path, {**own.config, "auto_map": None}) is None


def test_the_reference_is_built_from_it_like_any_other(own):
    with using(remote_code(own.path, own.config)):
        assert current() is not None
        model, reads = reference.build(own.config, record=True)
        with torch.no_grad():
            logits = reference.run(model, torch.arange(6)[None])
    assert current() is None
    assert logits.shape == (1, 6, 97)
    assert logits.dtype == torch.float64
    assert {"hidden_size", "fading", "rms_norm_eps", "residual"} <= reads
    assert "fading" in model.config_reads.paths(model)
    assert model.config_reads.paths(model)["fading"] == ["model.blocks.0.mixer", "model.blocks.1.mixer"]
    assert reference.constructed_with(model.model.blocks[1].mixer)["layer_idx"] == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import no_such_package_here", "no_such_package_here, which is not installed"),
        ("raise ValueError('broken')", "ValueError: broken"),
        ("del OwnForCausalLM", "no class OwnForCausalLM"),
    ],
)
def test_code_that_does_not_import_is_said_plainly(tmp_path, line, said):
    code = remote_checkpoint.MODELING + f"\n{line}\n"
    folder = remote_checkpoint.make(tmp_path / "own", code=code)
    checkpoint = read_checkpoint(folder)
    with using(remote_code(folder, checkpoint.config)), pytest.raises(InputError, match=said):
        reference.build(checkpoint.config)


def test_the_command_says_which_files_and_which_flag(own, capsys, monkeypatch, tmp_path):
    from dayzero.onboard.cli import main

    monkeypatch.setattr(sys, "argv", ["onboard", "run", str(own.path), "-o", str(tmp_path / "out"), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "--trust-remote-code" in result["unproven"][0]["why"]
    assert not (tmp_path / "out" / "own").exists()


def test_no_sandbox_without_code_is_a_usage_error(own, capsys, monkeypatch):
    from dayzero.onboard.cli import main

    monkeypatch.setattr(sys, "argv", ["onboard", "run", str(own.path), "--unsafe-no-sandbox"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--trust-remote-code" in capsys.readouterr().err
