"""A file's tables go to the tables of their names, whatever the order."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from sok_like.table.keras_variable import is_keras_3
from tests.checks import table_names as made
from tests.saving import files_without_names as earlier

pytestmark = pytest.mark.keras
LAYERS = sorted(made.LAYERS)
# Features of the layer that reads what one of ["user", "item"] wrote.
SWAPPED, MORE, FEWER, RENAMED = ["item", "user"], ["new", "item", "user"], ["item"], ["item", "who"]


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_swapped_tables_get_their_own_content(sok, tmp_path, layer, kind):
    before = made.written(layer, ["user", "item"], tmp_path)
    model = made.model(layer, SWAPPED)
    made.load(kind, model, tmp_path)
    assert made.contents(model) == before


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize(
    "features, missing, extra",
    [(MORE, ["new"], []), (FEWER, [], ["user"]), (RENAMED, ["who"], ["user"])],
)
@pytest.mark.parametrize("layer", ["group", "own", "dense"])
def test_other_tables_are_named_and_start_empty(
    sok, tmp_path, layer, features, missing, extra, kind
):
    before = made.written(layer, ["user", "item"], tmp_path)
    model = made.model(layer, features)
    with made.refused(kind, features, ["user", "item"]):
        made.load(kind, model, tmp_path)
    model = made.model(layer, features)
    new = {} if layer != "dense" else made.contents(model)
    with pytest.warns(UserWarning) as told:
        made.load(kind, model, tmp_path, partial=True)
    text = next(str(w.message) for w in told if "Received: " in str(w.message))
    expected, received = text.split("Received: ")
    assert all(repr(name) in expected for name in features)
    assert all(repr(name) in received for name in ["user", "item"])
    known = {name: before[name] for name in features if name in before}
    assert made.contents(model) == dict.fromkeys(missing) | new | known


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("layer", ["group", "own", "dense", "hashed"])
def test_a_renamed_table(sok, tmp_path, layer, kind):
    before = made.written(layer, ["user", "item"], tmp_path)
    model = made.model(layer, RENAMED)
    with sok.renamed_tables({"user": "who"}):
        made.load(kind, model, tmp_path)
    assert made.contents(model) == {"item": before["item"], "who": before["user"]}
    # Whole names, and two names that change places.
    model = made.model(layer, ["user", "item"])
    with sok.renamed_tables({"user": "item", "item": "user"}):
        made.load(kind, model, tmp_path)
    assert made.contents(model) == {"item": before["user"], "user": before["item"]}
    with pytest.raises(ValueError, match="'nobody'"), sok.renamed_tables({"nobody": "user"}):
        made.load(kind, made.model(layer, ["user", "item"]), tmp_path)


@pytest.mark.parametrize("names", [["user"], "user", {"user": 1}, {1: "user"}, None])
def test_renames_must_be_a_dictionary_of_names(sok, names):
    with pytest.raises(TypeError, match="`names` must be a dictionary.*Received: names="):
        with sok.renamed_tables(names):
            pass


def test_only_a_table_of_another_width_is_skipped(sok, tmp_path):
    before = made.written("group", ["user", "item"], tmp_path)
    keys = {f: tf.keras.Input([2], dtype="int64", name=f) for f in before}
    layer = sok.GroupEmbedding({"item": 2, "user": 3}, combiners="sum")
    model = tf.keras.Model(keys, layer(keys))
    with pytest.warns(UserWarning, match="'.*/user' has rows of 3 floats"):
        model.load_weights(str(tmp_path / "w.weights.h5"), skip_mismatch=True)
    assert made.contents(model) == {**before, "user": None}


VALUES = {"user": 1.0, "item": 2.0, "left": 3.0, "right": 4.0}


def load_earlier(kind, ranks, model):
    if kind == "checkpoint":
        status = tf.train.Checkpoint(model=model).read(str(earlier.FOLDER / f"c{ranks}"))
        status.assert_existing_objects_matched()
    else:
        model.load_weights(str(earlier.FOLDER / f"w{ranks}.weights.h5"))


@pytest.mark.skipif(not is_keras_3(), reason="Keras 3 wrote them")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_files_without_names_are_read_in_their_order_and_say_so(sok, kind, ranks):
    model = earlier.made()
    with pytest.warns(UserWarning, match="in their order.*'left', 'right'"):
        load_earlier(kind, ranks, model)
    assert earlier.values(model) == VALUES


@pytest.mark.skipif(not is_keras_3(), reason="Keras 3 wrote them")
def test_names_of_dumps_beside_a_file_without_names_count(sok):
    model = earlier.made(("item", "user"))
    load_earlier("weights", 2, model)
    assert earlier.values(model) == VALUES
    model = earlier.made(("item", "user"))
    with pytest.raises(ValueError, match="'feat/user'.*'feat/item'"):
        load_earlier("checkpoint", 2, model)
    assert earlier.values(model)["user"] is None
    model = earlier.made(("new", "item"))
    with pytest.raises(ValueError, match=r"\['new', 'item'\].*Received: \['user', 'item'\]"):
        load_earlier("weights", 2, model)


def test_tables_without_a_name_are_matched_by_their_order_if_they_are_as_many(sok, tmp_path):
    def unnamed(number):
        tf.keras.utils.set_random_seed(3)
        layer = sok.dist_model_parallel.DistributedEmbedding(
            [tf.keras.layers.Embedding(5, 2) for _ in range(number)]
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


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("layer", ["group", "dense"])
def test_names_of_any_characters(sok, tmp_path, layer, kind):
    names = ["a.b", "7"]
    before = made.written(layer, names, tmp_path)
    model = made.model(layer, names[::-1])
    made.load(kind, model, tmp_path)
    assert made.contents(model) == before


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


@pytest.mark.ranks
@pytest.mark.parametrize("layer", ["group", "dense"])
@pytest.mark.parametrize("kind", made.KINDS)
def test_ranks_find_tables_by_name(on_processes, tmp_path, layer, kind):
    on_processes(2, made.finds_by_name, layer, kind, tmp_path)
    if layer == "group":
        ((new, user, item),) = on_processes(1, made.sizes_of_some, kind, tmp_path)
        # Nine keys of one table, and ten of the other, besides those of the steps.
        assert new == 0 and user >= 9 and item >= 10
