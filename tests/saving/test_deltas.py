"""`sok.Saver().dump(since=...)` on one rank: what a delta holds, and chains that are refused."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import deltas
from tests.checks.files import check_same
from tests.emulated import on_host
from tests.saving.wrong_content import change_manifest
from tests.training import apply_gradient, content

pytestmark = on_host
DIM = 4
RULES = {
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
    "decayed": lambda: tf.keras.optimizers.AdamW(0.1, weight_decay=0.01),
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.1),
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
}


def made(sok, rule="adam", **options):
    table = sok.EmbeddingVariable(DIM, name="grown", **options)
    lazy = {"lazy": True} if rule.startswith("lazy") else {}
    return table, sok.OptimizerWrapper(RULES[rule.removeprefix("lazy ")](), **lazy)


def train(table, optimizer, keys, steps=1):
    for _ in range(steps):
        apply_gradient(optimizer, table, keys, np.array(keys)[:, np.newaxis] * 0.01 + 1)


def restored(sok, folder, rule="adam", **options):
    table, optimizer = made(sok, rule, **options)
    sok.Saver().restore(table, folder)
    return table, optimizer


def begun(sok, folder, keys, steps=1, rule="adam", **options):
    """A saver, and a table that was trained and dumped, with its optimizer."""
    saver, (table, optimizer) = sok.Saver(), made(sok, rule, **options)
    train(table, optimizer, keys, steps)
    saver.dump(table, folder)
    return saver, table, optimizer


def files_of(folder):
    """The files of the base and of the deltas."""
    manifest = json.loads((folder / "grown.json").read_text())
    return [folder / d["shards"][0]["file"] for d in [manifest, *manifest["deltas"]]]


def shard_of(folder, number):
    """Arrays of the base, or of a delta, as NumPy reads them."""
    with np.load(files_of(folder)[number]) as arrays:
        return dict(arrays)


def check_restored(sok, folder, table, rule="adam", **options):
    """A restore gives what the table holds."""
    check_same(content(restored(sok, folder, rule, **options)[0]), content(table))


@pytest.mark.parametrize("rule", RULES)
def test_a_delta_holds_the_keys_touched_and_the_steps(sok, tmp_path, rule):
    saver, table, optimizer = begun(sok, tmp_path, range(100), 3, rule)
    train(table, optimizer, [5, 6, 200], 2)
    table.erase([7, 8])
    train(table, optimizer, [5, 8])  # erased and there again
    saver.dump(table, tmp_path, since="last")
    delta = shard_of(tmp_path, 1)
    assert delta["keys"].tolist() == [5, 6, 8, 200] and delta["erased"].tolist() == [7]
    owes = rule in ("adam", "decayed", "momentum")
    assert delta["steps"].tolist() == ([[3, np.float32(0.1), 4]] if owes else [])
    check_restored(sok, tmp_path, table, rule)


def test_a_long_chain_from_the_middle_of_which_one_goes_on(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(50))
    names = [saver.dump(table, tmp_path).numpy()]
    for number in range(6):
        train(table, optimizer, range(3 * number, 3 * number + 10))
        names.append(saver.dump(table, tmp_path, since=names[-1]).numpy())
    check_restored(sok, tmp_path, table)
    train(table, optimizer, [1])
    saver.dump(table, tmp_path, since=names[2])  # in place of the four behind it
    assert len(files_of(tmp_path)) == 4 and {*tmp_path.glob("*.npz")} == {*files_of(tmp_path)}
    check_restored(sok, tmp_path, table)


def test_a_restored_table_goes_on_with_small_deltas(sok, tmp_path):
    saver, table, optimizer = begun(sok, tmp_path, range(50), 2)
    train(table, optimizer, [3])
    saver.dump(table, tmp_path, since="last")
    other, optimizer = restored(sok, tmp_path)
    assert other.stats().bytes >= 4 * 50 + restored(sok, tmp_path)[0].stats().arena_bytes
    train(other, optimizer, [4, 60], 2)
    saver.dump(other, tmp_path, since="last")
    assert shard_of(tmp_path, 2)["keys"].tolist() == [4, 60]
    check_restored(sok, tmp_path, other)


def test_a_table_that_has_policies_from_a_delta_on(sok, tmp_path):
    saver, table, _ = begun(sok, tmp_path, range(5))
    del table
    policies = {"ev_option": sok.EmbeddingVariableOption(record_statistics=True)}
    table, _ = restored(sok, tmp_path, **policies)
    with tf.GradientTape():
        sok.group_embedding_lookup_sparse([table], [tf.ragged.constant([[3, 9]])], ["sum"])
    saver.dump(table, tmp_path, since="last")
    found, _ = restored(sok, tmp_path, **policies)
    assert found.get_frequency([0, 3, 9]).numpy().tolist() == [0, 1, 1]
    check_same(content(found), content(table))
    saver.compact(table, tmp_path)
    check_restored(sok, tmp_path, table, **policies)


def test_rows_without_a_hash_table(sok, tmp_path):
    options = {"rule": "decayed", "capacity": 64, "use_hashtable": False}
    saver, table, optimizer = begun(sok, tmp_path, [1, 2, 3], 2, **options)
    train(table, optimizer, [3, 9], 2)
    saver.dump(table, tmp_path, since="last")
    assert shard_of(tmp_path, 1)["keys"].tolist() == [3, 9]
    check_restored(sok, tmp_path, table, **options)


def test_compact_that_wrote_what_cannot_be_read_removes_nothing(sok, tmp_path, monkeypatch):
    saver, table, optimizer = begun(sok, tmp_path, range(30))
    train(table, optimizer, [3], 2)
    saver.dump(table, tmp_path, since="last")
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    own = deltas.MergedDump.sorted

    def without_slots(self):
        return dataclasses.replace(own(self), slot_names=["other", "velocity"])

    def backwards(self):
        shard = own(self)

        def read(num_rows):
            for part in shard.read(num_rows):
                yield {name: array[::-1].copy() for name, array in part.items()}

        return dataclasses.replace(shard, read=read)

    for wrong, message in ((without_slots, "slot variables"), (backwards, "out of order")):
        with monkeypatch.context() as patched:
            patched.setattr(deltas.MergedDump, "sorted", wrong)
            with pytest.raises(RuntimeError, match=message):
                saver.compact(table, tmp_path)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    saver.compact(table, tmp_path)
    check_restored(sok, tmp_path, table)


@pytest.mark.parametrize("method", ["dump", "begin_dump", "compact"])
def test_deltas_are_written_eagerly(sok, tmp_path, method):
    table, call = made(sok)[0], getattr(sok.Saver(), method)
    error = pytest.raises(NotImplementedError, match=f"`{method}` works eagerly; .*`dump_to_file`")
    with error:
        tf.function(lambda: call(table, tmp_path))()
    with error, tf.Graph().as_default():
        call(table, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_delta_of_few_keys_is_small_and_costs_the_table_little(sok, tmp_path):
    saver, (table, _), size = sok.Saver(), made(sok), 200_000
    sok.assign(table, np.arange(size), tf.ones([size, DIM]))
    before = table.stats().bytes
    saver.dump(table, tmp_path)
    sok.assign(table, np.arange(0, size, 100), tf.zeros([size // 100, DIM]))
    estimated = sok.estimate_memory(size, DIM, None, touched_keys=size // 100).change_bytes
    assert 4 * size < table.stats().bytes - before == pytest.approx(estimated, rel=0.1)
    saver.dump(table, tmp_path, since="last")
    base, delta = sorted((file.stat().st_size for file in tmp_path.glob("*.npz")), reverse=True)
    assert delta < 0.02 * base


# ---- what is refused ----


@pytest.fixture
def chain(sok, tmp_path):
    """A base, two deltas, a table of other content, and that content."""
    saver, table, optimizer = begun(sok, tmp_path / "chain", range(20))
    for _ in range(2):
        train(table, optimizer, [1, 2])
        saver.dump(table, tmp_path / "chain", since="last")
    other = made(sok)[0]
    sok.assign(other, [1], tf.ones([1, DIM]))
    return tmp_path / "chain", other, content(other)


def edited(folder, change):
    """The manifest gets other deltas, and a checksum that fits."""
    change_manifest(folder, lambda fields: change(fields["deltas"]))


def exchanged(folder):
    _, one, two = files_of(folder)
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def foreign(folder):
    """The second delta's file is that of another chain, of equal names and size."""
    data = bytearray(files_of(folder)[2].read_bytes())
    data[data.index(b"keys.npy") + 140] ^= 1
    files_of(folder)[2].write_bytes(data)


