"""`cuda`: the bindings of the device tables, on a device or under the emulator (tests/memories.py).

Most tests of device tables are those of tests/core, which run in both memories. Here is what only a
device has. What needs hardware is marked `gpu`.
"""

import importlib.util

import pytest

from tests import memories

# A machine with a device need not have TensorFlow, and these files import it.
if importlib.util.find_spec("tensorflow") is None:
    collect_ignore = ["test_fake_gpu.py", "test_ops_ranks.py"]


@pytest.fixture(params=memories.DEVICES)
def cuda(request):
    return memories.bindings(request)
