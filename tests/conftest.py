"""Settings for every test: quiet TensorFlow, and no `gpu` tests where there is no device."""

import os
import pathlib

import pytest

# Before anything imports TensorFlow, which reads it once.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_collection_modifyitems(items):
    # A look at the device file, because asking TensorFlow takes seconds and memory of the device.
    if pathlib.Path("/dev/nvidia0").exists():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
