"""`core`: `_core`, or the same over tables on a device (tests/memories.py).

What takes `_core` itself is of the host alone: threads, 16-bit rows, memory, order of routed keys.
"""

import os
import random

import pytest

from sok_like import _core
from tests import memories

FEW = 3  # cases of a test under the emulator, which is slow; SLOW=1 takes all


@pytest.fixture(params=["host", *memories.DEVICES])
def core(request):
    return _core if request.param == "host" else memories.Core(memories.bindings(request))


@pytest.fixture(autouse=True)
def two_threads():
    _core.set_num_threads(2)


def pytest_collection_modifyitems(config, items):
    """Under the emulator a few cases of each test run, always the same."""
    cases = {}
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("core") == "emulated":
            cases.setdefault((item.path, item.originalname), []).append(item)
    left_out = set()
    for (_, name), some in cases.items():
        left_out |= {*some} - {*random.Random(name).sample(some, min(FEW, len(some)))}
    if left_out and not os.environ.get("SLOW"):
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
