"""Where a device is required, a missing one is a failure and not a skip."""

import os
import subprocess
import sys

import pytest

from sok_like import _core
from tests.conftest import may_have_device


@pytest.mark.skipif(_core.cuda_device_count() > 0, reason="there is a device")
@pytest.mark.parametrize("required", [False, True])
def test_a_device_may_be_required(required):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run(
        [*command, "tests/cuda/test_table.py", "-k", "32_bit_keys"],
        env={**os.environ, "SOK_TEST_GPU": "required" if required else ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == int(required), done.stdout
    assert ("1 error" if required else "1 skipped") in done.stdout


@pytest.mark.parametrize("name", ["nvidia0", "nvidia3", "dxg"])
def test_any_device_counts(tmp_path, name):
    (tmp_path / "nvidiactl").touch()
    assert not may_have_device(tmp_path)
    (tmp_path / name).touch()
    assert may_have_device(tmp_path)