def base_as_delta(folder):
    change_manifest(folder, lambda fields: fields["deltas"][0].update(shards=fields["shards"]))


DAMAGES = {
    "missing": (lambda folder: files_of(folder)[1].unlink(), "is missing"),
    "base missing": (lambda folder: files_of(folder)[0].unlink(), "is missing"),
    "exchanged": (exchanged, "must be a whole shard file|as the manifest says"),
    "foreign": (foreign, "checksum that differs"),
    "out of order": (lambda folder: edited(folder, list.reverse), "in order"),
    "one left out": (lambda folder: edited(folder, lambda deltas: deltas.pop(0)), "in order"),
    "twice": (lambda folder: edited(folder, lambda d: d.append(d[-1])), "in order"),
    "base as a delta": (base_as_delta, "must be a delta"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chain_is_refused_before_anything_changes(sok, chain, damage):
    folder, table, before = chain
    damaging, message = DAMAGES[damage]
    damaging(folder)
    for call in (sok.Saver().restore, sok.Saver().restore_from_file, sok.Saver().compact):
        with pytest.raises(RuntimeError, match=message):
            call(table, folder)
    check_same(content(table), before)


def test_since_must_name_a_dump_that_the_table_knows(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(5), 3)
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        saver.dump(table, tmp_path, since="last")
    saver.dump_to_file(table, tmp_path)
    with pytest.raises(RuntimeError, match="that `dump_to_file` has written"):
        saver.dump(table, tmp_path, since="last")
    name = saver.dump(table, tmp_path).numpy().decode()
    for wrong in ("no such", 4):
        with pytest.raises(RuntimeError, match=f"'{name}' at step 3. Received: since={wrong!r}"):
            saver.dump(table, tmp_path, since=wrong)
    for wrong in (1.5, True, ["last"]):
        with pytest.raises(TypeError, match="`since` must be None"):
            saver.dump(table, tmp_path, since=wrong)
    other = made(sok)[0]
    del table, optimizer
    with pytest.raises(RuntimeError, match="begin with a full dump"):
        saver.dump(other, tmp_path, since=3)
    assert len(list(tmp_path.glob("*.npz"))) == 1


def test_a_delta_after_rows_alone_is_whole(sok, tmp_path):
    saver, table, optimizer = begun(sok, tmp_path, range(5))
    saver.restore(table, tmp_path, rows_only=True)
    train(table, optimizer, [2, 7])
    saver.dump(table, tmp_path, since="last")
    assert shard_of(tmp_path, 1)["keys"].tolist() == [0, 1, 2, 3, 4, 7]
    check_restored(sok, tmp_path, table)
