"""Tables in device memory on ranks: checks of other modules on emulated devices, and some more.

Ready ranks do not run them: a process has one op library, here the emulated one.
"""

import ctypes
import os

import numpy as np
import tensorflow as tf

from tests import emulated, ready_ranks
from tests.checks import failures, groups, parity, policies
from tests.dist_model_parallel import test_hash_embedding

OF_FAILURES = ("key_out_of_range", "too_many_keys", "rows_not_multiple_of_slots", "table_full")
STEPS = 3  # of the trainings on two devices


def run(world_size):
    """Every check for `world_size` ranks; a dictionary of results by name, or `Raised`."""
    import sok_like as sok

    # Two devices, so that tables can lie on several; before TensorFlow looks for itself.
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    sok.Init(global_batch_size=12, seed=parity.SEED)
    wanted = {
        "groups.train_adagrad": lambda: groups.train("adagrad"),
        "groups.gradient_scales": groups.gradient_scales,
        "groups.sequences": groups.sequences,
        "policies.train": policies.train,
        **{f"failures.{name}": getattr(failures, name) for name in OF_FAILURES},
        "bad_row_splits": bad_row_splits,
        "two_devices": two_devices,
        "waits": waits,
        **({"launches": launches} if world_size == 2 else {}),
        "kernels": kernels,
    }
    if world_size == 2:
        if os.environ.get("SLOW"):  # hash tables beside dense ones; SokRoute places their rows
            wanted["test_hash_embedding.train_adam"] = lambda: test_hash_embedding.train("adam")
        wanted["parity.train_adam_sum"] = lambda: parity.train(
            "adam", "sum"
        )  # some without a hashtable
    results = {}
    for name, check in wanted.items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = ready_ranks.Raised(error)
    return results


def _group(variables, keys, row_splits, weights):
    from sok_like.lookup.hash_lookup import HashFeature

    a, b, c = variables
    return [
        HashFeature(a, keys, "sum", row_splits),
        HashFeature(b, keys, "mean", row_splits, weights),
        HashFeature(c, keys + 1, "sqrtn", row_splits, max_hotness=4),
        HashFeature(a, keys * 3),
    ]


def bad_row_splits():
    """Several kinds of wrong input on one rank, in the second table: the error on each rank."""
    import sok_like as sok
    from sok_like.lookup.hash_lookup import HashFeature, lookup
    from sok_like.runtime.ranks import comm

    last = comm.current().rank == comm.current().world_size - 1
    a, b = (sok.EmbeddingVariable(2 + i, name=f"split{i}") for i in range(2))
    keys = tf.range(4, dtype=tf.int64)
    good = tf.constant([0, 2, 4], tf.int64)
    told = {}
    for name, bad in {
        "decrease": [0, 5, 4],
        "end": [0, 3, 3],
        "begin": [1, 3, 4],
        "none": [],
    }.items():
        splits = tf.constant(bad, tf.int64) if last else good
        features = [HashFeature(a, keys, "sum", good), HashFeature(b, keys, "mean", splits)]
        try:
            lookup(features, training=True, name="bad_splits")
            told[name] = None
        except tf.errors.InvalidArgumentError as error:
            told[name] = error.message
    sizes = int(a.size()), int(b.size())
    features = [HashFeature(a, keys, "sum", good), HashFeature(b, keys, "mean", good)]
    found = lookup(features, training=True, name="bad_splits")
    return told, sizes, [rows.shape.as_list() for rows in found]


