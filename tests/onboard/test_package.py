"""`onboard check`: a package is as generated, or the file that is not is named."""

import json
import random
import shutil
from pathlib import Path

import onboarded
import pytest

from dayzero.onboard.agent import Run, execute
from dayzero.onboard.package import align_package, check_package
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.package import load_package
from dayzero.runtime.weights import bind


@pytest.fixture
def package(tmp_path):
    return Path(shutil.copytree(onboarded.get("mixtral", align=True).package, tmp_path / "mixtral", symlinks=True))


def generated(package):
    kept = ("decisions.yaml", "custom", "checkpoint")
    files = (path for path in sorted(package.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [path for path in files if path.relative_to(package).parts[0] not in kept]


def named(package, name):
    """Whether the check finds the file wrong: by a line of its own, or, for a lock that is no JSON, by an error."""
    try:
        return any(line.startswith(f"{name}:") for line in check_package(package))
    except InputError as error:
        return name == "onboard.lock" and name in str(error)


def test_a_new_package_is_as_generated(package):
    assert check_package(package) == []
    assert {path.relative_to(package).as_posix() for path in generated(package)} == {
        "REPORT.md", "hashes.json", "ledger.json", "model.py", "onboard.lock", "operators/__init__.py",
        "operators/grouped_gemm.py", "operators/rms_norm.py", "operators/swiglu.py", "plan.yaml", "report.html",
        "spec.json", "tests/test_package.py", "train.yaml", "weights.py",
    }  # fmt: skip


def test_hashes_are_those_of_the_weights_that_the_ladder_read(package):
    made = load_package(package)
    assert made.hashes is not None
    assert len(set(made.hashes.values())) == len(bind(made.rules))
    load_checkpoint(made.build(), made.rules, made.checkpoint, read_headers(made.checkpoint), hashes=made.hashes)
    assert load_package(onboarded.get("mixtral").package).hashes is None  # without the ladder nobody read them


@pytest.mark.slow
def test_a_changed_byte_anywhere_is_found_and_its_file_named(package):
    draw = random.Random(0)
    for file in generated(package):
        name, content = file.relative_to(package).as_posix(), file.read_bytes()
        for position in {0, len(content) - 1, draw.randrange(len(content))}:
            changed = bytearray(content)
            changed[position] ^= 1
            file.write_bytes(changed)
            assert named(package, name), (name, position)
        file.write_bytes(content)
    assert check_package(package) == []


def test_a_digit_of_the_lock_that_no_report_shows_counts_too(package):
    lock = package / "onboard.lock"
    before = json.loads(lock.read_text())
    before["alignment"]["blocks"]["proven"] += 1
    lock.write_text(json.dumps(before, indent=1) + "\n")
    assert any(line.startswith("onboard.lock:") for line in check_package(package))


@pytest.mark.slow
def test_a_removed_file_is_named(package):
    for file in generated(package):
        name, content = file.relative_to(package).as_posix(), file.read_bytes()
        file.unlink()
        assert named(package, name)
        file.write_bytes(content)


def test_an_added_file_is_named_but_not_in_what_is_a_persons_own(package):
    for name in ("extra.py", "operators/mine.py", "tests/test_mine.py"):
        (package / name).write_text("")
        assert check_package(package) == [f"{name}: not generated"]
        (package / name).unlink()
    (package / "custom" / "mine.py").write_text("x = 1")
    (package / "decisions.yaml").write_text("ignore_config: {}\n# mine\n")
    assert check_package(package) == []


def test_another_checkpoint_behind_the_link_is_found(package):
    (package / "checkpoint").unlink()
    assert check_package(package) == []
    (package / "checkpoint").symlink_to(onboarded.checkpoint("llama"))
    assert [line.split(":")[0] for line in check_package(package)] == ["checkpoint"]


def test_another_version_is_said_before_anything_else(package):
    lock = package / "onboard.lock"
    lock.write_text(lock.read_text().replace('"version": "', '"version": "9.'))
    with pytest.raises(InputError, match=r"written by version 9\."):
        check_package(package)


@pytest.mark.slow
def test_decisions_and_custom_files_survive_a_second_run(tmp_path):
    source = onboarded.checkpoint("llama")
    run = Run(source, tmp_path, "llama", 8, 64.0, align=False)
    list(execute(run))
    package = tmp_path / "llama"
    before = {path.name: path.read_bytes() for path in generated(package)}
    (package / "custom" / "block.py").write_text("hand = 'written'\n")
    (package / "decisions.yaml").write_text("ignore_config: {}\n# mine\n")
    (package / "model.py").write_text("broken")
    list(execute(Run(source, tmp_path, "llama", 8, 64.0, align=False)))
    assert (package / "custom" / "block.py").read_text() == "hand = 'written'\n"
    assert (package / "decisions.yaml").read_text() == "ignore_config: {}\n# mine\n"
    assert {path.name: path.read_bytes() for path in generated(package)} == before
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.slow
def test_aligning_again_gives_the_same_package(package):
    before = {path: path.read_bytes() for path in generated(package)}
    alignment, tried = align_package(package, None, lambda line: None)
    assert alignment.verdict == "PASS"
    assert {item.block for item in tried} == {"RMSNorm", "GroupedQueryAttention", "MixtureOfExperts"}
    assert {path: path.read_bytes() for path in generated(package)} == before


def test_aligning_with_another_checkpoint_is_refused(package):
    with pytest.raises(InputError, match="headers sha256"):
        align_package(package, onboarded.checkpoint("llama"), lambda line: None)


def test_checking_runs_nothing_of_the_package(package):
    for name in ("model.py", "weights.py", "operators/__init__.py", "tests/test_package.py"):
        file = package / name
        file.write_text(file.read_text() + f"\nopen({str(package / 'sentinel')!r}, 'w')\n")
    assert [line.split(":")[0] for line in check_package(package)] == [
        "model.py", "operators/__init__.py", "tests/test_package.py", "weights.py",
    ]  # fmt: skip
    assert not (package / "sentinel").exists()


@pytest.mark.parametrize("key", ["files", "findings", "alignment", "checkpoint", "templates_sha256", "sha256"])
def test_a_lock_without_one_of_its_parts(package, key):
    lock = package / "onboard.lock"
    content = json.loads(lock.read_text())
    del content[key]
    lock.write_text(json.dumps(content, indent=1) + "\n")
    assert [line.split(":")[0] for line in check_package(package)] == ["onboard.lock"]
