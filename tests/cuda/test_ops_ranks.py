"""Tables in emulated device memory on ranks, which are threads, and what a step costs there.

tests/cuda/test_ops.py runs these in a process whose op library has the emulated kernels, beside
tests of ranks that are those of tables in host memory.
"""

import ctypes

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels as registry
from tensorflow.python.framework import op_def_registry

import sok_like as sok
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.runtime.ranks import comm
from tests import emulated, fake_gpu

pytestmark = pytest.mark.skipif(
    not emulated.asked_for() or fake_gpu.asked_for(), reason="tests/cuda/test_ops.py runs these"
)
STEPS = 3  # of the trainings on two devices


# ---- tables on two devices ----


def features_of(variables, keys, row_splits, weights):
    a, b, c = variables
    return [
        HashFeature(a, keys, "sum", row_splits),
        HashFeature(b, keys, "mean", row_splits, weights),
        HashFeature(c, keys + 1, "sqrtn", row_splits, max_hotness=4),
        HashFeature(a, keys * 3),
    ]


def batch(step, rank):
    rng = np.random.default_rng([step, rank])
    lengths = rng.integers(0, 5, 0 if (step + rank) % 3 == 2 else 6)
    keys = rng.integers(-20, 20, lengths.sum())
    weights = rng.random(len(keys)).astype(np.float32)
    return keys, np.concatenate([[0], np.cumsum(lengths)]), weights


def train(sok, devices, graph):
    """Embeddings of each step, then keys and rows of each table."""
    variables = []
    for i, (device, dim) in enumerate(zip(devices, (4, 3, 2), strict=True)):
        with tf.device(device):
            variables.append(sok.EmbeddingVariable(dim, name=f"table{i}"))
    assert [variable.device[-1] for variable in variables] == [device[-1] for device in devices]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    optimizer.build(variables)

    def step(keys, row_splits, weights):
        with tf.GradientTape() as tape:
            features = features_of(variables, keys, row_splits, weights)
            found = lookup(features, training=True, name="mixed")
            loss = tf.add_n([tf.reduce_sum((rows - 0.5) ** 2) for rows in found])
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return found

    spec = [tf.TensorSpec([None], dtype) for dtype in (tf.int64, tf.int64, tf.float32)]
    call = tf.function(step, input_signature=spec) if graph else step
    rank = comm.current().rank
    found = [call(*map(tf.constant, batch(i, rank))) for i in range(STEPS)]
    exported = [sok.export(variable) for variable in variables]
    return [array.numpy() for arrays in (*found, *exported) for array in arrays]


def two_devices():
    mixed = ["/CPU:1", "/CPU:0", "/CPU:1"]
    right = train(sok, ["/CPU:0"] * 3, graph=True)
    for graph in (False, True):
        for ours, expected in zip(train(sok, mixed, graph), right, strict=True):
            np.testing.assert_array_equal(ours, expected)
    # A lookup on ranks moved something, and not on every rank at each step.
    assert sum(len(keys) for keys in right[-6::2]) > 0


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tables_on_two_devices_are_trained_as_on_one(on_processes, world_size):
    # Not on threads: TensorFlow 2.21 mixes up inputs that it copies to another device for eager ops
    # of several threads, also those of its own SplitV.
    on_processes(world_size, two_devices)


# ---- tables without a hashtable ----


def test_rows_by_their_numbers(sok, on_threads):
    """Looked up, and trained by the gradients of both ranks."""

    def check():
        table = sok.EmbeddingVariable(2, name="direct", use_hashtable=False, capacity=6)
        own = np.arange(6) * 2 + comm.current().rank
        sok.assign(table, own, np.stack([own, -own], axis=1))
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
        keys = np.array([0, 5, 11, 5]) if comm.current().rank == 0 else np.array([5, 2])
        with tf.GradientTape() as tape:
            (found,) = lookup([HashFeature(table, tf.constant(keys))], training=True, name="direct")
            loss = tf.reduce_sum(found)
        np.testing.assert_array_equal(found, np.stack([keys, -keys], axis=1))
        optimizer.apply_gradients([(tape.gradient(loss, table.handle), table)])
        occurrences = np.bincount([0, 5, 11, 5, 5, 2], minlength=12)[own, None]
        exported, rows = sok.export(table)
        np.testing.assert_array_equal(exported, own)
        np.testing.assert_array_equal(rows, np.stack([own, -own], axis=1) - 0.5 * occurrences)

    on_threads(2, check)