def two_devices():
    """The same group trained with its tables on one device and on two, eagerly and in a graph."""
    import sok_like as sok
    from sok_like.lookup.hash_lookup import lookup
    from sok_like.runtime.ranks import comm

    rank = comm.current().rank

    def batch(step):
        rng = np.random.default_rng([step, rank])
        lengths = rng.integers(0, 5, 0 if (step + rank) % 3 == 2 else 6)
        keys = rng.integers(-20, 20, lengths.sum())
        weights = rng.random(len(keys)).astype(np.float32)
        return keys, np.concatenate([[0], np.cumsum(lengths)]), weights

    def train(devices, graph):
        variables = []
        for i, (device, dim) in enumerate(zip(devices, (4, 3, 2), strict=True)):
            with tf.device(device):
                variables.append(sok.EmbeddingVariable(dim, name=f"table{i}"))
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
        optimizer.build(variables)

        def step(keys, row_splits, weights):
            with tf.GradientTape() as tape:
                features = _group(variables, keys, row_splits, weights)
                found = lookup(features, training=True, name="mixed")
                loss = tf.add_n([tf.reduce_sum((rows - 0.5) ** 2) for rows in found])
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return found

        spec = [tf.TensorSpec([None], dtype) for dtype in (tf.int64, tf.int64, tf.float32)]
        call = tf.function(step, input_signature=spec) if graph else step
        arrays = [map(tf.constant, batch(i)) for i in range(STEPS)]
        found = [[rows.numpy() for rows in call(*a)] for a in arrays]
        rows = [[t.numpy() for t in sok.export(v)] for v in variables]
        return {"found": found, "rows": rows, "devices": [v.device for v in variables]}

    mixed = ["/CPU:1", "/CPU:0", "/CPU:1"]
    return {
        "one": train(["/CPU:0"] * 3, True),
        "two_eager": train(mixed, False),
        "two_graph": train(mixed, True),
    }


def waits():
    """How often each of three warm steps of two tables waited for the device."""
    import sok_like as sok
    from sok_like.lookup.hash_lookup import HashFeature, lookup

    count = _counter("host_waits")
    tables = [sok.EmbeddingVariable(4, name=f"waits{i}", initial_capacity=10_000) for i in range(2)]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    optimizer.build(tables)
    splits = tf.constant([0, 3, 8], tf.int64)

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
    return counts[3:]


def _counter(name):
    count = getattr(ctypes.CDLL(str(emulated.LIBRARY)), f"sok_emulator_{name}")
    count.restype = ctypes.c_int64
    return count


class Echo:
    """As many ranks as asked for, each of which sends this one what this one sends to it."""

    rank = 0

    def __init__(self, world_size):
        self.world_size = world_size

    def all_to_all(self, tensor, splits, name):
        return tf.identity(tensor), tf.identity(splits)


def launches():
    """Kernels, fills and copies of a warm step: {(tables, ranks): {part of the step: number}}."""
    import sok_like as sok
    from sok_like.lookup.hash_lookup import HashFeature, lookup
    from sok_like.runtime.ranks import comm

    count, own = _counter("launches"), comm.current()

    def step(tables, optimizer, keys):
        numbers = [count()]
        with tf.GradientTape() as tape:
            features = [HashFeature(table, keys, "sum", [0, 3, 64]) for table in tables]
            found = lookup(features, training=True, name="launches")
            numbers.append(count())
            loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
        gradients = tape.gradient(loss, tables)
        numbers.append(count())
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        numbers.append(count())
        parts = ("lookup", "gradient", "update")
        return dict(zip(parts, np.diff(numbers).tolist(), strict=True))

    counts = {}
    for num_tables, world_size in [(1, 1), (26, 1), (1, 8), (26, 8), (26, 64), (26, 200)]:
        tables = [
            sok.EmbeddingVariable(8, name=f"l{world_size}_{i}", initial_capacity=10_000)
            for i in range(num_tables)
        ]
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
        optimizer.build(tables)
        comm.set_current(Echo(world_size))
        try:
            for number in range(4):
                keys = tf.range(number, number + 64, dtype=tf.int64) * 7
                counts[num_tables, world_size] = step(tables, optimizer, keys)
        finally:
            comm.set_current(own)
    return counts


def kernels():
    """For each op with a device kernel: its arguments in host memory, and its types."""
    from tensorflow.python.framework import kernels as registry
    from tensorflow.python.framework import op_def_registry

    found = {}
    for kernel in registry.get_all_registered_kernels().kernel:
        if kernel.op.startswith("Sok") and kernel.priority > 0:
            op = op_def_registry.get(kernel.op)
            kinds = {arg.name: arg.type for arg in [*op.input_arg, *op.output_arg]}
            found[kernel.op] = (sorted(kernel.host_memory_arg), kinds)
    return found
