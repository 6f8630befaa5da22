"""A package is read whole or refused, and one whose alignment failed is not trained."""

import json

import handmade
import pytest
import tiny

from dayzero.runtime.errors import InputError
from dayzero.runtime.job import prepare
from dayzero.runtime.package import load_package


@pytest.fixture
def package(tmp_path):
    return handmade.write(tiny.make("mixtral", tmp_path / "checkpoint"), tmp_path / "package")


def lock(folder, *verdicts):
    rungs = {f"L{n}": {"verdict": verdict} for n, verdict in enumerate(verdicts)}
    (folder / "onboard.lock").write_text(json.dumps({"alignment": {"rungs": rungs}}))
    (folder / "hashes.json").write_text(json.dumps({"parameters": None}))


def test_the_verdict_is_the_worst_of_the_rungs(package):
    assert load_package(package).verdict is None
    lock(package, "PASS", "WARN")
    assert load_package(package).verdict == "WARN"
    lock(package, "PASS", "FAIL", "PASS")
    assert load_package(package).verdict == "FAIL"


def test_a_failed_package_is_not_trained(package, tmp_path):
    lock(package, "PASS", "FAIL")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "hello"}) + "\n")
    with pytest.raises(InputError, match="alignment FAILED"):
        prepare(package, data=data, eval_data=None, run=tmp_path / "run", world=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["spec.json", "model.py", "weights.py"])
def test_a_missing_file_is_named(package, name):
    (package / name).unlink()
    with pytest.raises(InputError, match=name):
        load_package(package)


def test_a_package_of_an_older_version_is_onboarded_again(package):
    lock(package, "PASS")
    (package / "hashes.json").unlink()
    with pytest.raises(InputError, match=r"(?s)hashes\.json\n.*Onboard again"):
        load_package(package)


def test_a_lock_that_is_no_lock(package):
    lock(package)
    (package / "onboard.lock").write_text("[]")
    with pytest.raises(InputError, match=r"onboard\.lock"):
        load_package(package)
