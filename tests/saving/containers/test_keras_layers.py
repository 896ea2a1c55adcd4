"""Layers of a user's own that hold tables, in Keras' files; checks/own_layers.py has the ranks'."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving import transaction
from sok_like.saving.format import checksums
from sok_like.saving.parts import table_names
from sok_like.table.keras_variable import is_keras_3
from tests.checks import own_layers
from tests.saving import fuzz_files

pytestmark = pytest.mark.keras
MUTATIONS = {"weights": 150, "model": 25, "checkpoint": 60}


def check_same(after, before, what):
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, dict):
            check_same(after[name], value, f"{what} {name}")
        else:
            np.testing.assert_array_equal(after[name], value, f"{what} {name}")


def by_key(parts, name):
    """One table of all ranks, in the order of its keys."""
    parts = [part["tables"][name] for part in parts]
    order = np.argsort(np.concatenate([part["keys"] for part in parts]))
    fields = ("keys", "rows", "slot_rows", *(["records"] if "records" in parts[0] else []))
    return {f: np.concatenate([part[f] for part in parts])[order] for f in fields}


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize(
    "kind, writers, readers",
    [("weights", 1, 2), ("model", 2, 1), ("checkpoint", 2, 2), ("checkpoint", 1, 1)],
)
def test_what_was_written_is_read_and_goes_on(on_processes, tmp_path, kind, writers, readers):
    wrote = on_processes(writers, own_layers.write_and_go_on, tmp_path)
    read = on_processes(readers, own_layers.read_and_go_on, kind, tmp_path)
    names = wrote[0][0]["tables"]
    assert len(names) == 4 and all(len(by_key([w[0] for w in wrote], n)["keys"]) for n in names)
    for each in read:
        check_same(each[0]["weights"], wrote[0][0]["weights"], kind)
        np.testing.assert_allclose(each[1], wrote[0][1], atol=1e-5)
    for name in names:
        pair = [by_key([each[0] for each in side], name) for side in (read, wrote)]
        check_same(*pair, f"{kind} {name}")


def test_a_table_assigned_bare_is_trained_and_saved(sok, tmp_path):
    model = own_layers.made(bare=True)
    assert len(own_layers.tables_of(model)) == 4
    own_layers.files.fit(model, 2)
    before = own_layers.everything(model)
    own_layers.write(model, tmp_path, with_checkpoint=False)
    assert all(len(content["keys"]) for content in before["tables"].values())
    for kind in ("weights", "model"):
        check_same(own_layers.everything(own_layers.read(kind, tmp_path, True)), before, kind)


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras tracks variables as they are")
def test_a_table_assigned_to_a_built_layer_says_so(sok):
    layer = own_layers.Pair()
    layer(tf.constant([[1, 2]], tf.int64))
    with pytest.raises(ValueError, match="already built"):
        layer.late = sok.EmbeddingVariable(2, name="late")


def test_a_table_that_two_layers_share(sok, tmp_path):
    def shared():
        table = sok.EmbeddingVariable(4, name="shared")
        keys = tf.keras.Input([2], dtype="int64")
        layers = [own_layers.Pair(table=table, name=name) for name in ("left", "right")]
        return tf.keras.Model(keys, sum(layer(keys) for layer in layers))

    model, path = shared(), str(tmp_path / "s.weights.h5")
    keys = np.arange(6).reshape(3, 2)
    model(keys, training=True)
    table = own_layers.tables_of(model)[0]
    sok.assign(table, [0, 1, 9], tf.random.normal([3, 4]))
    model.save_weights(path)
    other = shared()
    other.load_weights(path)
    check_same(own_layers.everything(other), own_layers.everything(model), "shared")
    np.testing.assert_array_equal(other(keys, training=False), model(keys, training=False))


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "BackupAndRestore"])
def test_keras_callbacks(sok, tmp_path, kind):
    path = str(tmp_path / "w.weights.h5")
    callback = (
        tf.keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        if kind == "ModelCheckpoint"
        else tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)
    )
    model = own_layers.made()
    own_layers.files.fit(model, 2, callbacks=[callback])
    other = own_layers.made()
    if kind == "ModelCheckpoint":
        own_layers.files.fit(other, 1, 100)
        other.load_weights(path)
    else:
        own_layers.files.fit(other, 2, callbacks=[callback])  # both epochs are done
    check_same(own_layers.everything(other), own_layers.everything(model), kind)


def one_layer(dim=4):
    keys = tf.keras.Input([2], dtype="int64")
    return tf.keras.Model(keys, own_layers.Pair(dim, name="one")(keys))


def test_ranks_load_a_model_together_whoever_made_its_layers(sok, tmp_path, monkeypatch):
    path, stock = str(tmp_path / "m.keras"), str(tmp_path / "stock.keras")
    model = one_layer()
    model(np.array([[1, 2]]), training=True)
    model.save(path)  # not compiled, so its configuration does not name this package
    tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)]).save(stock)
    together, own = [], transaction.load

    def load(*args, **kwargs):
        together.append(kwargs["collective"])
        return own(*args, **kwargs)

    monkeypatch.setattr(transaction, "load", load)
    other = tf.keras.models.load_model(path)
    check_same(own_layers.everything(other), own_layers.everything(model), "model")
    tf.keras.models.load_model(stock)
    assert together == [True, False]


def test_messages_name_the_table(sok, tmp_path):
    path = str(tmp_path / "w.weights.h5")
    model = one_layer()
    model(np.array([[1, 2]]), training=True)
    model.save_weights(path)
    wider = one_layer(8)
    with pytest.raises(
        ValueError, match=r"Table 'one_a' has rows of 8 floats. Received: .*rows of 4"
    ):
        wider.load_weights(path)
    assert all(len(content["keys"]) == 0 for content in own_layers.state(wider).values())
    keys = tf.keras.Input([2], dtype="int64")

    def group(features):
        layer = sok.GroupEmbedding(dict.fromkeys(features, 4), combiners="sum", name="features")
        outputs = layer(dict.fromkeys(features, keys))
        return tf.keras.Model(keys, sum(outputs[name] for name in features))

    model = group(["a"])
    model(np.array([[1, 2]]), training=True)
    model.save_weights(path)
    more = group(["a", "b"])
    with pytest.raises(ValueError, match=r"hold the tables \['a', 'b'\].*Received: \['a'\]"):
        more.load_weights(path)
    assert all(len(content["keys"]) == 0 for content in own_layers.state(more).values())


@pytest.mark.parametrize("kind", fuzz_files.KINDS)
def test_a_damaged_file_is_refused_or_its_tables_are_right(sok, tmp_path, kind):
    """`make fuzz` runs more."""
    counts, wrong = fuzz_files.run(fuzz_files.Files(tmp_path), kind, MUTATIONS[kind], 1)
    assert not wrong, wrong
    assert counts["refused"] > 0


def test_a_file_of_version_0_1_without_checksums_is_read(sok, tmp_path, monkeypatch):
    model, path = one_layer(), str(tmp_path / "w.weights.h5")
    model(np.array([[1, 2]]), training=True)
    before = own_layers.everything(model)

    def write(store, arrays, prefix=""):
        for name, array in arrays:
            store[prefix + name] = array

    monkeypatch.setattr(checksums, "write_arrays", write)
    monkeypatch.setattr(table_names, "key_of", lambda name, number: str(number))
    model.save_weights(path)
    other = one_layer()
    other.load_weights(path)
    check_same(own_layers.everything(other), before, "without checksums")
