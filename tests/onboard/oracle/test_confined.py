"""What comes out of the sandbox is data: a package is taken only if it is what its own data gives."""

import json
import shutil

import onboarded
import pytest

from dayzero.onboard.agent import Outcome, Progress, Run
from dayzero.onboard.oracle import sandbox
from dayzero.onboard.oracle.confined import align_confined, execute_confined, specify_confined
from dayzero.onboard.prove.proven import NotProven
from dayzero.runtime.errors import InputError, RunFailed


@pytest.fixture(scope="module")
def made():
    return onboarded.get("llama")


class Child:
    """Stands for the sandbox: leaves a package in the folder, changed by `spoil`, and says `lines`."""

    def __init__(self, package, spoil=lambda folder: None, lines=()):
        self.package, self.spoil, self.said = package, spoil, lines
        self.requests = []

    def __call__(self, argv, read_only, writable, limits=None, unsafe=False):
        request = json.loads(argv[-1])
        self.requests.append(request)
        folder = writable / "packages" / request["name"]
        if self.package is not None:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.package, folder, symlinks=True)
            self.spoil(folder)
        yield "Writing model shards: noise of a library"
        for line in self.said:
            yield json.dumps(line)


def done(made, unproven=()):
    outcome = made.outcome.model_dump(mode="json")
    return {"done": {**outcome, "package": "/somewhere/else", "unproven": list(unproven)}}


def run(made, tmp_path, monkeypatch, child):
    monkeypatch.setattr(sandbox, "lines", child)
    return list(execute_confined(Run(made.checkpoint, tmp_path / "out", made.package.name, 8, 64.0, False)))


def test_a_package_that_its_own_data_gives_is_taken(made, tmp_path, monkeypatch):
    child = Child(made.package, lines=[{"progress": {"step": "read", "line": "x"}}, done(made)])
    progress, outcome = run(made, tmp_path, monkeypatch, child)
    assert progress == Progress(step="read", line="x")
    assert isinstance(outcome, Outcome)
    target = tmp_path / "out" / made.package.name
    assert outcome.package == target
    assert (target / "model.py").read_bytes() == (made.package / "model.py").read_bytes()
    assert (target / "checkpoint").resolve() == made.checkpoint.resolve()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [target.name]
    assert child.requests[0]["job"] == "run"


def _append(name, text):
    def spoil(folder):
        with (folder / name).open("a") as file:
            file.write(text)

    return spoil


def _link(folder):
    (folder / "model.py").unlink()
    (folder / "model.py").symlink_to("/etc/passwd")


def _another_checkpoint(folder):
    spec = json.loads((folder / "spec.json").read_text())
    spec["checkpoint"]["tensors"] += 1
    (folder / "spec.json").write_text(json.dumps(spec))


SPOILT = {
    "code added to model.py": _append("model.py", "\nimport os\n"),
    "a file that no package has": _append("operators/more.py", "import os\n"),
    "a link": _link,
    "a rule changed": _append("weights.py", "\nRULES = []\n"),
    "another checkpoint": _another_checkpoint,
    "no specification": lambda folder: (folder / "spec.json").unlink(),
}


@pytest.mark.parametrize("how", SPOILT)
def test_anything_else_is_not(made, tmp_path, monkeypatch, how):
    with pytest.raises(RunFailed, match="sandbox"):
        run(made, tmp_path, monkeypatch, Child(made.package, SPOILT[how], [done(made)]))
    assert not (tmp_path / "out" / made.package.name).exists()


def test_what_is_unproven_is_said_and_nothing_is_written(made, tmp_path, monkeypatch):
    item = {"where": "x", "why": "y", "tried": []}
    outcome = run(made, tmp_path, monkeypatch, Child(None, lines=[done(made, [item])]))[-1]
    assert outcome.unproven == [item]
    assert not (tmp_path / "out").exists()


def test_refusals_reach_the_user_without_control_characters(made, tmp_path, monkeypatch):
    refused = {"refused": {"where": "config.json", "found": "a\x1b[31mb", "expected": "c", "hint": ""}}
    with pytest.raises(InputError) as caught:
        run(made, tmp_path, monkeypatch, Child(None, lines=[refused]))
    assert caught.value.found == "a [31mb"
    monkeypatch.setattr(sandbox, "lines", Child(None, lines=[{"unproven": [{"where": "w\x07", "why": "y"}]}]))
    with pytest.raises(NotProven) as unproven:
        specify_confined(made.checkpoint, "llama", lambda line: None)
    assert unproven.value.unproven[0].where == "w "


def test_silence_is_a_failure(made, tmp_path, monkeypatch):
    with pytest.raises(RunFailed, match="without an outcome"):
        run(made, tmp_path, monkeypatch, Child(made.package))
    monkeypatch.setattr(sandbox, "lines", Child(None))
    with pytest.raises(RunFailed, match="without a specification"):
        specify_confined(made.checkpoint, "llama", lambda line: None)


def test_a_package_is_aligned_again(made, tmp_path, monkeypatch):
    package = tmp_path / made.package.name
    shutil.copytree(made.package, package, symlinks=True)
    alignment = made.outcome.alignment.model_dump(mode="json")
    child = Child(made.package, lines=[{"line": "L0"}, {"done": {"alignment": alignment, "tried": []}}])
    monkeypatch.setattr(sandbox, "lines", child)
    told = []
    aligned, tried = align_confined(package, made.checkpoint, told.append)
    assert (aligned, tried, told) == (made.outcome.alignment, [], ["L0"])
    assert (package / "decisions.yaml").read_bytes() == (made.package / "decisions.yaml").read_bytes()
