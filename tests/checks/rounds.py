"""Exchanges in rounds: small ones in several all-to-alls, by lowered limits, against NumPy.

    env = {"SOK_EXCHANGE_LIMIT": "300", "SOK_BLOCK_LIMIT": "4000"}  # 2 ranks: 150 words a round

Row k of each table starts as (k + 1) / 8 in all columns. Sums of such numbers are exact.
"""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from tests.checks import programs
from tests.training import layer_of, train_step

DIM, RATE, ROWS = 4, 0.5, 4096


def main():
    """All checks of this rank; the counts of a random program."""
    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    sok.Init(global_batch_size=2, seed=7)
    for mode in ("eager", "function", "loop"):
        hashed(mode, sok.rank())
    hashed("function", sok.rank(), "float16")  # which holds these numbers exactly
    for dp_input in (True, False):
        dense(dp_input, sok.rank())
    failures(sok.rank())
    after_an_error(sok.rank())
    return programs.run(seed=5, steps=12)


def ramp(shape, dtype=None):
    return (np.arange(shape[0], dtype=np.float32)[:, None] + 1) / 8 * np.ones(shape, np.float32)


def keys_of(rank, step):
    """Many keys of rank 0 and few of rank 1 in even steps; the other way round in odd ones."""
    many = (step + rank) % 2 == 0
    return np.random.default_rng([rank, step]).integers(0, 300, 400 if many else 5)


def hashed(mode, rank, wire_dtype=None):
    """Lookups that train: each key's gradient is 1 each time it occurs on any rank."""
    layer = layer_of(
        f"rounds_{mode}_{wire_dtype}", ramp, DIM, gradient_scale="sum", wire_dtype=wire_dtype
    )
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))

    def step(keys):
        found = []

        def loss_of():
            found.append(layer(keys))
            return tf.reduce_sum(found[0])

        train_step(optimizer, layer.trainable_variables, loss_of)
        return found[0]

    def in_a_loop(keys):
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, _: (i + 1, layer(keys)),
            (0, tf.zeros([0, DIM])),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, DIM])),
        )[1]

    take = in_a_loop if mode == "loop" else step
    take = take if mode == "eager" else tf.function(take, reduce_retracing=True)
    table = ramp([ROWS, DIM])
    for number in range(4):
        keys = keys_of(rank, number)
        np.testing.assert_array_equal(take(tf.constant(keys)), table[keys])
        for sender in range(2 if mode != "loop" else 0):
            np.subtract.at(table, keys_of(sender, number), RATE)


def dense(dp_input, rank):
    """A dense table over both ranks; each step as in `hashed`."""
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

    table = ramp([ROWS, DIM])
    for number in range(3):
        ids = np.random.default_rng(number).integers(0, 300, [2, 60, 3])
        mine = [tf.constant(ids[rank])] * 2
        if not dp_input:
            mine = [tf.constant(ids.reshape(-1, 3)) for _ in layer.strategy.input_ids_list[rank]]
        rows, sums = step(mine)
        expected = table[ids[rank]]
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(sums, expected.sum(1))
        np.subtract.at(table, ids.ravel(), RATE)


def failures(rank):
    """Errors of exchanges in rounds, on all ranks; each followed by a lookup that is fine."""
    errors = tf.errors
    rows_only = layer_of("rounds_rows", 1.0, DIM, 1000, use_hashtable=False)
    full, other = layer_of("rounds_full", 1.0, DIM, 150), layer_of("rounds_other", 1.0, DIM)
    many = np.arange(200)
    wrong, block = (np.append(many, 2000), np.arange(5000)) if rank == 1 else (many, np.arange(9))
    pair = [rows_only, other] if rank == 0 else [other, rows_only]
    too_large, of_rank_1 = "at most 4000 words", "(?s)rank 1: the message from one rank.*"
    for layer, keys, error, words, after in (
        (rows_only, wrong, errors.InvalidArgumentError, "(?s)rank 1: .*2000", rows_only),
        (full, np.arange(400), errors.ResourceExhaustedError, "'rounds_full'", full),
        (pair[0], many, errors.FailedPreconditionError, "'rounds_other", None),
        (pair[1], many, errors.FailedPreconditionError, "'rounds_other", other),
        (other, block, errors.InvalidArgumentError, of_rank_1 + too_large, other),
        (other, np.arange(2500), errors.ResourceExhaustedError, too_large, other),
    ):
        with pytest.raises(error, match=words):
            layer(tf.constant(keys))
        assert after is None or (after(tf.constant(many)).numpy() == 1.0).all()
    for dp_input in (True, False):  # 4 floats of each of 1500 or more ids, for each rank
        tables = [dmp.Embedding(ROWS, DIM), dmp.Embedding(ROWS, DIM)]
        dense = dmp.DistributedEmbedding(tables, dp_input=dp_input)
        ids = tf.reshape(tf.range(3000, dtype=tf.int64), [6, 500])
        with pytest.raises(errors.OpError, match=too_large):
            dense([ids] * (2 if dp_input else 1))


def after_an_error(rank):
    """Two lookups on two devices in a function; one fails on one rank in some of the steps."""
    rows_only = layer_of("step_1", 1.0, DIM, 8, use_hashtable=False)
    other = layer_of("step_3", 3.0, DIM)
    device = tf.config.list_logical_devices("CPU")[-1]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def step(bad, good):
        with tf.device(device.name):
            bad = bad + tf.zeros_like(bad)
        return [tf.reduce_mean(rows) for rows in (rows_only(bad), other(good))]

    for number in range(12):
        wrong, culprit = number % 3 == 1, number % 2
        bad = tf.constant([16 if wrong and rank == culprit else number % 8], tf.int64)
        good = tf.constant([100 * rank + number], tf.int64)
        if wrong:
            with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {culprit}: "):
                step(bad, good)
        else:
            assert [float(value) for value in step(bad, good)] == [1.0, 3.0]
    # No key of a step that failed, and each key of the others on its owner.
    asked = [100 * r + number for r in range(2) for number in range(12) if number % 3 != 1]
    keys = sok.export(other.embedding_variable)[0].numpy().tolist()
    assert sorted(keys) == sorted(key for key in asked if key % 2 == rank)
