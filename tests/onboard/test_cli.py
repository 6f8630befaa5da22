"""The command line: exit codes, the last line of --json, text that came from outside."""

import json
import shutil
import sys
from pathlib import Path

import onboarded
import pytest
import torch
from safetensors.torch import load_file, save_file

from dayzero.onboard import cli
from dayzero.onboard.specify import Tried
from dayzero.runtime.errors import InputError

SUMMARY = {"tensors", "bytes", "parameters", "layers", "experts", "quantization", "unaccounted", "unread_config"}
SUMMARY |= {"formats", "tied", "mtp", "budget", "findings", "maths_config"}


@pytest.fixture
def onboard(capsys, monkeypatch, tmp_path):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["onboard", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def last(out):
    return json.loads(out.splitlines()[-1])


def test_inspect_counts_what_is_there(onboard):
    source = onboarded.checkpoint("qwen3_moe")
    code, out, err = onboard("inspect", source, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    result, tensors = last(out), load_file(source / "model.safetensors")
    assert result.keys() == SUMMARY | {"command", "ok", "verdict", "package", "runs", "groups"}
    assert (result["command"], result["ok"], result["verdict"], result["package"]) == ("inspect", True, "PASS", None)
    assert result["tensors"] == len(tensors)
    assert result["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert result["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert result["layers"] == {"mixer": {"full": 3}, "ffn": {"routed": 2, "dense": 1}}
    assert result["experts"] == {"count": 6, "top_k": 2, "shared": 0}
    assert (result["quantization"], result["unaccounted"], result["unread_config"]) == ({}, [], [])


def test_inspect_as_text(onboard):
    code, out, _ = onboard("inspect", onboarded.checkpoint("qwen3_moe"))
    assert code == 0
    assert "Qwen3MoeForCausalLM" in out
    assert "6, 2 a token" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["0,", "2", "full", "routed"] in rows
    assert ["1", "full", "dense"] in rows


def test_inspect_names_what_it_does_not_know(onboard, tmp_path):
    checkpoint = Path(shutil.copytree(onboarded.checkpoint("llama"), tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({**tensors, "model.mystery": torch.ones(2)}, checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "mystery_factor": 2}))
    code, out, _ = onboard("inspect", checkpoint, "--json")
    result = last(out)
    assert (code, result["ok"], result["verdict"]) == (1, False, "UNVERIFIED")
    assert (result["unaccounted"], result["unread_config"]) == (["model.mystery"], ["mystery_factor"])


def test_a_whole_run_ends_with_one_object(onboard, tmp_path):
    source = onboarded.checkpoint("llama")
    code, out, _ = onboard(source, "-o", tmp_path / "out", "--name", "mine", "--json")
    result = last(out)
    assert (code, result["command"], result["ok"], result["verdict"]) == (0, "run", True, "PASS")
    assert result["package"] == str(tmp_path / "out" / "mine")
    assert result.keys() == SUMMARY | {"command", "ok", "verdict", "package", "rungs", "blocks"}
    assert result["blocks"] == {"proven": 4, "lifted": 0, "unverified": 0}
    for rung in result["rungs"].values():
        assert rung.keys() == {"verdict", "worst", "threshold", "where"}
        assert rung["worst"] <= rung["threshold"]
    code, out, _ = onboard("check", tmp_path / "out" / "mine", "--json")
    assert (code, last(out)["ok"], last(out)["differences"]) == (0, True, [])
    (tmp_path / "out" / "mine" / "weights.py").unlink()
    code, out, _ = onboard("check", tmp_path / "out" / "mine", "--json")
    assert (code, last(out)["verdict"], last(out)["differences"]) == (1, "FAIL", ["weights.py: missing"])
    code, out, _ = onboard("report", tmp_path / "out" / "mine", "--json")
    assert (code, last(out)["verdict"]) == (0, "PASS")


def test_generate_without_a_ladder_is_unverified(onboard, tmp_path):
    code, out, _ = onboard("generate", onboarded.checkpoint("llama"), "-o", tmp_path / "out", "--json")
    result = last(out)
    assert (code, result["command"], result["verdict"], result["rungs"]) == (0, "generate", "UNVERIFIED", {})
    first = (tmp_path / "out" / "llama" / "REPORT.md").read_text().splitlines()[2]
    assert first.startswith("**UNVERIFIED**")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect"], "CHECKPOINT"),
        (["run", "x", "--devices", "0"], "devices"),
        (["run", "x", "--nonsense"], "nonsense"),
        (["plan", "x", "--mode", "half"], "--mode"),
        (["check", "nowhere"], "no such folder"),
        (["report", "nowhere"], "no such folder"),
        (["align", "nowhere"], "no such folder"),
        (["inspect", "nowhere"], "no such folder"),
        (["nowhere"], "no such folder"),
        (["inspec", "somewhere"], "Did you mean inspect?"),
    ],
)
def test_usage_errors_end_with_2(onboard, arguments, says):
    code, out, err = onboard(*arguments)
    assert code == 2
    assert says in out + err
    assert "Traceback" not in out + err


def test_a_checkpoint_for_a_package(onboard):
    checkpoint = onboarded.checkpoint("llama")
    code, _, err = onboard("check", checkpoint)
    assert code == 2
    assert "found     a checkpoint" in err
    assert f"Make one of it: onboard {checkpoint}" in err


def test_the_json_of_an_error_names_the_command(onboard):
    for arguments, command in (["inspect", "nowhere"], "inspect"), (["nowhere"], "run"), (["check", "x"], "check"):
        code, out, _ = onboard(*arguments, "--json")
        result = last(out)
        assert (code, result["command"], result["ok"], result["verdict"]) == (2, command, False, "ERROR")
        assert "nowhere" in result["error"] or "x" in result["error"]


def test_an_infinite_error_is_json_too(monkeypatch, capsys):
    from dayzero.onboard.align.ladder import Alignment, judge

    alignment = Alignment(rungs={"L0": judge({"x comes back changed": float("inf")}, 0.0)})
    cli._last_line(True, cli._alignment_json(alignment))
    rung = json.loads(capsys.readouterr().out)["rungs"]["L0"]
    assert (rung["verdict"], rung["worst"], rung["where"]) == ("FAIL", None, "x comes back changed")
    assert Alignment.model_validate_json(alignment.model_dump_json()) == alignment


NAMES = [
    "model.[/x].weight",
    "[red]x",
    "\x1b[2J",
    "a\nb",
    "a\rb",
    "{{ 7 }}",
    "{layer.__class__}",
    "${x}",
    "a|b",
    "<b>",
    "'\"",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_name_that_could_deceive_is_refused_in_quotes(onboard, tmp_path, name):
    checkpoint = Path(shutil.copytree(onboarded.checkpoint("llama"), tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({**tensors, name: torch.ones(2)}, checkpoint / "model.safetensors", {"format": "pt"})
    for command in ("inspect", "run"):
        code, out, err = onboard(command, checkpoint)
        assert (code, out) == (2, "")
        assert repr(name) in err
        assert len(err.splitlines()) <= 4
        assert "\x1b" not in err


FIELDS = {
    "text": "\"); open('sentinel', 'w') #",
    "template": "{{ 7 * 7 }}${x}{% raw %}",
    "lines": "a\nimport os\n\x1b[2J",
    "markup": "<script>alert(1)</script> | [x](y) | [/bold] [red]",
}


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        pytest.param(where, kind, marks=() if where == "name" and kind == "lines" else pytest.mark.slow)
        for where in ("name", "value", "transformers_version")
        for kind in FIELDS
    ],
)
def test_config_text_is_never_more_than_text(onboard, tmp_path, kind, where):
    """In the field's name or value it is listed, in a field that nobody needs it goes no further."""
    text = FIELDS[kind]
    checkpoint = Path(shutil.copytree(onboarded.checkpoint("llama"), tmp_path / "checkpoint"))
    config = json.loads((checkpoint / "config.json").read_text())
    added = {"name": {text: 1}, "value": {"novel_field": text}, "transformers_version": {where: text}}[where]
    (checkpoint / "config.json").write_text(json.dumps({**config, **added}))
    code, out, err = onboard("inspect", checkpoint)
    assert code == (0 if where == "transformers_version" else 1)
    assert "\x1b[2J" not in out + err
    code, out, err = onboard("generate", checkpoint)
    assert "\x1b[2J" not in out + err
    assert code == (0 if where == "transformers_version" else 1), out + err
    for file in (tmp_path / "cwd").rglob("*"):
        if file.is_file() and file.suffix in {".py", ".md", ".html"}:
            assert text not in file.read_text()
    assert not list(tmp_path.rglob("sentinel"))


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Kimi-K3", "kimi_k3"),
        ("Qwen3-30B-A3B", "qwen3_30b_a3b"),
        ("3.5B", "model_3_5b"),
        ("--", "model"),
        ("é", "model"),
    ],
)
def test_package_names(tmp_path, folder, name):
    assert cli.package_name(tmp_path / folder, None) == name


