import os

import pytest

from dayzero.onboard.install import compare, install, read_decisions, refuse_foreign
from dayzero.runtime.errors import InputError

FILES = {"model.py": "one\n", "tests/test_package.py": "two\n", "onboard.lock": "{}\n"}


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_package_is_exactly_its_files_and_what_is_a_persons_own(tmp_path):
    target = tmp_path / "out" / "mine"
    install(target, FILES, tmp_path)
    held = tree(target)
    assert held.keys() == FILES.keys() | {"decisions.yaml", "custom/README.md"}
    assert all(held[name] == text for name, text in FILES.items())
    assert (target / "checkpoint").resolve() == tmp_path.resolve()
    assert target.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_what_a_person_wrote_survives_and_what_was_generated_does_not(tmp_path):
    target = tmp_path / "mine"
    install(target, {**FILES, "old.py": "gone"}, tmp_path)
    (target / "decisions.yaml").write_text("ignore_config: {a: b}\n")
    (target / "custom" / "block.py").write_text("hand-written")
    (target / "custom" / "tool").symlink_to("block.py")
    (target / "custom" / "README.md").unlink()
    (target / "stray.txt").write_text("x")
    install(target, {**FILES, "model.py": "other\n"}, tmp_path)
    assert tree(target) == {
        **FILES,
        "model.py": "other\n",
        "decisions.yaml": "ignore_config: {a: b}\n",
        "custom/block.py": "hand-written",
        "custom/tool": "hand-written",
    }
    assert os.readlink(target / "custom" / "tool") == "block.py"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failure_leaves_the_old_package_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "mine"
    install(target, FILES, None)
    before = tree(target)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dayzero.onboard.install.shutil.copy2", full)
    with pytest.raises(OSError, match="No space"):
        install(target, {**FILES, "model.py": "other\n"}, None)
    assert tree(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_taken_and_a_foreign_one_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    install(tmp_path / "empty", FILES, None)
    assert (tmp_path / "empty" / "model.py").read_text() == "one\n"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "a").write_text("a")
    for refuse in (refuse_foreign, lambda target: install(target, FILES, None)):
        with pytest.raises(InputError, match=r"without onboard\.lock"):
            refuse(tmp_path / "foreign")
    assert tree(tmp_path / "foreign") == {"a": "a"}


def test_differences_name_the_file(tmp_path):
    target = tmp_path / "mine"
    install(target, FILES, tmp_path)
    assert compare(target, FILES) == []
    (target / "custom" / "mine.py").write_text("x")
    (target / "decisions.yaml").write_text("{}")
    (target / "__pycache__").mkdir()
    (target / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"x")
    assert compare(target, FILES) == []
    (target / "model.py").write_text("One\n")
    (target / "tests" / "test_package.py").unlink()
    (target / "tests" / "test_more.py").write_text("")
    (target / ".hidden").write_text("")
    lines = compare(target, FILES)
    assert [line.split(":")[0] for line in lines] == [
        "model.py", "tests/test_package.py", ".hidden", "tests/test_more.py",
    ]  # fmt: skip
    assert "changed" in lines[0]
    assert "missing" in lines[1]
    assert "not generated" in lines[2]


def test_decisions(tmp_path):
    assert read_decisions(tmp_path) == {}
    (tmp_path / "decisions.yaml").write_text("# nothing yet\n")
    assert read_decisions(tmp_path) == {}
    (tmp_path / "decisions.yaml").write_text("ignore_config:\n  a: why\n")
    assert read_decisions(tmp_path) == {"ignore_config": {"a": "why"}}
    for text in ("[", "3", "ignore: {}", "ignore_config: [a]", "!!python/object/apply:os.mkdir [x]"):
        (tmp_path / "decisions.yaml").write_text(text)
        with pytest.raises(InputError, match=r"decisions\.yaml"):
            read_decisions(tmp_path)
    assert not (tmp_path / "x").exists()
