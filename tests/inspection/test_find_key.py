"""`sok.find_key` finds a key wherever it is, and nothing once it is erased everywhere."""

import os
import shutil
import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests.checks.serving import OneTable

TRAINED, WAITING, ERASED, ABSENT = 77, 88, 99, 55
ROW, WAITS = "its row", "it waits in the filter"


class Model(OneTable):
    def __init__(self, sok, filter_option=None, name="users"):
        option = sok.EmbeddingVariableOption(filter_option=filter_option)
        super().__init__(sok.EmbeddingVariable(4, name=name, ev_option=option))
        self._sok = sok

    def see(self, *keys):
        keys = tf.ragged.constant([[key] for key in keys], dtype=tf.int64)
        with tf.GradientTape():
            self._sok.group_embedding_lookup_sparse([self.table], [keys], ["sum"])


@pytest.fixture
def model(sok):
    model = Model(sok, sok.CounterFilter(2))
    for _ in range(2):
        model.see(TRAINED, ERASED)
    model.see(WAITING)
    return model


def kinds(places):
    return sorted({(place.kind, place.what) for place in places})


def test_tables_and_filters(sok, model):
    assert kinds(sok.find_key(TRAINED, model.table)) == [("table", ROW)]
    assert kinds(sok.find_key(WAITING, model)) == [("table", WAITS)]
    assert sok.find_key(ABSENT, model) == []
    with pytest.raises(ValueError, match="`table` must be the name.*'users'.*Received.*'items'"):
        sok.find_key(ABSENT, model, table="items")  # else [] would say that the key is gone
    other = sok.EmbeddingVariable(2, name="items")
    assert sok.find_key(TRAINED, model, other, table="items") == []
    assert int(model.table.erase([TRAINED, WAITING, ABSENT])) == 2
    assert model.table.statistics().waiting == 0 and model.table.statistics().erased == 1
    assert sok.find_key(TRAINED, model) == sok.find_key(WAITING, model) == []
    model.see(WAITING)  # counted from nothing
    assert kinds(sok.find_key(WAITING, model)) == [("table", WAITS)]


def test_a_table_without_an_index_has_the_keys_of_its_rows(sok, on_threads):
    def places():
        table = sok.EmbeddingVariable(2, name="rows", capacity=5, use_hashtable=False)
        return {key: [p.where for p in sok.find_key(key, table)] for key in (0, 7, 10, -1, 2**63)}

    for found in on_threads(2, places):
        assert found == {0: ["on rank 0"], 7: ["on rank 1"], 10: [], -1: [], 2**63: []}


def test_evicted_rows_in_the_buffer(sok):
    option = sok.EmbeddingVariableOption(
        evict_option=sok.ScoreEvict("lru", capacity=1), evicted_buffer_size=9
    )
    table = sok.EmbeddingVariable(2, name="small", ev_option=option)
    sok.assign(table, [1], [[1, 1]])
    sok.assign(table, [2], [[2, 2]])
    (place,) = sok.find_key(1, table)
    assert place.what.startswith("perhaps")
    assert int(table.erase([1])) == 0  # it has neither a row nor a count
    assert sok.find_key(1, table) == [] and len(table.pop_evicted().keys) == 0


def test_a_bloom_filter_cannot_forget(sok):
    model = Model(sok, sok.CBFFilter(2, max_element_size=100, false_positive_probability=0.01))
    model.see(7)
    with pytest.warns(UserWarning, match="'users' has a CBFFilter, which cannot forget"):
        assert int(model.table.erase([7])) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once for each table
        model.table.erase([7])
    assert [place.what for place in sok.find_key(7, model)] == ["perhaps counted by a Bloom filter"]


