"""Layers of several tables whose files are read by layers with other features."""

import numpy as np
import pytest
import tensorflow as tf

KINDS = ("weights", "model", "checkpoint")
KEYS = np.array([[1, 2], [3, 1], [2, 5], [7, 7]])


def finds_by_name(layer, kind, folder):
    """All of the ranks' tables are found in files of a model with other features."""
    before = written(layer, ["user", "item"], folder, all_ranks=True)
    made = model(layer, ["item", "user"])
    load(kind, made, folder)
    assert contents(made, all_ranks=True) == before


def sizes_of_some(kind, folder):
    """One rank reads; a feature is new."""
    made = model("group", ["new", "item", "user"])
    load(kind, made, folder, partial=True)
    tables = _tables(made)
    return [int(tables[feature].size()) for feature in ("new", "user", "item")]


class Own(tf.keras.layers.Layer):
    """Tables of the user's in a layer: as attributes, in a list or in a dictionary."""

    def __init__(self, features, how="attributes", **kwargs):
        import sok_like as sok

        super().__init__(**kwargs)
        made = {f: sok.EmbeddingVariable(2, name=f"{self.name}/{f}").as_weight() for f in features}
        self.tables = _Opaque({f: getattr(t, "_embedding_variable", t) for f, t in made.items()})
        if how == "attributes":
            for number, table in enumerate(made.values()):
                setattr(self, f"held_{number}", table)
        else:
            self.held = list(made.values()) if how == "list" else made

    def call(self, inputs):

        tables = self.tables.by_name
        return {f: tf.reduce_sum(tf.gather(tables[f], inputs[f]), 1) for f in inputs}


class _Opaque:
    def __init__(self, by_name):
        self.by_name = by_name


def _group(features, **kwargs):
    import sok_like as sok

    return sok.GroupEmbedding(dict.fromkeys(features, 2), combiners="sum", **kwargs)


def _columns(features, **kwargs):
    import sok_like as sok

    fc = sok.feature_column
    columns = [
        fc.embedding_column(fc.categorical_column_with_embedding(f, tf.int64), 2, combiner="sum")
        for f in features
    ]
    return sok.feature_column.DenseFeatures(columns, **kwargs)


class Distributed(tf.keras.layers.Layer):
    """Dense and hash tables of dist_model_parallel, by name."""

    def __init__(self, features, hashed, **kwargs):
        import sok_like as sok
        import sok_like.dist_model_parallel as dmp

        super().__init__(**kwargs)
        made = {f: sok.HashEmbedding(2, combiner="sum", name=f) if hashed
                else tf.keras.layers.Embedding(20, 2, name=f) for f in features}  # fmt: skip
        self.features, self.hashed = features, hashed
        self.inner = dmp.DistributedEmbedding(list(made.values()))
        self.inner.build()

    def call(self, inputs):
        outputs = self.inner([inputs[f] for f in self.features])
        outputs = outputs if self.hashed else [tf.reduce_sum(each, 1) for each in outputs]
        return dict(zip(self.features, outputs, strict=True))


LAYERS = {
    "dense": lambda features, **kwargs: Distributed(features, False, **kwargs),
    "hashed": lambda features, **kwargs: Distributed(features, True, **kwargs),
    "group": _group,
    "own": Own,
    "listed": lambda features, **kwargs: Own(features, "list", **kwargs),
    "in_dictionary": lambda features, **kwargs: Own(features, "dictionary", **kwargs),
    "columns": _columns,
}


def model(layer, features):
    """A model over one layer of these features, in their order."""
    import sok_like as sok

    tf.keras.utils.set_random_seed(3)
    inputs = {f: tf.keras.Input([2], dtype="int64", name=f) for f in features}
    outputs = LAYERS[layer](features)(inputs)
    outputs = [outputs[f] for f in features] if isinstance(outputs, dict) else [outputs]
    together = tf.keras.layers.Concatenate()(outputs) if len(outputs) > 1 else outputs[0]
    made = tf.keras.Model(inputs, tf.keras.layers.Lambda(_sum)(together))
    made.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05)), "mse", jit_compile=False)
    if layer == "dense":
        made.optimizer.build(made.trainable_variables)
    return made


def _sum(rows):
    return tf.reduce_sum(rows, axis=1, keepdims=True)


def written(layer, features, folder, all_ranks=False):
    """Trains a model and writes it as each kind; returns its contents."""
    import sok_like as sok

    made = model(layer, features)
    for number, table in enumerate(_tables(made).values()):
        if layer != "dense":
            sok.assign(table, np.arange(9 + number), np.full([9 + number, 2], 1.0 + number))
    # A key of the other feature tells the two apart even if both have the same keys.
    x = {f: KEYS + number for number, f in enumerate(sorted(features))}
    made.fit(x, np.ones([len(KEYS), 1], np.float32), batch_size=len(KEYS), epochs=2, verbose=0)
    made.save_weights(str(folder / "w.weights.h5"))
    made.save(str(folder / "m.keras"))
    tf.train.Checkpoint(model=made).write(str(folder / "c"))
    before = contents(made, all_ranks)
    assert len(set(before.values())) == len(features)
    return before


def load(kind, made, folder, partial=False):
    if kind == "checkpoint":
        status = tf.train.Checkpoint(model=made).read(str(folder / "c"))
        status.expect_partial() if partial else status.assert_consumed()
    else:
        name = {"weights": "w.weights.h5", "model": "m.keras"}[kind]
        made.load_weights(str(folder / name), skip_mismatch=partial)


def refused(kind, expected, received):
    """A load raises; Keras' files with both lists."""
    if kind == "checkpoint":
        return pytest.raises(AssertionError)
    names = [".*".join(map(repr, each)) for each in (expected, sorted(received))]
    return pytest.raises(ValueError, match=".*Received: .*".join(names))


def _tables(made):
    layer = next(each for each in made.layers if hasattr(each, "tables") or hasattr(each, "inner"))
    if hasattr(layer, "inner"):
        if layer.hashed:
            return {
                f: h.table for f, h in zip(layer.features, layer.inner.hash_layers, strict=True)
            }
        return dict.fromkeys(layer.features)
    tables = layer.tables if isinstance(layer.tables, dict) else layer.tables.by_name
    return {name.removesuffix("_embedding"): table for name, table in tables.items()}


def contents(made, all_ranks=False):
    """Each table's content as bytes, None if it is as new."""
    found = {}
    for name, table in sorted(_tables(made).items()):
        if table is None:
            continue
        fields = {key: np.asarray(value) for key, value in table.snapshot().fields().items()}
        parts = [fields[k].tobytes() for k in ("keys", "rows", "slot_rows", "optimizer_step")]
        found[name] = (*parts, str(fields["slot_names"])) if len(fields["keys"]) else None
    return found or _dense(made, all_ranks)


def _dense(made, all_ranks):
    layer = next(each for each in made.layers if hasattr(each, "inner"))
    state = layer.inner.get_optimizer_state(made.optimizer, all_ranks)["tables"]
    parts = zip(layer.features, layer.inner.get_weights(all_ranks), state, strict=True)
    return {f: (whole.tobytes(), *(slots[name].tobytes() for name in sorted(slots)))
            for f, whole, slots in parts}  # fmt: skip