# ---- faults ----


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "bad, words",
    [
        ([0, 5, 4], "row_splits must not decrease. Received: 5 before 4 at sample 1"),
        ([0, 3, 3], "must begin with 0 and end with num_keys = 4. Received: 0 and 3"),
        ([1, 3, 4], "must begin with 0 and end with num_keys = 4. Received: 1 and 4"),
        ([], "row_splits must hold at least one element"),
    ],
)
def test_bad_row_splits_are_told_to_all_ranks(sok, on_threads, world_size, bad, words):
    """Of the second table, on the last rank."""

    def check():
        a, b = (sok.EmbeddingVariable(2 + i, name=f"split{i}") for i in range(2))
        keys, good = tf.range(4, dtype=tf.int64), tf.constant([0, 2, 4], tf.int64)
        is_last = comm.current().rank == world_size - 1
        splits = tf.constant(bad, tf.int64) if is_last else good
        features = [HashFeature(a, keys, "sum", good), HashFeature(b, keys, "mean", splits)]
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            lookup(features, training=True, name="bad_splits")
        assert f"{words} (table 'split1')" in error.value.message
        assert world_size == 1 or f"rank {world_size - 1}: " in error.value.message
        assert int(a.size()) == int(b.size()) == 0  # nothing of a bad batch is in any table
        features[1] = HashFeature(b, keys, "mean", good)
        found = lookup(features, training=True, name="bad_splits")
        assert [rows.shape.as_list() for rows in found] == [[2, 2], [2, 3]]

    on_threads(world_size, check)


# ---- what a step costs ----


class Echo:
    """As many ranks as asked for, each of which sends this one what this one sends to it."""

    rank = 0

    def __init__(self, world_size):
        self.world_size = world_size

    def all_to_all(self, tensor, splits, name):
        return tf.identity(tensor), tf.identity(splits)


@pytest.fixture
def ranks():
    """A function that puts this process among so many ranks."""
    own = comm.current()
    yield lambda world_size: comm.set_current(Echo(world_size) if world_size > 1 else own)
    comm.set_current(own)


def counter(name):
    count = getattr(ctypes.CDLL(str(emulated.LIBRARY)), f"sok_emulator_{name}")
    count.restype = ctypes.c_int64
    return count


def make_tables(sok, number, dim):
    tables = [
        sok.EmbeddingVariable(dim, name=f"table{i}", initial_capacity=10_000) for i in range(number)
    ]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    optimizer.build(tables)
    return tables, optimizer


@pytest.mark.parametrize("world_size, waits", [(1, 1), (2, 6)])
def test_a_step_waits_for_the_device_where_it_must(sok, ranks, world_size, waits):
    """Or where what ranks told is checked: of keys, rows and gradients."""
    tables, optimizer = make_tables(sok, 2, 4)
    ranks(world_size)
    splits, count = tf.constant([0, 3, 8], tf.int64), counter("host_waits")

    @tf.function(input_signature=[tf.TensorSpec([8], tf.int64)])
    def step(keys):
        with tf.GradientTape() as tape:
            features = [HashFeature(table, keys, "sum", splits) for table in tables]
            found = lookup(features, training=True, name="waits")
            loss = tf.add_n([tf.reduce_sum(rows**2) for rows in found])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    counts = []
    for number in range(6):
        before = count()
        step(tf.range(number, number + 8, dtype=tf.int64))
        counts.append(count() - before)
    assert counts[3:] == [waits] * 3  # of warm steps


def test_a_step_makes_at_most_40_launches(sok, ranks):
    """Kernels, fills and copies, with one table and with 26, whatever the number of ranks."""
    count, counts = counter("launches"), {}
    for num_tables, world_size in [(26, 1), (1, 8), (26, 8), (26, 200)]:
        tables, optimizer = make_tables(sok, num_tables, 8)
        ranks(world_size)
        for number in range(4):
            keys, before = tf.range(number, number + 64, dtype=tf.int64) * 7, count()
            with tf.GradientTape() as tape:
                features = [HashFeature(table, keys, "sum", [0, 3, 64]) for table in tables]
                found = lookup(features, training=True, name="launches")
                loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
            optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
            counts[num_tables, world_size] = count() - before
        ranks(1)
    assert max(counts.values()) <= 40
    assert counts[26, 8] == counts[26, 200]


# ---- what the emulator cannot see: where arguments are ----


def test_handles_texts_and_lengths_are_in_host_memory():
    kernels = {}  # of each op with a device kernel: its arguments in host memory, and all types
    for kernel in registry.get_all_registered_kernels().kernel:
        if kernel.op.startswith("Sok") and kernel.priority > 0:
            op = op_def_registry.get(kernel.op)
            kinds = {arg.name: arg.type for arg in [*op.input_arg, *op.output_arg]}
            kernels[kernel.op] = (sorted(kernel.host_memory_arg), kinds)
    assert {
        *("SokRoute", "SokGatherRows", "SokMergeGrads", "SokCombine", "SokCombineGrad"),
        *("SokLookup", "SokLookupGrad", "SokApplyGradients", "SokTableHandle"),
    } <= set(kernels)
    for op, (in_host_memory, kinds) in kernels.items():
        for name, kind in kinds.items():
            if kind in (tf.resource.as_datatype_enum, tf.string.as_datatype_enum):
                assert name in in_host_memory, (op, name)
    # What Horovod reads and writes there.
    for op, names in {
        "SokRoute": ["counts", "problems", "splits"],
        "SokGatherRows": ["handles", "heads", "row_splits", "splits"],
        "SokMergeGrads": ["grad_splits", "heads", "splits"],
        "SokCombine": ["call", "counts", "splits"],
        "SokCombineGrad": ["call", "counts"],
    }.items():
        assert kernels[op][0] == names