@pytest.mark.parametrize("name", ["", "a-b", "1a", "../a", "a b", "a\n", "é"])
def test_bad_package_names(tmp_path, name):
    with pytest.raises(InputError, match="--name"):
        cli.package_name(tmp_path, name)


@pytest.mark.slow
def test_explain_lists_every_candidate_and_its_miss(onboard, tmp_path):
    code, _, err = onboard("generate", onboarded.checkpoint("mixtral"), "-o", tmp_path, "--name", "mixtral")
    assert code == 0, err
    code, out, err = onboard("align", tmp_path / "mixtral", "--explain", "layers.1")  # one like layer 0
    assert code == 0, err
    lines = out.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("model.layers.0.")]
    assert {lines[n].split(": ")[0].rpartition(".")[2] for n in heads} > {"input_layernorm", "self_attn"}
    for head, following in zip(heads, [*heads[1:], len(lines)], strict=True):
        candidates = int(lines[head].split(" of ")[1].split()[0])
        tried = [line for line in lines[head + 1 : following] if line.startswith("  not ")]
        alike = [int(line.rsplit("(", 1)[1].split()[0]) if line.endswith(" alike)") else 1 for line in tried]
        assert candidates == sum(alike) + 1
    lock = (tmp_path / "mixtral" / "onboard.lock").read_text()
    code, _, err = onboard("align", tmp_path / "mixtral", "--explain", "nowhere")
    assert code == 2
    assert "model.layers.0.self_attn" in err
    assert "every tensor in and out" not in err  # said before the ladder is climbed, with nothing rewritten
    assert (tmp_path / "mixtral" / "onboard.lock").read_text() == lock


