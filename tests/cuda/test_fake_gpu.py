"""Device tables under TensorFlow's own GPU runtime, placed as a program has it: without scopes.

Only over the fake GPU (tools/fake_gpu.sh), which is tested here, too.
"""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.runtime.native import devices, libraries
from sok_like.runtime.ranks import exchange_order
from tests import fake_gpu

pytestmark = pytest.mark.skipif(
    not fake_gpu.asked_for() or fake_gpu.is_real(), reason="tools/fake_gpu.sh runs these"
)

KEYS = np.array([3, 4, 3], np.int64)
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)  # of 3 and 4


@pytest.fixture(autouse=True)
def no_scopes(monkeypatch):
    monkeypatch.setattr(devices, "table_scope", contextlib.nullcontext)
    with tf.device(None):
        yield


@pytest.fixture
def table(sok):
    table = sok.EmbeddingVariable(4, name="placed", initializer="ones")
    assert table.device.endswith("GPU:0")
    sok.assign(table, KEYS[:2], ROWS)
    return table


def look_up(table):
    return lookup([HashFeature(table, tf.constant(KEYS))], training=True)[0]


def run(program):
    """What another process prints that sees the GPU, or the number of the signal that ended it."""
    head = "import ctypes, tensorflow as tf; gpu = tf.config.list_physical_devices('GPU')[0]\n"
    done = subprocess.run(
        [sys.executable, "-c", head + program],
        env=dict(os.environ, CUDA_VISIBLE_DEVICES="0"),
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else done.returncode


# ---- the fake ----


def test_the_host_cannot_touch_device_memory():
    program = """
driver, block = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(64)) == 0
"""
    assert run(program + "print(block.value > 0)") == "True"
    assert run(program + "ctypes.string_at(block.value, 8)") == -11  # SIGSEGV
    wrong_way = "driver.cuMemcpyDtoHAsync_v2(block, block, ctypes.c_size_t(8), None)"
    assert run(program + wrong_way) == -6  # SIGABRT


def test_a_kernel_of_tensorflow_does_not_go_unnoticed():
    with tf.device("/GPU:0"):
        tf.reduce_sum(tf.identity([1.0, 2.0]))
    assert any("Reduc" in name for name in fake_gpu.launched())


# ---- what a program does without a scope ----


def test_ops_follow_their_table(table):
    rows = look_up(table)
    assert rows.device.endswith("GPU:0")
    np.testing.assert_array_equal(rows, ROWS[[0, 1, 0]])


@pytest.mark.parametrize("scope", [None, "/GPU:0"])
@pytest.mark.parametrize("soft", [True, False])
def test_functions_and_their_gradients(table, scope, soft):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            tape.watch(table.handle)
            rows = look_up(table)
        gradient = tape.gradient(rows, table.handle, tf.constant(ROWS[[0, 1, 1]]))
        return rows, gradient.indices, gradient.values

    tf.config.set_soft_device_placement(soft)
    try:
        with tf.device(scope):
            rows, keys, values = step()
    finally:
        tf.config.set_soft_device_placement(True)
    np.testing.assert_array_equal(rows, ROWS[[0, 1, 0]])
    np.testing.assert_array_equal(keys, KEYS[:2])
    np.testing.assert_array_equal(values, [ROWS[0] + ROWS[1], ROWS[1]])


def test_a_table_in_host_memory_beside_it(sok, table):
    with tf.device("/CPU:0"):
        host = sok.EmbeddingVariable(4, name="host")
        sok.assign(host, KEYS[:2], -ROWS)

    @tf.function
    def both():
        return lookup([HashFeature(t, tf.constant(KEYS)) for t in (table, host)], training=True)

    on_device, on_host = both()
    np.testing.assert_array_equal(on_device, ROWS[[0, 1, 0]])
    np.testing.assert_array_equal(on_host, -ROWS[[0, 1, 0]])


def test_a_checkpoint_is_restored(sok, table, tmp_path):
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "saved"))
    other = sok.EmbeddingVariable(4, name="other")
    with tf.device("/CPU:0"):  # where it compares the numbers of ranks
        tf.train.Checkpoint(table=other).read(path).assert_consumed()
    np.testing.assert_array_equal(look_up(other), ROWS[[0, 1, 0]])


def test_a_saved_model_names_no_gpu(sok, table, tmp_path):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def __call__(self, keys):
            return lookup([HashFeature(self.table, keys)], training=False)[0]

    sok.export_saved_model(Model(), str(tmp_path))
    saved = saved_model_pb2.SavedModel.FromString((tmp_path / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    assert nodes and not any("GPU" in node.device for node in nodes)
    with tf.device("/CPU:0"):  # stock ops
        (rows,) = (
            tf.saved_model.load(str(tmp_path))
            .signatures["serving_default"](keys=tf.constant(KEYS))
            .values()
        )
    np.testing.assert_array_equal(rows, ROWS[[0, 1, 0]])


def test_a_message_is_stamped_beside_its_constant(sok):
    """TensorFlow keeps a function's constants from step to step, and joins equal ones."""
    with tf.device("/GPU:0"):
        message = tf.constant(np.zeros(8, np.int64))
        stamped = libraries.ops().sok_stamp_call(
            message=message, splits=[8], lookup="stamped", stage=exchange_order._KEYS
        )
    assert stamped.device.endswith("GPU:0")
    assert stamped.numpy().any() and not message.numpy().any()


# ---- memory ----


@pytest.mark.parametrize(
    "settings, free",
    [
        ("", 0.11),  # TensorFlow leaves 1,800 MiB of a device's memory, here of 16 GiB
        ("tf.config.experimental.set_memory_growth(gpu, True)", 1.0),
        (
            "limit = tf.config.LogicalDeviceConfiguration(memory_limit=4096)\n"
            "tf.config.set_logical_device_configuration(gpu, [limit])",
            0.75,
        ),
    ],
)
def test_what_tensorflow_leaves_of_device_memory(monkeypatch, settings, free):
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH")
    program = f"""
{settings}
with tf.device("/GPU:0"):
    tf.identity([1.0])
free, total = ctypes.c_size_t(), ctypes.c_size_t()
ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
print(free.value / total.value)
"""
    assert float(run(program)) == pytest.approx(free, abs=0.01)
