"""A file's tables go to the tables of their names, whatever the order."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from tests.checks.files import KINDS, write
from tests.training import content

pytestmark = pytest.mark.keras
KEYS = np.array([[1, 2], [3, 1], [2, 5], [7, 7]])


# ---- layers of several tables ----


class Own(tf.keras.layers.Layer):
    """Tables of the user's in a layer: as attributes, in a list or in a dictionary."""

    def __init__(self, features, how="attributes"):
        super().__init__()
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


def _columns(features):
    fc = sok.feature_column
    columns = [
        fc.embedding_column(fc.categorical_column_with_embedding(f, tf.int64), 2, combiner="sum")
        for f in features
    ]
    return sok.feature_column.DenseFeatures(columns)


class Distributed(tf.keras.layers.Layer):
    """Dense and hash tables of dist_model_parallel, by name."""

    def __init__(self, features, hashed):
        super().__init__()
        self.features, self.hashed = features, hashed
        if hashed:
            made = [sok.HashEmbedding(2, combiner="sum", name=f) for f in features]
        else:
            made = [tf.keras.layers.Embedding(20, 2, name=f) for f in features]
        self.inner = dmp.DistributedEmbedding(made)
        self.inner.build()
        tables = [h.table for h in self.inner.hash_layers] if hashed else [None] * len(features)
        self.tables = _Opaque(dict(zip(features, tables, strict=True)))

    def call(self, inputs):
        outputs = self.inner([inputs[f] for f in self.features])
        outputs = outputs if self.hashed else [tf.reduce_sum(each, 1) for each in outputs]
        return dict(zip(self.features, outputs, strict=True))


LAYERS = {
    "dense": functools.partial(Distributed, hashed=False),
    "hashed": functools.partial(Distributed, hashed=True),
    "group": lambda features: sok.GroupEmbedding(dict.fromkeys(features, 2), combiners="sum"),
    "own": Own,
    "listed": functools.partial(Own, how="list"),
    "in_dictionary": functools.partial(Own, how="dictionary"),
    "columns": _columns,
}


def model(layer, features):
    """A model over one layer of these features, in their order."""
    tf.keras.utils.set_random_seed(3)
    inputs = {f: tf.keras.Input([2], dtype="int64", name=f) for f in features}
    outputs = LAYERS[layer](features)(inputs)
    outputs = [outputs[f] for f in features] if isinstance(outputs, dict) else [outputs]
    together = tf.keras.layers.Concatenate()(outputs) if len(outputs) > 1 else outputs[0]
    made = tf.keras.Model(inputs, tf.keras.layers.Lambda(_sum)(together))
    made.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05)), "mse", run_eagerly=True)
    if layer == "dense":
        made.optimizer.build(made.trainable_variables)
    return made


def _sum(rows):
    return tf.reduce_sum(rows, axis=1, keepdims=True)


def written(layer, features, folder, all_ranks=False):
    """Trains a model and writes it as each kind; returns its contents."""
    made = model(layer, features)
    for number, table in enumerate(_tables(made).values()):
        if layer != "dense":
            sok.assign(table, np.arange(9 + number), np.full([9 + number, 2], 1.0 + number))
    # A key of the other feature tells the two apart even if both have the same keys.
    x = {f: KEYS + number for number, f in enumerate(sorted(features))}
    for _ in range(2):
        made.train_on_batch(x, np.ones([len(KEYS), 1], np.float32))
    write(made, folder)
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


def loaded(kind, layer, features, folder, **options):
    made = model(layer, features)
    load(kind, made, folder, **options)
    return contents(made)


def refused(kind, expected, received):
    """A load raises; Keras' files with both lists."""
    if kind == "checkpoint":
        return pytest.raises(AssertionError)
    names = [".*".join(map(repr, each)) for each in (expected, sorted(received))]
    return pytest.raises(ValueError, match=".*Received: .*".join(names))


def _tables(made):
    layer = next(each for each in made.layers if hasattr(each, "tables"))
    tables = layer.tables if isinstance(layer.tables, dict) else layer.tables.by_name
    return {name.removesuffix("_embedding"): table for name, table in tables.items()}


def contents(made, all_ranks=False):
    """Each table's content as bytes, None if it is as new."""
    found = {}
    for name, table in sorted(_tables(made).items()):
        if table is None:
            continue
        fields = content(table)
        parts = [fields[k].tobytes() for k in ("keys", "rows", "slot_rows", "optimizer_step")]
        found[name] = (*parts, str(fields["slot_names"])) if len(fields["keys"]) else None
    return found or _dense(made, all_ranks)


