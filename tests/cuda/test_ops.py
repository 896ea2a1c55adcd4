"""TensorFlow's ops over tables in device memory, in one process, under the emulator.

The tests are those of tables in host memory, run once more in a process whose op library has the
kernels of device tables in the place of the CPU's (tests/emulated.py). Expected values are the
same: what the oracles of those tests say.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import emulated

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not emulated.LIBRARY.exists(), reason="the emulator comes with the C++ tests"
)

# What is measured of the process, which under the emulator holds a device's memory as well.
ABSENT = ["dies_with_its_variable"]

SUITES = {
    "tests/test_variable.py tests/test_session.py tests/test_checkpoint.py": 40,
    "tests/test_training.py tests/embeddings": 120,
    "tests/optimizers": 90,
    "tests/test_policies.py tests/group_embedding/test_lookup_sparse.py": 40,
}


@pytest.mark.parametrize("files", SUITES)
def test_suite(files):
    absent = [f"not {word}" for word in ABSENT]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files.split()]
    done = subprocess.run(
        [*command, "-m", "not ranks", "-k", " and ".join(absent)],
        cwd=ROOT,
        env={**os.environ, "SOK_TEST_OPS": "emulated"},
        capture_output=True,
        text=True,
    )
    output = done.stdout[-5000:] + done.stderr[-2000:]
    assert done.returncode == 0, output
    # As many as there are, and not skipped.
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= SUITES[files], output
