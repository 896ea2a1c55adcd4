"""`cuda`: the bindings of the device tables, on a device or under the emulator.

The emulator (cpp/tests/emulator) is built with the C++ tests and runs the same kernels on the CPU,
which finds wrong results but says nothing about hardware. What needs hardware is marked `gpu`.
"""

import importlib.util
import os
import pathlib
import random
import sys

import pytest

from sok_like import _core
from tests.emulated import BUILD

# A machine with a device need not have TensorFlow, and this file imports it.
collect_ignore = [] if importlib.util.find_spec("tensorflow") else ["test_ops_ranks.py"]


FEW = 5  # cases of a test under the emulator; SLOW=1 takes all


def pytest_collection_modifyitems(config, items):
    """A device takes all cases of a test; the emulator, which is slow, a few, always the same."""
    cases = {}
    for item in items:
        here = pathlib.Path(__file__).parent in item.path.parents and hasattr(item, "callspec")
        if here and item.callspec.params.get("cuda") == "emulated":
            cases.setdefault((item.path, item.originalname), []).append(item)
    kept = {item for (_, name), of in cases.items() for item in _some(name, of)}
    left_out = {item for of in cases.values() for item in of} - kept
    if left_out and not os.environ.get("SLOW"):
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _some(name, cases):
    return random.Random(name).sample(cases, min(FEW, len(cases)))


def emulated():
    """The module `_cuda_emulated`, or None where the C++ tests were not built."""
    name = "_cuda_emulated"
    if name in sys.modules:
        return sys.modules[name]
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    path = BUILD / f"{name}{suffix}"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


@pytest.fixture(params=["emulated", pytest.param("device", marks=pytest.mark.gpu)])
def cuda(request):
    if request.param == "emulated":
        slow = request.node.get_closest_marker("slow") is not None
        if slow and "slow" not in request.config.option.markexpr:
            pytest.skip("takes minutes under the emulator: pytest -m slow")
        module = emulated()
        if module is None:
            pytest.skip("the emulator comes with the C++ tests (SOK_WITH_TESTS=ON)")
        return module
    if _core.cuda_device_count() == 0:
        # If all tests are skipped, nothing has been shown to work.
        required = os.environ.get("SOK_TEST_GPU") == "required"
        (pytest.fail if required else pytest.skip)(
            "needs a library built with CUDA (make cuda) and a device"
        )
    return _core
