"""A training with policies on ranks, also of tables in device memory."""

import numpy as np
import tensorflow as tf

import sok_like as sok
from tests.checks.parity import ranks_of

BATCH, STEPS, HOTNESS = 9, 24, 2
KEYS = np.array([*range(40), -1, -2, 2**63 - 1, -(2**63)], np.int64)


def batches():
    """int64 keys `[BATCH, HOTNESS]` per step, for each of two features of one table."""
    rng = np.random.default_rng(8)
    odds = 1 / np.arange(1, len(KEYS) + 1)
    for _ in range(STEPS):
        yield rng.choice(KEYS, [2, BATCH, HOTNESS], p=odds / odds.sum())


def option():
    return sok.EmbeddingVariableOption(
        filter_option=sok.CounterFilter(3),
        evict_option=[sok.GlobalStepEvict(4), sok.L2WeightEvict(1e-4)],
        init_option=sok.InitializerOption(default_value_no_permission=0.5),
        evicted_buffer_size=100,
    )


def train(folder):
    """Trains on this rank's samples and dumps; counts over ranks per step, and own keys."""
    rank, world_size = sok.rank(), sok.size()
    table = sok.get_embedding_variable("policies", 3, ev_option=option())
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    optimizer.build([table])
    statistics = []
    for number, batch in enumerate(batches()):
        mine = ranks_of(number, BATCH, world_size) == rank
        with tf.GradientTape() as tape:
            keys = [tf.RaggedTensor.from_tensor(tf.constant(keys[mine])) for keys in batch]
            rows = sok.group_embedding_lookup_sparse([table, table], keys, ["sum", "mean"])
            loss = tf.add_n([tf.reduce_sum((r - 0.3) ** 2) for r in rows]) / BATCH
        optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))
        if number % 6 == 5:
            table.evict()
        statistics.append(tuple(table.statistics(all_ranks=True)))
    keys, rows = (tensor.numpy() for tensor in sok.export(table))
    sok.Saver().dump_to_file(table, folder)
    return {
        "statistics": statistics,
        "total": table.total_count(all_ranks=True).numpy().tolist(),
        "keys": keys,
        "rows": rows,
        "known": known(table),
        "evicted": table.pop_evicted().keys.numpy(),
    }


def known(table):
    return np.stack([field.numpy().astype(np.int64) for field in table.key_statistics(KEYS)], 1)
