"""Files in `tests/saving/without_names/`, of version 0.1 before tables had names in files.

One and two ranks have written a checkpoint and a file of weights of `made()`. Every row of a table
is its number in the order of FEATURES and DENSE, from 1 on.
"""

import pathlib

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp

FOLDER = pathlib.Path(__file__).parent / "without_names"
FEATURES, DENSE = ("user", "item"), ("left", "right")


def made(features=FEATURES, dense=DENSE):
    """A model with a group of hash tables and a layer of dense tables of one shape."""
    keys = tf.keras.Input([2], dtype="int64")
    group = sok.GroupEmbedding(dict.fromkeys(features, 2), combiners="sum", name="feat")
    tables = [tf.keras.layers.Embedding(5, 2, name=name) for name in dense]
    whole = dmp.DistributedEmbedding(tables, name="whole")
    outputs = group(dict.fromkeys(features, keys))
    flat = [tf.keras.layers.Flatten()(each) for each in whole([keys] * len(dense))]
    return tf.keras.Model(keys, [*[outputs[f] for f in features], *flat])


def values(model, dense=DENSE):
    """The value of all rows of each table; None if it is empty."""
    found = {}
    for name, table in model.get_layer("feat").tables.items():
        rows = sok.export(table)[1].numpy()
        found[name] = float(rows[0, 0]) if len(rows) and np.ptp(rows) == 0 else None
    whole = model.get_layer("whole").get_weights(all_ranks=True)
    return found | {name: float(w[0, 0]) for name, w in zip(dense, whole, strict=True)}
