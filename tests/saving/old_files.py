"""Files in `tests/saving/version_0_1/`, which version 0.1 has written on two ranks:

python -m sok_like.run -np 2 tests/saving/old_files.py FOLDER      (run it with that version)
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

FOLDER = pathlib.Path(__file__).parent / "version_0_1"
ROWS, DIM = (20, 7), 4


def wholes(start):
    """The values of the dense tables."""
    return [start + np.arange(n * DIM, dtype=np.float32).reshape(n, DIM) for n in ROWS]


def made(start):
    """A model with dense tables, a hash table and a kernel; all values follow from `start`."""
    import sok_like as sok
    import sok_like.dist_model_parallel as dmp

    keys = [tf.keras.Input([2], dtype="int64") for _ in range(3)]
    tables = [tf.keras.layers.Embedding(n, DIM) for n in ROWS]
    dense = dmp.DistributedEmbedding(tables, name="old_dense")
    hashed = sok.DistributedEmbedding("sum", None, DIM, slot_num=2, max_nnz=1, name="old_hashed")
    flat = [tf.keras.layers.Flatten()(each) for each in (*dense(keys[:2]), hashed(keys[2]))]
    last = tf.keras.layers.Dense(1, name="old_last")
    model = tf.keras.Model(keys, last(tf.keras.layers.Concatenate()(flat)))
    dense.set_weights(wholes(start))
    last.kernel.assign(tf.fill(last.kernel.shape, float(start)))
    sok.assign(hashed.table, np.arange(9), tf.fill([9, DIM], float(start)))
    return model


def state(model):
    """Dense tables, keys and rows of this rank, and the kernel."""
    import sok_like as sok

    keys, rows = sok.export(model.get_layer("old_hashed").table)
    dense = model.get_layer("old_dense").get_weights(all_ranks=True)
    return [*dense, keys.numpy(), rows.numpy(), np.asarray(model.get_layer("old_last").kernel)]


def own(start):
    """A variable of which each rank has rows of its own."""
    from sok_like import sok2

    rank = tf.constant(_rank(), tf.float32)
    variable = sok2.Variable(np.zeros([6, 2], np.float32), name="old_own")
    variable.assign(tf.fill(variable.shape, start + rank))
    return variable


def _rank():
    import sok_like as sok

    return sok.rank()


def write(folder):
    """Writes a checkpoint of each kind, and a file of weights."""
    import sok_like as sok

    sok.Init(global_batch_size=12, seed=7)
    model = made(1.0)
    tf.train.Checkpoint(model=model).write(f"{folder}/model")
    tf.train.Checkpoint(own=own(1.0)).write(f"{folder}/own")
    model.save_weights(f"{folder}/model.weights.h5")


if __name__ == "__main__":
    write(sys.argv[1])
