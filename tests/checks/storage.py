"""Tables with rows on disk on ranks, beside one in memory."""

import numpy as np
import tensorflow as tf

from tests import disk

DIM, MEMORY = 32, 64 * 1024


def checks(world_size):
    return {"train": train} if world_size == 2 else {}


def train():
    """Keys and rows of this rank's shard of both tables, figures of the one on disk, file names."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    with disk.folder() as folder:
        storage = sok.StorageOption("DRAM_SSDHASH", folder, [MEMORY])
        exports = []
        for option in (None, sok.EmbeddingVariableOption(storage_option=storage)):
            table = sok.EmbeddingVariable(DIM, name="storage", ev_option=option)
            optimizer, rng = sok.optimizers.Adam(0.01), np.random.default_rng(comm.current().rank)
            for _ in range(12):
                keys = tf.constant(rng.integers(0, 5000, 400))
                with tf.GradientTape() as tape:
                    rows = tf.nn.embedding_lookup(table, keys)
                    loss = tf.reduce_sum(rows * tf.range(1.0, 1.0 + DIM))
                optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            exports.append([part.numpy() for part in sok.export(table)])
        names = [path.name for path in folder.iterdir()]
        return exports, table.stats()._asdict(), names