def _dense(made, all_ranks):
    layer = next(each for each in made.layers if hasattr(each, "inner"))
    state = layer.inner.get_optimizer_state(made.optimizer, all_ranks)["tables"]
    parts = zip(layer.features, layer.inner.get_weights(all_ranks), state, strict=True)
    return {f: (whole.tobytes(), *(slots[name].tobytes() for name in sorted(slots)))
            for f, whole, slots in parts}  # fmt: skip


# ---- tests ----

BOTH = ["item", "user"]  # which are written; in files, too, they have this order


@pytest.mark.parametrize(
    "layer, names",
    [*((layer, BOTH) for layer in LAYERS), ("group", ["7", "a.b"]), ("dense", ["7", "a.b"])],
)
def test_swapped_tables_get_their_own_content(sok, tmp_path, layer, names):
    before = written(layer, names, tmp_path)
    for kind in KINDS:
        assert loaded(kind, layer, names[::-1], tmp_path) == before


@pytest.mark.parametrize("layer", ["group", "own", "dense"])
def test_other_tables_are_named_and_start_empty(sok, tmp_path, layer):
    before = written(layer, BOTH, tmp_path)
    # More features, fewer, and another one.
    for features in (["new", "item", "user"], ["item"], ["item", "who"]):
        new = contents(model(layer, features))
        known = {name: before.get(name, new[name]) for name in features}
        for kind in KINDS:
            with refused(kind, features, BOTH):
                loaded(kind, layer, features, tmp_path)
            with pytest.warns(UserWarning) as told:
                assert loaded(kind, layer, features, tmp_path, partial=True) == known
            text = next(str(w.message) for w in told if "Received: " in str(w.message))
            expected, received = text.split("Received: ")
            assert all(repr(name) in expected for name in features)
            assert all(repr(name) in received for name in BOTH)


@pytest.mark.parametrize("layer", ["group", "own", "dense", "hashed"])
def test_a_renamed_table(sok, tmp_path, layer):
    before = written(layer, BOTH, tmp_path)
    for kind in KINDS:
        with sok.renamed_tables({"user": "who"}):
            found = loaded(kind, layer, ["item", "who"], tmp_path)
        assert found == {"item": before["item"], "who": before["user"]}
        with sok.renamed_tables({"user": "item", "item": "user"}):  # which change places
            found = loaded(kind, layer, BOTH, tmp_path)
        assert found == {"item": before["user"], "user": before["item"]}
        with pytest.raises(ValueError, match="'nobody'"), sok.renamed_tables({"nobody": "user"}):
            loaded(kind, layer, BOTH, tmp_path)


@pytest.mark.parametrize("names", [["user"], "user", {"user": 1}, {1: "user"}, None])
def test_renames_must_be_a_dictionary_of_names(sok, names):
    with pytest.raises(TypeError, match="`names` must be a dictionary.*Received: names="):
        with sok.renamed_tables(names):
            pass


def test_only_a_table_of_another_width_is_skipped(sok, tmp_path):
    before = written("group", BOTH, tmp_path)
    keys = {f: tf.keras.Input([2], dtype="int64", name=f) for f in before}
    layer = sok.GroupEmbedding({"item": 2, "user": 3}, combiners="sum")
    wider = tf.keras.Model(keys, layer(keys))
    with pytest.warns(UserWarning, match="'.*/user' has rows of 3 floats"):
        load("weights", wider, tmp_path, partial=True)
    assert contents(wider) == {**before, "user": None}


def test_tables_without_a_name_are_matched_by_their_order_if_they_are_as_many(sok, tmp_path):
    def unnamed(number, names=(None, None, None)):
        tf.keras.utils.set_random_seed(3)
        layer = sok.dist_model_parallel.DistributedEmbedding(
            [tf.keras.layers.Embedding(5, 2, name=name) for name in names[:number]]
        )
        keys = [tf.keras.Input([2], dtype="int64") for _ in range(number)]
        return tf.keras.Model(keys, layer(keys)), layer

    model, layer = unnamed(2)
    layer.set_weights([np.full([5, 2], 1.0), np.full([5, 2], 2.0)])
    model.save_weights(tmp_path / "w.weights.h5")
    other, again = unnamed(2)  # Keras has given its embeddings other names
    other.load_weights(tmp_path / "w.weights.h5")
    assert [whole[0, 0] for whole in again.get_weights()] == [1.0, 2.0]
    with pytest.raises(ValueError, match="unnamed"):
        unnamed(3)[0].load_weights(tmp_path / "w.weights.h5")
    named, again = unnamed(2, ("left", "right"))
    with pytest.warns(UserWarning, match="no names of tables.*in their order.*'left', 'right'"):
        named.load_weights(tmp_path / "w.weights.h5")
    assert [whole[0, 0] for whole in again.get_weights()] == [1.0, 2.0]


