"""Served models that follow: the base with its deltas equals a full export of the same instant."""

import functools
import itertools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.emulated import on_host
from tests.serving.test_refresh_stress import loaded_by_v1
from tests.training import train_step

pytestmark = on_host
DIM = 4
KEYS = np.r_[np.arange(-40, 400), 2**63 - 1, -(2**63)]
RULES = {
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.1),
    "adam": lambda: tf.keras.optimizers.Adam(0.1),  # moves all rows in each step
    "decayed": lambda: tf.keras.optimizers.SGD(0.1, weight_decay=0.1),  # initial rows, too
}


class Scores(tf.Module):
    """A table and a dense weight, which are trained by turns."""

    def __init__(self, sok, rule="adagrad", **options):
        super().__init__()
        self.table = sok.EmbeddingVariable(DIM, name="followed", **options)
        self.bias = tf.Variable(tf.zeros([DIM]))
        self._lookup = sok.group_embedding_lookup_sparse
        self._optimizer = sok.OptimizerWrapper(RULES[rule]())
        self._steps = 0

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "keys")])
    def __call__(self, keys):
        return {"rows": tf.nn.embedding_lookup(self.table, keys) + self.bias}

    def _loss(self, keys):
        (rows,) = self._lookup([self.table], [keys], "sum")
        return tf.reduce_sum((rows - 1.0) ** 2)

    def train(self, low, high):
        """Some steps with keys in this range; returns these."""
        self._steps += 1
        drawn = np.random.default_rng(self._steps).integers(low, high, [3, 30])
        for keys in drawn:
            keys = tf.RaggedTensor.from_tensor(tf.constant(keys)[:, tf.newaxis])
            train_step(self._optimizer, self.table, functools.partial(self._loss, keys))
            self.bias.assign_add(tf.ones([DIM]))
        return np.unique(drawn)


class Server:
    """A loaded SavedModel."""

    def __init__(self, path):
        self.model = tf.saved_model.load(str(path))
        self._call = self.model.signatures

    def rows(self, keys=KEYS):
        return self._call["serving_default"](keys=tf.constant(keys))["rows"].numpy()

    def refresh(self, name):
        return self._call["refresh"](delta=tf.constant(name))["version"].numpy().decode()


@pytest.fixture
def exported(sok, tmp_path):
    """`exported(model, **options)`: its export, as a server, and the folder of deltas."""

    def export(model, **options):
        path = tmp_path / "model"
        sok.export_saved_model(model, path, **{"refreshable": True, **options})
        return Server(path), pathlib.Path(f"{path}.deltas")

    return export


@pytest.fixture
def followed(sok, exported):
    """A trained model, its server, and the folder of deltas."""
    model = Scores(sok)
    model.train(0, 100)
    return model, *exported(model)


def assert_as_exported_now(sok, server, model, folder, keys=KEYS, **options):
    """The server answers what a full export of this instant answers."""
    sok.export_saved_model(model, folder / "full", **options)
    np.testing.assert_array_equal(server.rows(keys), Server(folder / "full").rows(keys))


EXPORTS = [
    ("adagrad", "float32", "zeros"),
    pytest.param("adam", "float32", "initial", marks=pytest.mark.keras),
    ("adagrad", "bfloat16", "initial"),
    pytest.param("adagrad", "int8", "zeros", marks=pytest.mark.slow),
    pytest.param("decayed", "int8", "initial", marks=pytest.mark.keras(slow=True)),
]


@pytest.mark.parametrize("rule, row_dtype, missing", EXPORTS)
def test_deltas_lead_to_the_bits_of_a_full_export(
    sok, exported, tmp_path, rule, row_dtype, missing
):
    model, options = Scores(sok, rule), {"row_dtype": row_dtype, "missing": missing}
    model.train(0, 100)
    server, folder = exported(model, **options)
    answers = [server.rows()]
    for number in (1, 2):
        trained, gone = model.train(40 * number, 40 * number + 100), 40 * number + np.arange(20)
        model.table.erase(gone)
        size = int(model.table.size())
        delta = sok.export_delta(model, folder / f"{number}")
        assert server.refresh(f"{number}") == delta.version
        assert_as_exported_now(sok, server, model, tmp_path, **options)
        changed = len(np.setdiff1d(trained, gone)) if rule == "adagrad" else size
        assert delta.num_rows == changed
        assert delta.num_new > 0 and 0 < delta.num_erased <= 20
        answers.append(server.rows())
    assert all(np.any(a != b) for a, b in itertools.pairwise(answers))
    serve, refresh = loaded_by_v1(tmp_path / "model")
    for number, rows in enumerate(answers):
        if number:
            refresh(f"{number}")
        np.testing.assert_array_equal(serve(KEYS)["rows"], rows)