FILES = {  # what writes them, and what they have of a key with a row, and of one that waits
    "dump": lambda sok, model, at: sok.Saver().dump_to_file(model.table, at, sok1_files=False),
    "dump of SOK 1": lambda sok, model, at: sok.Saver().dump_to_file(model.table, at),
    "checkpoint": lambda sok, model, at: tf.train.Checkpoint(model=model).save(f"{at}/ckpt"),
    "export": lambda sok, model, at: sok.export_saved_model(model, at),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(sok, model, tmp_path, kind):
    FILES[kind](sok, model, str(tmp_path / "at"))
    found = {key: sok.find_key(key, tmp_path) for key in (TRAINED, WAITING, ABSENT)}
    assert (kind, ROW) in kinds(found[TRAINED])
    assert all(place.table in ("users", "") for place in found[TRAINED])
    assert sok.find_key(TRAINED, tmp_path / "at", table="users") == found[TRAINED]
    expected = [] if kind == "export" else [WAITS]  # servers have no filter
    assert [place.what for place in found[WAITING]] == expected
    assert found[ABSENT] == []
    if kind != "checkpoint":  # which does not know the names of tables
        with pytest.raises(ValueError, match="`table` must be the name of a table"):
            sok.find_key(TRAINED, tmp_path, table="items")


@pytest.mark.keras
def test_files_of_keras(sok, tmp_path):
    inputs = tf.keras.Input([1], dtype="int64")
    model = tf.keras.Model(inputs, sok.GroupEmbedding({"user": 4})({"user": inputs})["user"])
    model(np.array([[TRAINED]]), training=True)
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    found = sok.find_key(TRAINED, tmp_path, table="user")
    assert [(os.path.basename(place.where), place.table) for place in found] == [
        ("m.keras", "user"),
        ("m.weights.h5", "user"),
    ]
    other = sok.EmbeddingVariable(2, name="item")
    assert sok.find_key(TRAINED, tmp_path, other, table="item") == []
    assert sok.find_key(ABSENT, tmp_path) == []
    assert kinds(sok.find_key(TRAINED, model, table="user")) == [("table", ROW)]


def test_deltas_until_they_are_merged(sok, model, tmp_path):
    saver = sok.Saver()
    saver.dump(model.table, tmp_path)
    model.table.erase([ERASED, WAITING])
    saver.dump(model.table, tmp_path, since="last")
    assert kinds(sok.find_key(ERASED, tmp_path)) == [("delta", "listed as erased"), ("dump", ROW)]
    assert kinds(sok.find_key(WAITING, tmp_path)) == [("dump", WAITS)]
    saver.compact(model.table, tmp_path)
    assert sok.find_key(ERASED, tmp_path) == sok.find_key(WAITING, tmp_path) == []
    assert kinds(sok.find_key(TRAINED, tmp_path)) == [("dump", ROW)]


def test_exports_with_their_deltas_and_servers(sok, model, tmp_path):
    path = tmp_path / "model" / "1"
    sok.export_saved_model(model, path, refreshable=True)
    server = tf.saved_model.load(str(path))
    new = 1000
    sok.assign(model.table, [new], np.full([1, 4], 3, np.float32))
    sok.export_delta(model, f"{path}.deltas/1")
    server.signatures["refresh"](delta=tf.constant("1"))
    on_server = {key: kinds(sok.find_key(key, server)) for key in (ERASED, new, WAITING)}
    assert on_server == {ERASED: [("server", ROW)], new: [("server", ROW)], WAITING: []}
    took_all = ("server", "its row, in a server that took all deltas")
    named = ("export delta", "its number in the index")
    assert kinds(sok.find_key(new, path)) == [named, took_all]
    model.table.erase([ERASED, new])
    sok.export_delta(model, f"{path}.deltas/2")
    server.signatures["refresh"](delta=tf.constant("2"))
    assert sok.find_key(ERASED, server) == sok.find_key(new, server) == []
    assert kinds(sok.find_key(ERASED, path)) == [("export", ROW)]
    assert kinds(sok.find_key(new, path)) == [named]
    rows = server.tables_rows_4.numpy()
    assert not np.any(rows[-1]) and not np.isin(3, rows)


@pytest.mark.parametrize("refreshable", [False, True])
def test_numbers_that_stand_in_free_slots(sok, tmp_path, refreshable):
    model, present = Model(sok), [0, 3, 62, -1]
    sok.assign(model.table, present, np.ones([4, 4], np.float32))
    sok.export_saved_model(model, tmp_path / "1", refreshable=refreshable)
    server = tf.saved_model.load(str(tmp_path / "1"))
    for key in range(-2, 70):
        assert bool(sok.find_key(key, tmp_path)) == (key in present), key
        assert bool(sok.find_key(key, server)) == (key in present), key


def test_what_cannot_be_read_is_listed(sok, model, tmp_path):
    sok.Saver().dump_to_file(model.table, tmp_path, sok1_files=False)
    (shard,) = tmp_path.glob("*.npz")
    shutil.copy(shard, f"{shard}.tmp")  # of a process that was killed
    shard.write_bytes(shard.read_bytes()[:300])
    found = {place.where: place for place in sok.find_key(TRAINED, tmp_path)}
    assert found[f"{shard}.tmp"].what == ROW
    assert found[str(shard)].kind == "unreadable file"
    assert "perhaps the key" in str(found[str(shard)])


def test_a_row_is_found_beside_a_damaged_array(sok, tmp_path):
    model = Model(sok, sok.CBFFilter(2, 1000, 0.01))
    model.see(TRAINED)
    model.see(TRAINED)
    tf.train.Checkpoint(table=model.table).write(str(tmp_path / "c"))
    (data,) = tmp_path.glob("c.data*")
    reader = tf.train.load_checkpoint(str(tmp_path / "c"))
    counters = reader.get_tensor("table/.ATTRIBUTES/counters").tobytes()
    damaged = data.read_bytes().replace(counters, b"\xff" * len(counters))
    assert damaged != data.read_bytes()
    data.write_bytes(damaged)
    places = kinds(sok.find_key(TRAINED, tmp_path))
    assert [kind for kind, _ in places] == ["checkpoint", "unreadable file"] and places[0][1] == ROW


def test_dumps_of_sok_2_and_large_keys(sok, tmp_path):
    from sok_like import sok2

    sok2.init()
    table = sok2.DynamicVariable(dimension=2, initializer="1", name="users")
    keys = tf.ragged.constant([[TRAINED, 5]], dtype=tf.int64)
    sok2.lookup_sparse([table], [keys], combiners=["sum"])
    sok2.dump(str(tmp_path), [table])
    (place,) = sok.find_key(TRAINED, tmp_path, table="users")
    assert place.kind == "dump of SOK 2" and place.where.endswith("users_0-key")
    assert sok.find_key(ABSENT, tmp_path) == []
    large = sok.EmbeddingVariable(2, name="large", key_dtype="uint64")
    sok.assign(large, tf.constant([2**63 + 5], tf.uint64), [[1.0, 1.0]])
    assert kinds(sok.find_key(2**63 + 5, large)) == [("table", ROW)]


def test_wrong_arguments(sok, model, tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path / "other"))
    for error, words, given in (
        (TypeError, "`places` must be.*tables", [7]),
        (FileNotFoundError, "no_such", [1, tmp_path / "no_such"]),
        (TypeError, "`key` must be an integer", ["1", model]),
        (ValueError, "uint64", [2**64, model]),
        (TypeError, "must be a Keras model", [1, 2]),
        (TypeError, "export_saved_model", [1, tf.saved_model.load(str(tmp_path / "other"))]),
    ):
        with pytest.raises(error, match=words):
            sok.find_key(*given)


def test_an_export_of_another_version_is_refused(sok, tmp_path):
    served = tf.Module()
    served.table_0_rows, served.tables = tf.Variable(tf.ones([2, 4])), [tf.Module()]
    tf.saved_model.save(served, str(tmp_path / "1"))
    (place,) = sok.find_key(1, tmp_path)
    assert place.kind == "unreadable file" and place.where.endswith("variables.index")
    assert "an export of another version of sok_like; export the model again" in place.what
    with pytest.raises(TypeError, match="that sok.export_saved_model of this version has written"):
        sok.find_key(1, tf.saved_model.load(str(tmp_path / "1")))