def test_a_dump_is_restored_under_another_name(sok, tmp_path):
    old, new = (sok.EmbeddingVariable(2, name=name) for name in ("old", "new"))
    sok.assign(old, [1, 2], np.ones([2, 2]))
    saver = sok.Saver()
    saver.dump(old, tmp_path)
    with pytest.raises(RuntimeError, match="new"):
        saver.restore(new, tmp_path)
    with sok.renamed_tables({"old": "new"}):
        saver.restore(new, tmp_path)
    assert sok.export(new)[0].numpy().tolist() == [1, 2]
    with pytest.raises(ValueError, match="'older'"), sok.renamed_tables({"older": "elder"}):
        saver.restore(old, tmp_path)
    with pytest.raises(RuntimeError):  # the chain is that of `old`
        saver.dump(new, tmp_path, since="last")


def test_tables_of_a_session_are_found_by_name_or_by_the_savers_keys(sok, tmp_path):
    v1 = tf.compat.v1

    def rows_after(features, variables, scope=contextlib.nullcontext):
        with tf.Graph().as_default(), v1.Session() as session:
            tables = {name: sok.EmbeddingVariable(2, name=name) for name in features}
            ids = tf.SparseTensor([[0, 0]], tf.constant([1], tf.int64), [1, 1])
            group = sok.group_embedding_lookup_sparse([*tables.values()], [ids] * 2, ["sum"] * 2)
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver(variables and variables(tables))
            if not (tmp_path / "c.index").exists():
                for number, table in enumerate(tables.values()):
                    session.run(sok.assign(table, [1], [[number, number]]))
                saver.save(session, str(tmp_path / "c"))
            else:
                with scope():
                    saver.restore(session, str(tmp_path / "c"))
            return dict(zip(features, [rows[0, 0] for rows in session.run(group)], strict=True))

    assert rows_after(["user", "item"], None) == {"user": 0, "item": 1}
    assert rows_after(["item", "user"], None) == {"user": 0, "item": 1}
    with pytest.raises(ValueError, match="tf.compat.v1.train.Saver must be made with names"):
        rows_after(["item", "user"], None, lambda: sok.renamed_tables({"user": "item"}))
    keys = {"user/dump": "who", "item/dump": "item"}
    renamed = rows_after(["item", "who"], lambda tables: {k: tables[n] for k, n in keys.items()})
    assert renamed == {"who": 0, "item": 1}


def test_a_table_that_is_made_after_the_restore(sok, tmp_path):
    class Late(tf.keras.layers.Layer):
        def build(self, shape=None):
            self.first = sok.EmbeddingVariable(2, name="user").as_weight()
            self.second = sok.EmbeddingVariable(2, name="item").as_weight()
            self.built = True

    layer = Late()
    layer.build()
    sok.assign(layer.first, [1], np.ones([1, 2]))
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "c"))
    layer = Late()
    tf.train.Checkpoint(layer=layer).read(str(tmp_path / "c"))
    layer.build()
    assert sok.export(layer.first)[0].numpy().tolist() == [1]
    assert int(layer.second.size()) == 0


@pytest.mark.parametrize("layer", ["group", "dense"])
def test_ranks_find_tables_by_name(on_threads, tmp_path, layer):
    def check():
        before = written(layer, BOTH, tmp_path, all_ranks=True)
        for kind in KINDS:
            made = model(layer, BOTH[::-1])
            load(kind, made, tmp_path)
            assert contents(made, all_ranks=True) == before

    on_threads(2, check)
    for kind in KINDS if layer == "group" else ():  # which one rank reads; a feature is new
        made = model("group", ["new", "item", "user"])
        load(kind, made, tmp_path, partial=True)
        sizes = {name: int(table.size()) for name, table in _tables(made).items()}
        # Nine keys of one table, and ten of the other, besides those of the steps.
        assert sizes["new"] == 0 and sizes["item"] >= 9 and sizes["user"] >= 10
