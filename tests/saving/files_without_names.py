"""Files in `tests/saving/without_names/`, of version 0.1 before tables had names in files:

python -m sok_like.run -np N tests/saving/files_without_names.py FOLDER      (on 1 and on 2 ranks)
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

FOLDER = pathlib.Path(__file__).parent / "without_names"
FEATURES, DENSE = ("user", "item"), ("left", "right")


def made(features=FEATURES, dense=DENSE):
    """A model with a group of hash tables and a layer of dense tables of one shape."""
    import sok_like as sok
    import sok_like.dist_model_parallel as dmp

    keys = tf.keras.Input([2], dtype="int64")
    group = sok.GroupEmbedding(dict.fromkeys(features, 2), combiners="sum", name="feat")
    tables = [tf.keras.layers.Embedding(5, 2, name=name) for name in dense]
    whole = dmp.DistributedEmbedding(tables, name="whole")
    outputs = group(dict.fromkeys(features, keys))
    flat = [tf.keras.layers.Flatten()(each) for each in whole([keys] * len(dense))]
    return tf.keras.Model(keys, [*[outputs[f] for f in features], *flat])


def fill(model, dense=DENSE):
    """Every row of a table is its number in the order of FEATURES and DENSE, from 1 on."""
    import sok_like as sok

    for number, name in enumerate(FEATURES):
        sok.assign(
            model.get_layer("feat").tables[name], np.arange(4), np.full([4, 2], 1.0 + number)
        )
    model.get_layer("whole").set_weights([np.full([5, 2], 3.0 + DENSE.index(n)) for n in dense])


def values(model, dense=DENSE):
    """The value of all rows of each table; None if it is empty."""
    import sok_like as sok

    found = {}
    for name, table in model.get_layer("feat").tables.items():
        rows = sok.export(table)[1].numpy()
        found[name] = float(rows[0, 0]) if len(rows) and np.ptp(rows) == 0 else None
    whole = model.get_layer("whole").get_weights(all_ranks=True)
    return found | {name: float(w[0, 0]) for name, w in zip(dense, whole, strict=True)}


def write(folder):
    import sok_like as sok

    sok.Init(global_batch_size=12, seed=7)
    model = made()
    fill(model)
    tf.train.Checkpoint(model=model).write(f"{folder}/c{sok.size()}")
    model.save_weights(f"{folder}/w{sok.size()}.weights.h5")


if __name__ == "__main__":
    write(sys.argv[1])
