"""`cuda`: the bindings of the device tables, on a device or under the emulator (tests/memories.py).

Most tests of device tables are those of tests/core, which run in both memories. Here is what only a
device has. What needs hardware is marked `gpu`.
"""

import importlib.util

import pytest

from tests import memories

# A machine with a device need not have TensorFlow, and this file imports it.
collect_ignore = [] if importlib.util.find_spec("tensorflow") else ["test_ops_ranks.py"]


@pytest.fixture(params=memories.DEVICES)
def cuda(request):
    return memories.bindings(request)
