"""Where tables are made, and where the ops around them go, as far as that shows without a GPU.

The fixture `gpu` simulates a GPU: the package then decides as if there were one; TensorFlow,
which has none, puts everything on the CPU.
"""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.runtime.native import devices
from sok_like.runtime.ranks import exchange_order
from tests.training import train_step

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(devices, "_tensorflow_may_use_gpu", lambda: True)
    monkeypatch.setattr(devices, "_runtime_problem", lambda: "")


@pytest.fixture
def old_driver(monkeypatch):
    """TensorFlow's CUDA works with the driver, that of this package does not."""

    class Core:
        @staticmethod
        def cuda_device_count():
            return 0

        @staticmethod
        def cuda_device_info():
            raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(devices, "_tensorflow_may_use_gpu", lambda: True)
    monkeypatch.setattr(devices.libraries, "core", lambda: Core)
    devices._runtime_problem.cache_clear()
    yield
    devices._runtime_problem.cache_clear()


def _made_in_graph(**kwargs):
    import sok_like

    with tf.Graph().as_default():
        return sok_like.EmbeddingVariable(2, **kwargs).handle.device


def test_no_device_is_named_where_there_is_no_choice(sok):
    assert _made_in_graph() == ""


def test_tables_of_all_kinds_go_where_tensorflow_puts_them(sok, gpu):
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(filter_freq=2))
    for kwargs in ({}, {"use_hashtable": False, "capacity": 3}, {"ev_option": option}):
        assert _made_in_graph(**kwargs) == ""
        with tf.Graph().as_default(), tf.device("/GPU:1"):
            assert sok.EmbeddingVariable(2, **kwargs).device == "/device:GPU:1"
            with tf.device("/CPU:0"):
                assert sok.EmbeddingVariable(2, **kwargs).device.endswith("/device:CPU:0")


def devices_of_ops(sok, place):
    """Of a lookup and its gradient in a graph, by kind of op; the table is made in `place`."""
    with tf.Graph().as_default() as graph:
        with tf.device(place):
            variable = sok.EmbeddingVariable(2)
        feature = HashFeature(variable, tf.constant([1, 2], tf.int64))
        (rows,) = lookup([feature], training=True)
        tf.gradients(rows, variable.handle)
        return {op.type: op.device for op in graph.get_operations() if op.type.startswith("Sok")}


def test_ops_of_a_lookup_stay_beside_their_table(sok, gpu):
    """With the gradient; ops that take handles go with them by themselves."""
    of_sok = devices_of_ops(sok, "/GPU:1")
    assert of_sok["SokLookup"] == of_sok["SokLookupGrad"] == "/device:GPU:1"


def test_copies_are_made_beside_the_original(sok, gpu):
    import copy

    with tf.device("/CPU:0"):
        variable = sok.EmbeddingVariable(2)
    sok.assign(variable, [4, 5], np.ones([2, 2]))
    copied = copy.deepcopy(variable)
    assert copied.device == variable.device == CPU
    np.testing.assert_array_equal(copied.numpy().rows, variable.numpy().rows)


def test_a_group_with_tables_in_both_memories_is_trained(sok, gpu):
    """One kept on the host and one that a GPU might hold; against each by itself."""
    keys, splits = tf.constant([1, 2, 1], tf.int64), tf.constant([0, 2, 3], tf.int64)

    def train(together):
        a = sok.EmbeddingVariable(2, name="a")
        with tf.device("/CPU:0"):
            b = sok.EmbeddingVariable(3, name="b")
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))

        def loss_of():
            features = [HashFeature(v, keys, "sum", splits) for v in (a, b, a)]
            groups = [features] if together else [[f] for f in features]
            found = [rows for group in groups for rows in lookup(group, training=True)]
            return tf.add_n([tf.reduce_sum(rows**2) for rows in found]), found

        found = [rows for _ in range(2) for rows in train_step(optimizer, [a, b], loss_of)[1]]
        return [*found, a.numpy().rows, b.numpy().rows]

    for rows, expected in zip(train(True), train(False), strict=True):
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_a_session_with_tables_on_two_devices(sok):
    """Every op that takes a handle, initializers among them, runs where the table is."""
    keys = np.array([3, 4, 3], np.int64)
    v1 = tf.compat.v1

    def train(places):
        with tf.Graph().as_default():
            init = sok.Init(global_batch_size=12, seed=7)
            tables = []
            for name, place in zip("ab", places, strict=True):
                with tf.device(place):
                    tables.append(sok.EmbeddingVariable(2, name=name))
            optimizer = sok.OptimizerWrapper(v1.train.AdagradOptimizer(0.1))
            found = lookup(
                [HashFeature(table, tf.constant(keys)) for table in tables], training=True
            )
            loss = tf.add_n([tf.reduce_sum(rows**2) for rows in found])
            step = optimizer.minimize(loss, var_list=tables)
            reads = [[table.size(), *sok.export(table)] for table in tables]
            config = v1.ConfigProto(device_count={"CPU": 2})
            with v1.Session(config=config) as session:
                session.run(init)
                session.run(v1.global_variables_initializer())
                for _ in range(2):
                    session.run(step)
                return session.run(reads)

    one, two = train(["/CPU:0", "/CPU:0"]), train(["/CPU:1", "/CPU:0"])
    for ours, right in zip(two, one, strict=True):
        assert ours[0] == 2
        for array, expected in zip(ours, right, strict=True):
            np.testing.assert_array_equal(array, expected)


