"""What runs inside the sandbox sees and reaches little. Without bubblewrap the refusal and the command line remain."""

import os
import shutil
import sys

import pytest

from dayzero.onboard.oracle import sandbox
from dayzero.onboard.oracle.sandbox import Limits, Stopped
from dayzero.runtime.errors import InputError

WHY_NOT = sandbox.why_not()
inside = pytest.mark.skipif(bool(WHY_NOT), reason=f"no sandbox on this machine: {WHY_NOT}")


def run(code, folder, **limits):
    options = Limits(**{"seconds": 60.0, "memory": 2 << 30, "processes": 16, **limits})
    return list(sandbox.lines([sys.executable, "-S", "-c", code], sandbox.python_folders(), folder, options))


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "not installed" in sandbox.why_not()
    with pytest.raises(InputError) as caught:
        list(sandbox.lines([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"], [], tmp_path))
    assert "--unsafe-no-sandbox" in caught.value.hint
    assert not (tmp_path / "ran").exists()
    sandbox.check(unsafe=True)


def test_without_a_sandbox_only_if_told_so(tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w'); print('done')"
    assert list(sandbox.lines([sys.executable, "-S", "-c", code], [], tmp_path, unsafe=True)) == ["done"]
    assert (tmp_path / "ran").exists()


def test_the_command_line(tmp_path):
    made = sandbox.arguments(["python", "x.py"], [tmp_path / "absent", tmp_path], tmp_path)
    text = " ".join(made)
    assert "--unshare-net" in made
    assert "--unshare-pid" in made
    assert "--clearenv" in made
    assert f"--ro-bind {tmp_path} {tmp_path}" in text
    assert f"--bind {tmp_path} {tmp_path} --chdir {tmp_path} -- python x.py" in text
    assert text.index("--ro-bind") < text.index(" --bind ")
    assert "absent" not in text
    assert "--tmpfs /tmp" in text
    names = {made[i + 1] for i, word in enumerate(made) if word == "--setenv"}
    assert names == set(sandbox.environment())
    assert not {name for name in names if "TOKEN" in name or "KEY" in name}


def test_what_python_needs_is_there_and_no_home(tmp_path):
    folders = [str(folder) for folder in sandbox.python_folders()]
    assert sys.prefix in folders
    assert "/" not in folders
    assert os.path.expanduser("~") not in folders


def test_links_are_followed_into_the_cache_of_the_hub_only(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text("x")
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "snapshots" / "abc" / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    assert sandbox.checkpoint_folders(tmp_path / "snapshots" / "abc") == [
        tmp_path / "snapshots" / "abc",
        tmp_path / "blobs",
    ]
    (tmp_path / "snapshots" / "abc" / "model.safetensors").unlink()
    (tmp_path / "snapshots" / "abc" / "key").symlink_to("/etc/passwd")
    assert sandbox.checkpoint_folders(tmp_path / "snapshots" / "abc") == [tmp_path / "snapshots" / "abc"]


@inside
def test_the_folder_is_writable_and_the_environment_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    code = f"import os; open({str(tmp_path / 'out')!r}, 'w').write('x'); print(sorted(os.environ)); print(os.getpid())"
    names, pid = run(code, tmp_path)
    assert "SECRET_TOKEN" not in names
    assert int(pid) < 20
    assert (tmp_path / "out").read_text() == "x"


ATTACKS = {
    "network": ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "unreachable"),
    "write to the system": ("open('/usr/evil', 'w')", "Read-only"),
    "kill": (f"import os; os.kill({os.getpid()}, 9)", "No such process"),
    "memory": ("x = bytearray(3 << 30)", "MemoryError"),
    "processes": ("import os, time\nfor i in range(60):\n    if not os.fork(): time.sleep(50)\ntime.sleep(50)",
                  "more than 16 processes"),
}  # fmt: skip


@inside
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(tmp_path, attack):
    code, said = ATTACKS[attack]
    with pytest.raises(Stopped, match=said):
        run(code, tmp_path)


@inside
def test_other_files_are_not_seen(tmp_path_factory):
    folder, other = tmp_path_factory.mktemp("mine"), tmp_path_factory.mktemp("other")
    (other / "secret").write_text("x")
    assert run(f"import os; print(os.path.exists({str(other / 'secret')!r}))", folder) == ["False"]


@inside
def test_time_is_limited(tmp_path):
    with pytest.raises(Stopped, match="more than 1 seconds"):
        run("import time; time.sleep(40)", tmp_path, seconds=1.0)
