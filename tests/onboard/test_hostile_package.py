"""Strings of a checkpoint that try to be code, through everything that onboarding generates."""

import ast
import importlib.util
import json
import shutil
from pathlib import Path

import hostile
import onboarded
import pytest

from dayzero.onboard.agent import Outcome, Run, execute
from dayzero.runtime.errors import InputError


def _strings(value, path=()):
    """Where the text of a config is."""
    for key, held in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(held, str):
            yield (*path, key)
        yield from _strings(held, (*path, key))


def _packaged(checkpoint, tmp_path):
    """The package, or None where the run refuses or does not prove."""
    try:
        outcome = list(execute(Run(checkpoint, tmp_path / "generated", "made", 8, 64.0, align=False)))[-1]
    except InputError:
        return None
    assert isinstance(outcome, Outcome)
    return None if outcome.unproven else outcome.package


def _read_and_run(package, payload, tmp_path):
    """The payload is in no code but as a literal; the files run, and do nothing else."""
    for file in package.rglob("*.py"):
        code = ast.unparse(ast.parse(file.read_text()))
        assert payload not in code.replace(repr(payload), "")
    for file in ("model.py", "weights.py"):
        spec = importlib.util.spec_from_file_location(f"made_{file[:-3]}", package / file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "<script" not in (package / "report.html").read_text()
    assert not list(tmp_path.rglob(hostile.SENTINEL))


EXTRA = {"_name_or_path": "x", "tokenizer_class": "x", "auto_map": {"AutoConfig": "m.C"}, "transformers_version": "5"}


@pytest.mark.slow
@pytest.mark.parametrize("payload", hostile.PAYLOADS[:4], ids=["python", "quote", "lines", "jinja"])
def test_every_string_of_the_config_is_a_value(tmp_path, monkeypatch, payload):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    source = Path(shutil.copytree(onboarded.checkpoint("llama"), tmp_path / "checkpoint"))
    sound = {**json.loads((source / "config.json").read_text()), **EXTRA}
    places, made = list(_strings(sound)), 0
    assert len(places) >= 8
    for place in places:
        config = json.loads(json.dumps(sound))
        holder = config
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = payload
        (source / "config.json").write_text(json.dumps(config))
        package = _packaged(source, tmp_path)
        if package is not None:
            made += 1
            _read_and_run(package, payload, tmp_path)
        assert not list(tmp_path.rglob(hostile.SENTINEL)), place
    assert made >= 3  # fields that no one reads


@pytest.mark.slow
def test_tensor_names_that_look_like_code(tmp_path, monkeypatch):
    """Carried through with the vision tower, they stand in the ledger and the report and in no code."""
    import torch
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(tmp_path)
    source = Path(shutil.copytree(onboarded.checkpoint("llama"), tmp_path / "checkpoint"))
    names = ["vision_tower.__class__.__init__.__globals__", "vision_tower.import.os", "vision_tower.7.eval:x/y"]
    tensors = load_file(source / "model.safetensors") | {name: torch.ones(2) for name in names}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    package = _packaged(source, tmp_path)
    assert package is not None
    for name in names:
        _read_and_run(package, name, tmp_path)
    groups = json.loads((package / "ledger.json").read_text())["groups"]
    assert [group["fate"] for group in groups if group["pattern"].startswith("vision_tower.")] == ["carried"] * 3


@pytest.mark.slow
def test_a_prefix_that_looks_like_code(tmp_path, monkeypatch):
    """Before the names of tensors that are mapped it stands in the weight rules, as text."""
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(tmp_path)
    source = Path(shutil.copytree(onboarded.checkpoint("llama"), tmp_path / "checkpoint"))
    prefix = f"__import__.os/system:{hostile.SENTINEL}."
    tensors = load_file(source / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, source / "model.safetensors")
    package = _packaged(source, tmp_path)
    assert package is not None
    code = ast.parse((package / "weights.py").read_text())
    texts = {node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert prefix + "model.embed_tokens.weight" in texts
    for name in {text for text in texts if text.startswith(prefix)}:
        _read_and_run(package, name, tmp_path)
