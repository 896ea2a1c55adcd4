"""Layers of a user's own that hold tables: what is saved and loaded of them."""

import numpy as np
import tensorflow as tf

import sok_like as sok
from tests.checks import files
from tests.checks.files import X, state, tables_of

KINDS = ("weights", "model", "checkpoint")


@tf.keras.utils.register_keras_serializable("own_layers")
class Pair(tf.keras.layers.Layer):
    """Two tables, one of them with policies, and an ordinary weight between them."""

    def __init__(self, dim=4, bare=False, table=None, **kwargs):
        super().__init__(**kwargs)
        option = sok.EmbeddingVariableOption(record_statistics=True)
        made = [
            sok.EmbeddingVariable(dim, name=f"{self.name}_a") if table is None else table,
            sok.EmbeddingVariable(dim, name=f"{self.name}_b", ev_option=option),
        ]
        self.dim, self.bare = dim, bare
        self.first = made[0] if bare else made[0].as_weight()
        self.scale = self.add_weight(name="scale", shape=[dim], initializer="ones")
        # Under Keras 3 tf.train.Checkpoint finds no table in a list, and a save there raises.
        self.second = [made[1]] if bare else made[1].as_weight()

    def call(self, keys):
        tables = self.first, self.second[0] if self.bare else self.second
        both = [tf.nn.embedding_lookup(table, keys) for table in tables]
        return tf.reduce_mean(both[0] * self.scale + both[1], axis=1)

    def get_config(self):
        return {**super().get_config(), "dim": self.dim, "bare": self.bare}


def made(bare=False):
    """Tables of the user's in a layer, in one of a nested model, and shared by two layers."""
    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64")
    one = Pair(bare=bare, name="one")
    inner_keys = tf.keras.Input([2], dtype="int64")
    inner = Pair(bare=bare, name="nested")(inner_keys)
    nested = tf.keras.Model(inner_keys, tf.keras.layers.Dense(3, name="inner")(inner))
    both = tf.keras.layers.Concatenate()([one(keys), nested(keys)])
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1, name="outer")(both))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def everything(model):
    """The tables' content, and the values of all ordinary weights."""
    own = {id(table) for table in tables_of(model)}
    found = {
        f"{number} {weight.name}": np.asarray(weight)
        for number, weight in enumerate(model.weights)
        if id(getattr(weight, "_embedding_variable", weight)) not in own
    }
    return {"tables": state(model), "weights": found}


def write(model, folder, with_checkpoint=True):
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "m.keras"))
    model.save_weights(str(folder / "w.weights.h5"))
    if with_checkpoint:
        tf.train.Checkpoint(model=model).write(str(folder / "c"))


def read(kind, folder, bare=False):
    if kind == "model":
        model = tf.keras.models.load_model(str(folder / "m.keras"))
        model.compile(model.optimizer, "mse", run_eagerly=True)
        return model
    model = made(bare)
    files.fit(model, 1, 100)
    if kind == "weights":
        model.load_weights(str(folder / "w.weights.h5"))
    else:
        tf.train.Checkpoint(model=model).read(str(folder / "c")).assert_existing_objects_matched()
    return model


def write_and_go_on(folder):
    """What was written, and what the model predicts after another step."""
    model = made()
    files.fit(model, 2)
    write(model, folder)
    before = everything(model)
    files.fit(model, 1, 5)
    return before, model.predict_on_batch(X)


def read_and_go_on(kind, folder):
    model = read(kind, folder)
    after = everything(model)
    files.fit(model, 1, 5)
    return after, model.predict_on_batch(X)