@pytest.mark.parametrize("module", ["tiers.1.mix", "layer.3.mix", "layers.0.mix"])
def test_explain_says_why_a_module_is_lifted(capsys, module):
    why = "like GroupedQueryAttention, but for values (of says); runs atan"
    lifted = Tried(
        module="model.tiers.0.mix", block="Lifted", error=0.0, where="captured input", candidates=1, misses=[], why=why
    )
    cli._explain([lifted], module)
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {why}"]
    bound = "the search ended at its bound of 400 candidates; 7 were left untried"
    cli._explain([lifted.model_copy(update={"block": "RMSNorm", "why": "", "bound": bound})], module)
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {bound}"]
    with pytest.raises(InputError, match=r"model\.tiers\.0\.mix"):
        cli._explain([lifted], "layer.0.other")


@pytest.mark.parametrize("module", ["layers.7.mlp", "layer.7.mlp", "model.layers.2.mlp"])
def test_explain_shows_what_was_tried_and_by_how_much_it_missed(capsys, module):
    tried = [
        Tried(
            module="model.layers.2.mlp",
            block="MixtureOfExperts",
            error=3e-13,
            where="output",
            candidates=5,
            misses=["FeedForward: holds as well", *3 * ["Mixture with scale from 1.0: misses by 2.0e-03"]],
        )
    ]
    cli._explain(tried, module)
    assert capsys.readouterr().out.splitlines() == [
        "model.layers.2.mlp: MixtureOfExperts of 5 candidates, 3.0e-13 (output)",
        "  not FeedForward: holds as well",
        "  not Mixture with scale from 1.0: misses by 2.0e-03 (3 alike)",
    ]
    with pytest.raises(InputError, match=r"model\.layers\.2\.mlp"):
        cli._explain(tried, "self_attn")
