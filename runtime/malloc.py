"""The allocator of glibc in a run on a CPU: what a step frees serves the next one, which needs the same again."""

import ctypes
import os
import sys
from pathlib import Path

# Of mallopt(3): the largest block of a fast bin, how much free memory at the heap's end is given back, and how many
# blocks may be mapped apart from the heap.
_MXFAST, _TRIM_THRESHOLD, _MMAP_MAX = 1, -1, -4
_TUNABLES, _NO_THREAD_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
_ACCELERATORS = ("nvidiactl", "davinci_manager", "kfd")


def keep_freed_memory() -> None:
    """Lets this process keep what it frees: gradients and activations of hundreds of MiB come again in every step.

    glibc maps a large block anew each time and unmaps it when it is freed; the kernel then clears every page again,
    which takes up to a fifth of a step on a CPU. Nothing happens where there is no glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MXFAST, 0)


def without_thread_cache(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a process that joins every small block it frees with its free neighbours at once.

    Tensors are aligned, and for each one the allocator frees the few bytes before and behind it. Kept apart, in fast
    bins or in a thread's cache, these leave a hole that is too small for the next tensor of the same size: a quarter of
    the memory of a step was such holes. Only what glibc reads as a process starts turns the cache off.
    """
    given = environment.get(_TUNABLES, "")
    if "tcache_count" in given:
        return environment
    return {**environment, _TUNABLES: f"{given}:{_NO_THREAD_CACHE}" if given else _NO_THREAD_CACHE}


def start_without_thread_cache() -> None:
    """Starts this process again, by itself, in such an environment: where it has glibc, no accelerator, and was started
    for the very command that it now runs. Its number stays the same."""
    has_accelerator = any(Path("/dev", name).exists() for name in _ACCELERATORS)
    own = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] == sys.argv[1:]
    environment = without_thread_cache(dict(os.environ))
    if has_glibc() and own and not has_accelerator and environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):
        return False
