"""Exchanges in rounds: small ones in several all-to-alls, by lowered limits, against NumPy.

    env = {"SOK_EXCHANGE_LIMIT": "300", "SOK_BLOCK_LIMIT": "4000"}  # 2 ranks: 150 words a round

Row k of each table starts as (k + 1) / 8 in all columns. Sums of such numbers are exact.
"""

import numpy as np
import tensorflow as tf

from tests.checks import programs

DIM, RATE, ROWS = 4, 0.5, 4096


def main():
    """What this rank found, check by check."""
    import sok_like as sok

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    sok.Init(global_batch_size=2, seed=7)
    rank = sok.rank()
    return {
        "hashed": {mode: hashed(mode, rank) for mode in ("eager", "function", "loop")},
        "narrow": hashed("function", rank, "float16"),  # which holds these numbers exactly
        "dense": {f"dp_input={dp}": dense(dp, rank) for dp in (True, False)},
        "failures": failures(rank),
        "after_an_error": after_an_error(rank),
        "programs": programs.run(seed=5, steps=12),
    }


def ramp(shape, dtype=None):
    return (np.arange(shape[0], dtype=np.float32)[:, None] + 1) / 8 * np.ones(shape, np.float32)


def keys_of(rank, step):
    """Many keys of rank 0 and few of rank 1 in even steps; the other way round in odd ones."""
    many = (step + rank) % 2 == 0
    return np.random.default_rng([rank, step]).integers(0, 300, 400 if many else 5)


def oracle(steps, world_size=2):
    """The table after steps in which each key's gradient is 1 each time it occurs."""
    table = ramp([ROWS, DIM])
    for step in range(steps):
        for rank in range(world_size):
            np.subtract.at(table, keys_of(rank, step), RATE)
    return table


def hashed(mode, rank, wire_dtype=None):
    """Lookups that train; what each gave, and whether NumPy gives the same."""
    import sok_like as sok

    layer = sok.All2AllDenseEmbedding(
        None, DIM, 1, 1, dynamic_input=True, name=f"rounds_{mode}_{wire_dtype}",
        embedding_initializer=ramp, gradient_scale="sum", wire_dtype=wire_dtype,
    )  # fmt: skip
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))

    def step(keys):
        with tf.GradientTape() as tape:
            found = layer(keys)
            loss = tf.reduce_sum(found)
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return found

    def in_a_loop(keys):
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, _: (i + 1, layer(keys)),
            (0, tf.zeros([0, DIM])),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, DIM])),
        )[1]

    take = step if mode == "eager" else tf.function(step, reduce_retracing=True)
    loop = tf.function(in_a_loop, reduce_retracing=True)
    same = []
    for number in range(4):
        keys = keys_of(rank, number)
        if mode == "loop":
            same.append(bool((loop(tf.constant(keys)).numpy() == ramp([ROWS, DIM])[keys]).all()))
            continue
        same.append(bool((take(tf.constant(keys)).numpy() == oracle(number)[keys]).all()))
    return same


def dense(dp_input, rank):
    """A dense table over both ranks; each step as in `hashed`."""
    from sok_like import dist_model_parallel as dmp

    tables = [dmp.Embedding(ROWS, DIM, combiner=None), dmp.Embedding(ROWS, DIM, combiner="sum")]
    layer = dmp.DistributedEmbedding(tables, "memory_balanced", dp_input=dp_input)
    layer.set_weights([ramp([ROWS, DIM])] * 2)
    optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.SGD(RATE))

    @tf.function(reduce_retracing=True)
    def step(inputs):
        with tf.GradientTape() as tape:
            rows, sums = layer(inputs)
            loss = 2.0 * (tf.reduce_sum(rows) + tf.reduce_sum(sums))  # 2 ranks: their mean
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return rows, sums

    same, table = [], ramp([ROWS, DIM])
    for number in range(3):
        ids = np.random.default_rng(number).integers(0, 300, [2, 60, 3])
        mine = [tf.constant(ids[rank])] * 2
        if not dp_input:
            ranks = [r for r in range(2) for _ in layer.strategy.input_ids_list[r]]
            mine = [tf.constant(ids.reshape(-1, 3)) for r in ranks if r == rank]
        rows, sums = step(mine)
        expected = table[ids[rank]]
        same.append(
            bool((rows == expected).numpy().all() and (sums == expected.sum(1)).numpy().all())
        )
        np.subtract.at(table, ids.ravel(), RATE)
    return same


def failures(rank):
    """Errors of exchanges in rounds, on all ranks; each followed by a lookup that is fine."""
    import sok_like as sok

    def layer(name, **kwargs):
        return sok.All2AllDenseEmbedding(
            kwargs.pop("capacity", None), DIM, 1, 1, dynamic_input=True, name=name,
            embedding_initializer="ones", **kwargs,
        )  # fmt: skip

    def tried(call, keys):
        try:
            return float(tf.reduce_mean(call(tf.constant(keys, tf.int64))))
        except tf.errors.OpError as error:
            return f"{type(error).__name__}: {error.message}"

    def too_much(dp_input):
        """4 floats of each of 1500 or more ids, for each rank."""
        from sok_like import dist_model_parallel as dmp

        tables = [dmp.Embedding(ROWS, DIM), dmp.Embedding(ROWS, DIM)]
        dense = dmp.DistributedEmbedding(tables, dp_input=dp_input)
        ids = tf.reshape(tf.range(3000, dtype=tf.int64), [6, 500])
        return tried(lambda _: tf.concat(dense([ids] * (2 if dp_input else 1)), 0), [0])

    rows_only = layer("rounds_rows", capacity=1000, use_hashtable=False)
    full = layer("rounds_full", capacity=150)
    other = layer("rounds_other")
    many = np.arange(200)
    wrong = np.append(many, 2000) if rank == 1 else many
    pair = [rows_only, other] if rank == 0 else [other, rows_only]
    return {
        "out_of_range": [tried(rows_only, wrong), tried(rows_only, many)],
        "full": [tried(full, np.arange(400)), tried(full, many)],
        "crossed": [tried(pair[0], many), tried(pair[1], many), tried(other, many)],
        "block": [tried(other, np.arange(5000 if rank == 1 else 9)), tried(other, many)],
        "block_of_rows": [tried(other, np.arange(2500)), tried(other, many)],
        **{f"dp_input={dp}": too_much(dp) for dp in (True, False)},
    }


def after_an_error(rank):
    """Two lookups on two devices in a function; one fails on one rank in some of the steps."""
    import sok_like as sok

    rows_only, other = (
        sok.All2AllDenseEmbedding(
            capacity, DIM, 1, 1, dynamic_input=True, use_hashtable=capacity is None,
            name=f"step_{value}", embedding_initializer=tf.keras.initializers.Constant(value),
        )
        for capacity, value in ((8, 1.0), (None, 3.0))
    )  # fmt: skip
    device = tf.config.list_logical_devices("CPU")[-1]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def step(bad, good):
        with tf.device(device.name):
            bad = bad + tf.zeros_like(bad)
        return [tf.reduce_mean(rows) for rows in (rows_only(bad), other(good))]

    seen = []
    for number in range(12):
        bad = 16 if number % 3 == 1 and rank == number % 2 else number % 8
        try:
            found = step(tf.constant([bad], tf.int64), tf.constant([100 * rank + number], tf.int64))
            seen.append([float(value) for value in found])
        except tf.errors.OpError as error:
            seen.append(f"{type(error).__name__}: {error.message}")
    keys = sok.export(other.embedding_variable)[0].numpy()
    return {"seen": seen, "keys": sorted(keys.tolist())}