ON_DEVICES = (
    *("SokRoute", "SokGatherRows", "SokMergeGrads", "SokCombine", "SokCombineGrad"),
    *("SokLookup", "SokLookupGrad", "SokApplyGradients", "SokFindRows"),
    *("SokTableHandle", "SokTableSize", "SokTableStats", "SokTableClear", "SokTableErase"),
    *("SokTableFind", "SokTableAssign", "SokTableExport", "SokTableImport"),
)
ON_MESSAGES = ("SokStampCall", "SokTakePart", "SokCheckMessage", "SokJoinParts")


@pytest.mark.parametrize("op", ON_DEVICES + ON_MESSAGES)
def test_every_op_has_a_kernel_for_each_device(sok, op):
    """With a library built with CUDA (tools/build_cuda.sh --install), whether or not there is one.

    An op that lacked one would draw its table, and with it every other op, to the CPU.
    """
    assert "CPU" in devices.kernel_devices(op)
    # Without CUDA the kernels that both memories share are registered and never used: the table's
    # handle has no other kernel than the CPU's.
    if devices._library_has_gpu_kernels():
        assert "GPU" in devices.kernel_devices(op)


@pytest.mark.filterwarnings("ignore:TensorFlow sees a GPU:RuntimeWarning")
def test_an_old_driver_keeps_lookups_and_gradients_in_host_memory(sok, old_driver):
    """TensorFlow would place an op without a handle, SokLookupGrad, on the GPU."""
    of_sok = devices_of_ops(sok, None)
    for op in ("SokTableHandle", "SokLookup", "SokLookupGrad"):
        assert of_sok[op].endswith("/device:CPU:0"), op


class TwoRanks:
    """Both ranks send what this one sends."""

    world_size, rank = 2, 0

    def all_to_all(self, values, splits, name):
        return tf.identity(values), tf.identity(splits)


@pytest.mark.parametrize("in_function", [False, True])
def test_an_old_driver_keeps_messages_in_host_memory(old_driver, in_function):
    """The ops on messages have GPU kernels and no table to follow; loops over rounds, too."""

    def exchange():
        return exchange_order.exchange_notes(tf.constant([3], tf.int64), TwoRanks(), "notes")

    if in_function:
        graph = tf.function(exchange).get_concrete_function().graph
    else:
        with tf.Graph().as_default() as graph:
            exchange()
    graph_def = graph.as_graph_def()
    nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
    places = {(node.op, node.device[-5:]) for node in nodes if node.op in ON_MESSAGES}
    assert places == {(op, "CPU:0") for op in ON_MESSAGES}


def test_a_driver_that_is_too_old_keeps_tables_in_host_memory(sok, old_driver):
    with pytest.warns(RuntimeWarning, match="driver version is insufficient"):
        assert _made_in_graph().endswith("/device:CPU:0")
    assert not devices.gpu_in_use()


def test_a_driver_that_will_do_names_no_device(sok, old_driver, monkeypatch):
    monkeypatch.setattr(devices.libraries.core(), "cuda_device_count", lambda: 1)
    assert _made_in_graph() == ""
    assert devices.gpu_in_use()
