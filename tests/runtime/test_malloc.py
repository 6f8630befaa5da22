"""Memory that a step frees, and what the next one finds of it."""

import os
import subprocess
import sys

import pytest

from dayzero.runtime.malloc import has_glibc, start_without_thread_cache, without_thread_cache

STEPS = """
import resource, sys, torch
from dayzero.runtime.malloc import keep_freed_memory
if sys.argv[1] == "keeps":
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(mebibytes << 18) for mebibytes in (40, 8, 64, 24, 48)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
steps = [faults() for _ in range(24)]
print(steps[0], sum(steps[12:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("how", ["keeps", "gives back"])
def test_memory_that_was_freed_serves_again(how):
    """A step takes 184 MiB, 47,104 pages. A process that gives them back faults for most of them every time; one that
    keeps them no more, once there is a hole for each size. A threshold that is set is one that glibc does not move by
    what it has seen."""
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
    command = [sys.executable, "-c", STEPS, how]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    first, later = map(int, run.stdout.split())
    assert first > 47_000
    assert later < 1_000 if how == "keeps" else later > 12 * 30_000


HOLES = """
import sys, torch
from dayzero.runtime.malloc import keep_freed_memory
keep_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
kept, before = [], resident()
for _ in range(40):  # a large tensor of a step, and small ones that outlive it
    large = torch.ones(1 << 20)
    kept.append([torch.ones(n) for n in range(1, 40)])
    del large
print(resident() - before)
"""


@pytest.mark.skipif(not has_glibc(), reason="glibc's allocator")
def test_a_hole_serves_the_next_tensor_of_its_size():
    """4 MiB at a time and a little more that stays: it grows with the small tensors, not with the large ones."""
    own = without_thread_cache(dict(os.environ))
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, env=own)
    assert int(run.stdout) < 12 << 20


def test_settings_of_a_person_stay():
    assert without_thread_cache({})["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=0"
    given = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert without_thread_cache(given)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
    given = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"}
    assert without_thread_cache(given) == given


STARTED = """
import os, sys
from dayzero.runtime.malloc import start_without_thread_cache
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], flush=True)
start_without_thread_cache()
"""


@pytest.mark.skipif(not has_glibc(), reason="glibc's allocator")
def test_a_process_starts_again_once_as_itself(tmp_path):
    (tmp_path / "script.py").write_text(STARTED)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, str(tmp_path / "script.py"), "train", "a b", "--set", "x=1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    first, second = run.stdout.splitlines()
    number = first.split()[0]
    assert first == f"{number} None ['train', 'a b', '--set', 'x=1']"
    assert second == f"{number} glibc.malloc.tcache_count=0 ['train', 'a b', '--set', 'x=1']"


def test_a_command_inside_another_process_starts_nothing(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    monkeypatch.setattr(sys, "argv", ["runtime", "train", "somewhere"])
    start_without_thread_cache()
