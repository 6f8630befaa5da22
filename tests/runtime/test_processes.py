"""What a process of a run does to itself."""

import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from dayzero.runtime.processes import keep_freed_memory
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
    """A step takes 184 MiB, 47,104 pages. A process that gives them back faults again in every step, for 17,000 of them
    or more (what glibc has learned to keep varies); one that keeps them no more, once there is a hole for each size."""
    run = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True)
    first, later = map(int, run.stdout.split())
    assert first > 47_000
    assert later < 1_000 if how == "keeps" else later > 12 * 10_000
