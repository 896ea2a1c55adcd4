"""TensorFlow's ops over tables in device memory, in one process: emulated, and on a device.

The tests are those of tables in host memory, run once more. Under the emulator the process's op
library has the kernels of device tables in the place of the CPU's (tests/emulated.py); beside a
TensorFlow that sees a GPU, tables go there by themselves. Expected values are the same: what the
oracles of those tests say.
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from sok_like import _core
from tests import emulated, forks
from tests.emulated import may_have_device

# What is measured of the process, which under the emulator holds a device's memory as well, and
# deltas, which are of tables in host memory.
ABSENT = ["dies_with_its_variable", "(smaller_table_keeps and delta)", "full_disk"]

# Files, and how many tests they have at least.
SUITES = {
    "tests/table/test_variable.py tests/test_session.py tests/saving/test_saver.py": 30,
    "tests/test_training.py tests/embeddings": 120,
    "tests/optimizers": 90,
    "tests/table/test_policies.py tests/group_embedding/test_lookup_sparse.py": 30,
}
# Of these, what calls kernels in other ways than the rest; the suites whole are marked `slow`.
KERNELS = (
    "tests/table/test_variable.py tests/table/test_policies.py "
    "tests/group_embedding/test_lookup_sparse.py "
    "tests/embeddings/test_all2all_dense_embedding.py "
    "tests/optimizers/test_wrapper.py tests/optimizers/test_nonfinite.py"
)
# Tests on ranks, which are threads: of group lookups, records of keys, and faults.
RANKS = (
    "tests/cuda/test_ops_ranks.py "
    "tests/group_embedding/test_ranks.py::test_gradient_scales "
    "tests/group_embedding/test_ranks.py::test_training[2-adam] "
    "tests/table/test_policies_ranks.py::test_the_same_state_on_any_number_of_ranks "
    "tests/test_failures.py::test_every_rank_gets_the_message_and_can_go_on"
)
# The same for longer: all layers, and hash tables beside dense ones, whose rows SokRoute places.
LONG_RANKS = (
    "tests/test_parity.py::test_training[3-adam-sum-odd] "
    "tests/dist_model_parallel/test_layer.py::test_training[1-hashed-adagrad-False-optimizer] "
    "tests/dist_model_parallel/test_layer.py::test_training[3-hashed-adam-True-wrapper] "
    "tests/dist_model_parallel/test_layer.py::test_training[4-hashed-momentum-False-tape] "
    "tests/dist_model_parallel/test_hash_embedding.py::test_training_goes_on_from_weights_and_state"
)
OF_KERAS = ["test_fit", "weights_file", "uninterrupted"]  # the same kernels, under more of Keras


# Exits with 7 if TensorFlow or the op library cannot use a device.
ASK = """
import sys
from sok_like.runtime.native import devices
sys.exit(0 if devices.gpu_in_use() else 7)
"""


def run_suite(files, at_least, absent=(), **environment):
    absent = [f"not {word}" for word in [*ABSENT, *absent]]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not ranks", "-k", " and ".join(absent)]
    environment = {**os.environ, **environment}
    done = forks.run("-m", "pytest", *options, *files.split(), cwd=forks.ROOT, env=environment)
    output = done.stdout[-5000:] + done.stderr[-2000:]
    assert done.returncode == 0, output
    # As many as there are, and not skipped.
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= at_least, output


@pytest.mark.skipif(not emulated.LIBRARY.exists(), reason="the emulator comes with the C++ tests")
@pytest.mark.parametrize(
    "files, at_least, absent",
    [
        (f"{KERNELS} {RANKS}", 150, OF_KERAS),
        pytest.param(LONG_RANKS, 5, (), marks=pytest.mark.slow),
        *(pytest.param(*suite, (), marks=pytest.mark.slow) for suite in SUITES.items()),
    ],
)
def test_suite(files, at_least, absent):
    # Of the whole suites, tests on ranks are left out: some of their tables are not for devices.
    ranks = {} if files in SUITES else {"SOK_TEST_RANKS": "1"}
    run_suite(files, at_least, absent, SOK_TEST_OPS="emulated", **ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("files, at_least", SUITES.items())
def test_suite_on_a_device(files, at_least):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    answer = forks.run("-c", ASK)
    if answer.returncode == 7:
        pytest.skip("needs a TensorFlow that sees the device, and an op library built with CUDA")
    assert answer.returncode == 0, answer.stderr[-2000:]
    run_suite(files, at_least)


@pytest.mark.skipif(may_have_device(), reason="there may be a device")
def test_without_a_device_the_answer_is_no():
    answer = forks.run("-c", ASK)
    assert answer.returncode == 7, answer.stderr[-2000:]


@pytest.mark.parametrize("path", sorted({*" ".join([*SUITES, KERNELS]).split()}))
def test_what_a_device_is_to_run_is_there(path):
    assert (forks.ROOT / path).exists()


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