TABLES = {
    "no_index": lambda sok: {"use_hashtable": False, "capacity": 400},
    "bfloat16": lambda sok: {"dtype": "bfloat16"},
    "filtered": lambda sok: {
        "ev_option": sok.EmbeddingVariableOption(
            filter_option=sok.CounterFilter(2),
            init_option=sok.InitializerOption(default_value_no_permission=-2.5),
        )
    },
    "evicting": lambda sok: {
        "ev_option": sok.EmbeddingVariableOption(evict_option=sok.GlobalStepEvict(4))
    },
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_other_kinds(sok, exported, tmp_path, kind):
    model = Scores(sok, **TABLES[kind](sok))
    keys = np.arange(400) if kind == "no_index" else KEYS
    model.train(0, 100)
    model.train(50, 100)  # keys of the first steps are due to leave
    server, folder = exported(model, missing="initial")
    erased = 0
    for number in (1, 2):
        model.train(40 * number, 40 * number + 100)
        erased += sok.export_delta(model, folder / f"{number}").num_erased
        server.refresh(f"{number}")
        assert_as_exported_now(sok, server, model, tmp_path, keys, missing="initial")
    assert (erased > 0) == (kind == "evicting")


def test_a_delta_out_of_order_changes_nothing(sok, followed, tmp_path):
    model, server, folder = followed
    for number in ("1", "2", "3"):
        model.train(0, 100)
        sok.export_delta(model, folder / number)
    other = Scores(sok)
    sok.export_saved_model(other, tmp_path / "other", refreshable=True)
    sok.export_delta(other, folder / "foreign")
    server.refresh("1")
    before = server.rows()
    (tmp_path / "model.deltas" / "folder").mkdir()
    others = "must build on the version of the served model.*which builds on"
    elsewhere = ["folder/1", "../model.deltas/2", str(folder / "2"), "", ".."]
    for name, words in {
        **dict.fromkeys(["1", "3", "foreign"], others),
        "4": "Failed to find any matching files",
        **dict.fromkeys(elsewhere, "must be the name of a file, without a folder"),
    }.items():
        with pytest.raises(tf.errors.OpError, match=words):
            server.refresh(name)
        np.testing.assert_array_equal(server.rows(), before)
    for number in ("2", "3"):
        server.refresh(number)
    assert_as_exported_now(sok, server, model, tmp_path)


@pytest.mark.parametrize("end", ["index", "data-00000-of-00001"])
def test_a_damaged_delta_changes_nothing(sok, followed, tmp_path, end):
    model, server, folder = followed
    model.train(50, 150)
    sok.export_delta(model, folder / "1")
    before, file = server.rows(), folder / f"1.{end}"
    whole = file.read_bytes()
    refused = 0
    damaged = [whole[: len(whole) // 2], whole[:-1], b""]
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        damaged.append(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    for content in damaged:
        file.write_bytes(content)
        try:
            server.refresh("1")
        except tf.errors.OpError:
            refused += 1
            np.testing.assert_array_equal(server.rows(), before)
        else:  # padding of the index, which nobody reads
            assert end == "index"
            break
    assert refused >= (len(damaged) if end != "index" else 10)
    file.write_bytes(whole)
    if refused == len(damaged):
        server.refresh("1")
    assert_as_exported_now(sok, server, model, tmp_path)


def test_a_refresh_that_is_cut_off_is_repeated(sok, followed, tmp_path):
    model, server, folder = followed
    versions = []
    for number in ("1", "2"):
        model.train(50, 150)
        versions.append(sok.export_delta(model, folder / number).version)
    # As a call leaves it that is cancelled while it copies.
    server.model.served.versions[1].assign(versions[0])
    server.model.served.sequence.assign(1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="A refresh was cut off"):
        server.rows()
    with pytest.raises(tf.errors.InvalidArgumentError, match="must build on the version"):
        server.refresh("2")
    server.refresh("1")
    server.refresh("2")
    assert_as_exported_now(sok, server, model, tmp_path)


def test_after_a_delta_that_could_not_be_written_the_next_has_it_all(sok, followed, tmp_path):
    model, server, folder = followed
    before = set(sok.export(model.table)[0].numpy())
    model.train(50, 150)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="could not be written"):
        sok.export_delta(model, tmp_path / "file" / "1")
    model.table.erase(np.arange(60, 80))
    delta = sok.export_delta(model, folder / "1")
    now = set(sok.export(model.table)[0].numpy())
    assert (delta.num_new, delta.num_erased) == (len(now - before), len(before - now))
    with pytest.raises(ValueError, match="name of a new delta"):
        sok.export_delta(model, folder / "1")
    server.refresh("1")
    assert_as_exported_now(sok, server, model, tmp_path)


def test_more_keys_than_there_is_room_for(sok, exported, tmp_path):
    model = Scores(sok)
    model.train(0, 100)
    server, folder = exported(model, headroom=0)
    size = int(model.table.size())
    room = 1024 + size
    sok.assign(model.table, 1000 + np.arange(900), np.ones([900, DIM]))
    assert sok.export_delta(model, folder / "1").fullness == (900 + size) / room
    sok.assign(model.table, 2000 + np.arange(60), np.ones([60, DIM]))
    with pytest.warns(UserWarning, match="94% of the room for keys is taken: a full export is due"):
        sok.export_delta(model, folder / "2")
    sok.assign(model.table, 3000 + np.arange(65), np.ones([65, DIM]))
    with pytest.raises(ValueError, match=f"full export is due.*{room + 1} keys.*'followed'"):
        sok.export_delta(model, folder / "3")
    model.table.erase(3000 + np.arange(50))
    with pytest.warns(UserWarning, match="95%"):
        sok.export_delta(model, folder / "3")
    for number in ("1", "2", "3"):
        server.refresh(number)
    assert_as_exported_now(sok, server, model, tmp_path)
    server, folder = exported(model, headroom=0)  # a full export
    assert not list(folder.glob("*"))  # the deltas to the SavedModel before are gone
    model.train(0, 200)
    assert sok.export_delta(model, folder / "1").fullness < 0.6
    server.refresh("1")
    assert_as_exported_now(sok, server, model, tmp_path)


def test_what_cannot_follow_says_so(sok, exported, tmp_path):
    model = Scores(sok)
    for given in (model, model, [model]):
        with pytest.raises(ValueError, match="exported by this process with refreshable=True"):
            sok.export_delta(given, tmp_path / "1")
        sok.export_saved_model(model, tmp_path / "full")
    exported(model)
    for name in ("a b", "x/", "ä", ".hidden"):
        with pytest.raises(ValueError, match="The name of a delta must"):
            sok.export_delta(model, f"{tmp_path}/{name}")
    model.more = sok.EmbeddingVariable(2, name="more")
    with pytest.raises(ValueError, match="tables that it had at the export, .'followed'.*'more'"):
        sok.export_delta(model, tmp_path / "1")
    dense = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    calls, on = {"refresh": model.__call__}, {"refreshable": True}
    for given, words, options in (
        *((model, "`headroom` must be a number >= 0", {**on, "headroom": wrong})
          for wrong in (-0.1, float("nan"), "much", None)),
        (model, "`headroom` must be given with `refreshable` only", {"headroom": 1.0}),
        (dense, "'float32' for a model without hash tables", {"row_dtype": "int8"}),
        (model, "`refreshable` must be True, False or a folder", {"refreshable": 3}),
        (model, "may be called 'refresh'", {**on, "signatures": calls}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            sok.export_saved_model(given, tmp_path / "x", **options)


def test_a_folder_that_the_server_sees_elsewhere(sok, exported, tmp_path):
    model, there = Scores(sok), tmp_path / "there"
    model.train(0, 100)
    server, _ = exported(model, refreshable=there)
    model.train(50, 150)
    sok.export_delta(model, tmp_path / "here" / "1")
    (tmp_path / "here").rename(there)
    server.refresh("1")
    assert_as_exported_now(sok, server, model, tmp_path)
