"""tools/check_gpu.sh, rehearsed without a device, and the table that it makes of what was said."""

import os
import re
import subprocess
import sys

import pytest

from tests.emulated import BUILD
from tests.forks import ROOT
from tests.memories import emulated
from tools import gpu_report


def check_gpu(out, *steps, **environment):
    return subprocess.run(
        [ROOT / "tools/check_gpu.sh", *steps],
        env={**os.environ, "REHEARSE": "1", "OUT": str(out), "PYTHON": sys.executable}
        | {"SOK_BUILD": str(BUILD)}
        | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.skipif(emulated() is None, reason="the emulator comes with the C++ tests")
def test_steps_that_have_passed_are_not_run_again(tmp_path):
    first = check_gpu(tmp_path, "info", "build", "smoke")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "== smoke" in first.stdout and "| smoke | passed |" in first.stdout
    assert "| test | not run |" in first.stdout
    assert (tmp_path / "report.md").read_text() in first.stdout
    again = check_gpu(tmp_path, TOTAL="1")
    assert again.returncode == 1
    for step in ("info", "build", "smoke"):
        assert f"== {step} has passed" in again.stdout
    assert "== bench: the time is up" in again.stdout


# What the script calls on a machine with a device. The sanitizer runs the command behind its
# options; Python does not find TensorFlow, and says of the device what the script wants to hear.
STUBS = {
    "nvidia-smi": "echo '|   0  NVIDIA H100 80GB HBM3          On  | 00:0 |'",
    "nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.1'",
    "compute-sanitizer": """
        while [[ $1 == --* ]]; do
          case $1 in
            --tool | --track-stream-ordered-races | --error-exitcode | --target-processes) ;;
            *) echo "no such option: $1" && exit 2 ;;
          esac
          shift 2
        done
        exec "$@" """,
    "python": f"""
        case "$*" in
          *cuda_device_count*) echo 1 && exit ;;
          *cuda_device_info*) exit ;;
        esac
        export PYTHONPATH={ROOT}/tools/without_tensorflow:$PYTHONPATH
        exec {sys.executable} "$@" """,
}


@pytest.mark.slow
def test_every_step_finds_its_tests_without_tensorflow(tmp_path):
    """Not rehearsed: the commands of a machine with a device, which here collect and do not run."""
    for name, script in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    steps = "info smoke test bench memcheck ops racecheck initcheck synccheck slow".split()
    done = check_gpu(
        tmp_path / "out",
        *steps,
        REHEARSE="",
        PYTHON=str(tmp_path / "python"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        PYTEST_ADDOPTS="--collect-only",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NVIDIA H100 80GB HBM3; nvcc 13.0" in done.stdout
    found = re.findall(r"^=* ?(\d+)/\d+ tests collected", done.stdout, re.MULTILINE)
    test, memcheck, ops, racecheck, initcheck, synccheck, slow = map(int, found)
    assert test > 600 and memcheck > 150 and ops == 4 and slow == 2
    assert racecheck == initcheck == synccheck == memcheck


def test_limits_fit_into_the_time():
    listed = subprocess.run(
        [ROOT / "tools/check_gpu.sh", "list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    limits = {line.split()[0]: int(line.split()[1]) for line in listed}
    assert list(limits)[:4] == ["info", "build", "smoke", "test"]
    assert max(limits.values()) <= 600 and sum(limits.values()) <= 45 * 60


def test_an_unknown_step_is_refused(tmp_path):
    done = check_gpu(tmp_path, "smoke", "smok")
    assert done.returncode == 2 and "Received: smok" in done.stderr and "==" not in done.stdout


TESTS_OF_C = "75% tests passed, 1 tests failed out of 4"
DEVICE, COMPILER = "NVIDIA H100 80GB HBM3", "Cuda compilation tools, release 12.4, V12.4.131"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("....\n683 passed, 12 skipped in 75.92s (0:01:15)", "683 passed, 12 skipped"),
        (TESTS_OF_C, TESTS_OF_C),
        ("100% tests passed out of 12", "100% tests passed out of 12"),
        ("=== 2 failed, 7 passed in 3.1s ===", "2 failed, 7 passed"),
        ("1 passed in 2.00s\n== ERROR SUMMARY: 3 errors", "1 passed; 3 errors of the sanitizer"),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors)", "1 hazards"),
        (f"|   0  {DEVICE}          On  | 00:0 |", DEVICE),
        (COMPILER, "nvcc 12.4"),
        ("RuntimeError: no device", "RuntimeError: no device"),
    ],
)
def test_what_a_log_says(log, said):
    assert gpu_report.findings(f"{log}\n") == said


def test_figures_become_a_table():
    figures = [{"name": "find dim 32", "seconds": 0.00123456, "share": 0.5}]
    assert gpu_report.figures_table(figures) == [
        "| name | seconds | share |",
        "|---|---|---|",
        "| find dim 32 | 0.001235 | 0.5 |",
    ]
