"""Runs a command that may do anything with as little of the machine as it needs: no network, a read-only system, a
private /tmp, one folder to write to, and limits on time, memory and processes.

Bubblewrap (bwrap) makes the namespaces. Where it is missing or may not make them, nothing is run.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dayzero.runtime.errors import InputError

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_POLL = 0.5  # seconds between looks at what runs inside
_LONGEST_LINE = 16_000_000  # bytes of one line that is read from inside


@dataclass(frozen=True)
class Limits:
    """seconds: of wall clock. memory: bytes, of each process and of all together. processes: threads not counted."""

    seconds: float = 4 * 3600.0
    memory: int = 24 << 30
    processes: int = 64
    file: int = 8 << 30  # bytes of one file


class Stopped(Exception):
    """What ran inside went over a limit; the message says which."""


def why_not() -> str:
    """Why there is no sandbox here, "" where there is one."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "bubblewrap (bwrap) is not installed"
    probe = [bwrap, *_namespaces(), "--ro-bind", "/", "/", "true"]
    try:
        tried = subprocess.run(probe, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    said = tried.stderr.strip().splitlines()
    return "" if tried.returncode == 0 else f"bwrap may not make namespaces here: {said[-1] if said else 'no reason'}"


def check(unsafe: bool) -> None:
    """Raises InputError where there is no sandbox and none of it is accepted."""
    if not unsafe and (why := why_not()):
        raise InputError(
            "--trust-remote-code",
            found=why,
            expected="a sandbox for the checkpoint's code",
            hint="Install bubblewrap, or pass --unsafe-no-sandbox to run that code as yourself.",
        )


def _namespaces() -> list[str]:
    return [
        "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev",
        "--tmpfs", "/tmp",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """All that the command finds in its environment."""
    return {
        "HOME": "/tmp",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": "1",
    }


def arguments(argv: Sequence[str], read_only: Sequence[Path], writable: Path) -> list[str]:
    """The bwrap command line. Paths are the same inside and outside."""
    made = [shutil.which("bwrap") or "bwrap", *_namespaces(), "--clearenv"]
    for name, value in environment().items():
        made += ["--setenv", name, value]
    for path in dict.fromkeys([*_SYSTEM, *map(str, read_only)]):
        if os.path.lexists(path):
            made += ["--ro-bind", path, path]
    return [*made, "--bind", str(writable), str(writable), "--chdir", str(writable), "--", *argv]


def python_folders() -> list[Path]:
    """What this interpreter needs to run this program again: itself, its packages, ours."""
    import dayzero.kernels
    import dayzero.onboard
    import dayzero.runtime
    import dayzero.templates

    packages = (dayzero.kernels, dayzero.onboard, dayzero.runtime, dayzero.templates)
    folders = [Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parents[1]]
    folders += [Path(path) for package in packages for path in package.__path__]
    folders += [Path(path) for path in sys.path if path and Path(path).is_dir() and "-packages" in path]
    return [folder for folder in dict.fromkeys(folders) if str(folder) != "/"]


def checkpoint_folders(checkpoint: Path) -> list[Path]:
    """The folder, and where the Hub's cache keeps the content of its files. No other link is followed: it could show
    any file of this machine."""
    home = checkpoint.resolve()
    blobs = home.parent.parent / "blobs"
    linked = any(file.is_symlink() and file.resolve().parent == blobs for file in checkpoint.iterdir())
    return [home, blobs] if linked else [home]


def lines(
    argv: Sequence[str],
    read_only: Sequence[Path],
    writable: Path,
    limits: Limits = Limits(),
    unsafe: bool = False,
) -> Iterator[str]:
    """Runs the command and gives its output line by line; its errors go nowhere but into `Stopped`.

    unsafe: without a sandbox, as the user that runs this, with the limits all the same. Raises InputError where there
    is no sandbox, Stopped where a limit is reached or the command fails.
    """
    check(unsafe)
    command = list(argv) if unsafe else arguments(argv, read_only, writable)
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=environment() | {"HOME": home, "PATH": os.environ.get("PATH", "")},
            start_new_session=True,
            preexec_fn=_limit(limits),
            cwd=writable,
        )
        watch = _Watch(process, limits)
        try:
            watch.start()
            assert process.stdout is not None
            while line := process.stdout.readline(_LONGEST_LINE):
                yield line.decode(errors="replace").rstrip("\n")
            process.wait()
        finally:
            watch.end()
        if watch.reason:
            raise Stopped(watch.reason)
        if process.returncode:
            errors.seek(max(errors.seek(0, os.SEEK_END) - 4000, 0))
            said = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
            raise Stopped(f"it ended with {process.returncode}: {said[-1] if said else 'and said nothing'}")


def _limit(limits: Limits):
    def apply() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file, limits.file))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    return apply


class _Watch:
    """Ends a process and all below it when together they go over a limit."""

    def __init__(self, process: subprocess.Popen, limits: Limits):
        self.process, self.limits, self.reason = process, limits, ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._done.set()
        self._thread.join()
        if self.process.poll() is None:
            self._kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _look(self) -> None:
        start = time.monotonic()
        while not self._done.wait(_POLL):
            below = _below(self.process.pid)
            memory = sum(map(_resident, below))
            if time.monotonic() - start > self.limits.seconds:
                self.reason = f"it ran for more than {self.limits.seconds:g} seconds"
            elif len(below) > self.limits.processes:
                self.reason = f"it started more than {self.limits.processes} processes"
            elif memory > self.limits.memory:
                self.reason = f"it took more than {self.limits.memory} bytes of memory"
            if self.reason:
                self._kill()
                return

    def _kill(self) -> None:
        # The first process of the namespace goes last of these, and takes with it whatever was started meanwhile.
        for pid in [*reversed(_below(self.process.pid)), self.process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """All processes that a process started, and those that they started."""
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        for task in _listed(Path(f"/proc/{current}/task")):
            try:
                children = [int(word) for word in Path(f"/proc/{current}/task/{task}/children").read_text().split()]
            except OSError:
                continue
            found += children
            todo += children
    return found


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
