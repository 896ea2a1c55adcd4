"""Freed memory stays with the process after `sok.Init`; what the user has set is left alone."""

import os
import subprocess
import sys

import pytest

import sok_like as sok
from sok_like.runtime.native import freed_memory

# Page faults of a block of 100 MiB that is taken again. glibc alone maps it anew each time.
FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(100 << 20)
    ctypes.memset(block, 1, 100 << 20)
    libc.free(block)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
PAGES = (100 << 20) // 4096


def faults_of_process(**environment):
    program = "from sok_like.runtime.native import freed_memory\nfreed_memory.keep()\n"
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "SOK_K"))
    }
    return int(
        subprocess.run(
            [sys.executable, "-c", program + FAULTS + "print(faults)"],
            capture_output=True,
            text=True,
            check=True,
            env={**clean, **environment},
        ).stdout
    )


def test_freed_memory_stays():
    assert faults_of_process() < PAGES / 100


@pytest.mark.parametrize(
    "environment",
    [
        {"SOK_KEEP_MEMORY": "0"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_users_choice_is_left_alone(environment):
    assert faults_of_process(**environment) > PAGES * 0.9


def test_the_choice_must_be_0_or_1(monkeypatch):
    monkeypatch.setenv("SOK_KEEP_MEMORY", "false")
    with pytest.raises(ValueError, match="must be 0 or 1.*Received.*'false'"):
        freed_memory.keep()


def test_init_keeps_freed_memory(monkeypatch):
    calls = []
    monkeypatch.setattr(freed_memory, "keep", lambda: calls.append(1))
    sok.Init(global_batch_size=64, seed=7)
    assert calls == [1]


def test_other_libraries_of_c_have_no_limits(monkeypatch):
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: object())
    freed_memory.keep()
