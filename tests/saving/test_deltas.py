"""`sok.Saver().dump(since=...)` on one rank: what a delta holds, and chains that are refused."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import deltas
from sok_like.saving.format import manifest as manifest_file
from tests import emulated

DIM = 4
RULES = {
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
    "decayed": lambda: tf.keras.optimizers.AdamW(0.1, weight_decay=0.01),
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.1),
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
}


@pytest.fixture(autouse=True)
def on_host():
    if emulated.asked_for():
        pytest.skip("deltas are of tables in host memory")


def made(sok, rule="adam", **options):
    table = sok.EmbeddingVariable(DIM, name="grown", **options)
    return table, sok.OptimizerWrapper(RULES[rule]())


def train(table, optimizer, keys, steps=1):
    keys = tf.constant(keys, tf.int64)
    for _ in range(steps):
        values = tf.cast(keys, tf.float32)[:, tf.newaxis] * 0.01 + tf.ones([len(keys), DIM])
        optimizer.apply_gradients([(tf.IndexedSlices(values, keys), table)])


def state(table):
    return {name: np.asarray(value) for name, value in table.snapshot().fields().items()}


def check_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], name)


def restored(sok, folder, rule="adam", **options):
    table, optimizer = made(sok, rule, **options)
    sok.Saver().restore(table, folder)
    return table, optimizer


def shard_of(folder, number):
    """Arrays of the base, or of a delta, as NumPy reads them."""
    manifest = json.loads((folder / "grown.json").read_text())
    dump = [manifest, *manifest["deltas"]][number]
    with np.load(folder / dump["shards"][0]["file"]) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("rule", RULES)
def test_a_delta_holds_the_keys_touched_and_the_steps(sok, tmp_path, rule):
    saver, (table, optimizer) = sok.Saver(), made(sok, rule)
    train(table, optimizer, range(100), 3)
    saver.dump(table, tmp_path)
    train(table, optimizer, [5, 6, 200], 2)
    table.erase([7, 8])
    train(table, optimizer, [5, 8])  # erased and there again
    saver.dump(table, tmp_path, since="last")
    delta = shard_of(tmp_path, 1)
    assert delta["keys"].tolist() == [5, 6, 8, 200] and delta["erased"].tolist() == [7]
    owes = rule in ("adam", "decayed", "momentum")
    assert delta["steps"].tolist() == ([[3, np.float32(0.1), 4]] if owes else [])
    check_same(state(restored(sok, tmp_path, rule)[0]), state(table))


def test_a_long_chain_from_the_middle_of_which_one_goes_on(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(50))
    names = [saver.dump(table, tmp_path).numpy()]
    for number in range(6):
        train(table, optimizer, range(3 * number, 3 * number + 10))
        names.append(saver.dump(table, tmp_path, since=names[-1]).numpy())
    check_same(state(restored(sok, tmp_path)[0]), state(table))
    train(table, optimizer, [1])
    saver.dump(table, tmp_path, since=names[2])  # in place of the four behind it
    assert len(json.loads((tmp_path / "grown.json").read_text())["deltas"]) == 3
    assert len(list(tmp_path.glob("*.npz"))) == 4
    check_same(state(restored(sok, tmp_path)[0]), state(table))


def test_what_is_no_matter_of_keys_makes_the_delta_whole(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    sok.assign(table, range(9), tf.ones([9, DIM]))
    saver.dump(table, tmp_path)
    train(table, optimizer, [1])  # slots come to be, of all rows
    saver.dump(table, tmp_path, since="last")
    check_same(state(restored(sok, tmp_path)[0]), state(table))
    table.clear()
    train(table, optimizer, [20, 21])
    saver.dump(table, tmp_path, since="last")
    assert [int(shard_of(tmp_path, n)["whole"]) for n in (1, 2)] == [1, 1]
    check_same(state(restored(sok, tmp_path)[0]), state(table))
    train(table, optimizer, [22])
    saver.dump(table, tmp_path, since="last")
    assert shard_of(tmp_path, 3)["keys"].tolist() == [22]
    check_same(state(restored(sok, tmp_path)[0]), state(table))


@pytest.mark.parametrize("clears_first", [False, True])
def test_a_delta_over_dumps_of_others_is_whole_if_one_of_them_is(sok, tmp_path, clears_first):
    """Each dump begins an interval of changes, also one into another folder."""
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, [9, 4, 7])
    saver.dump(table, tmp_path / "mine")
    for clears in (clears_first, not clears_first):
        if clears:
            table.clear()
        train(table, optimizer, [8, 5, 3, 7], 2)
        sok.Saver().dump(table, tmp_path / "other")
    saver.dump(table, tmp_path / "mine", since="last")
    check_same(state(restored(sok, tmp_path / "mine")[0]), state(table))


def test_a_restored_table_goes_on_with_small_deltas(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(50), 2)
    saver.dump(table, tmp_path)
    train(table, optimizer, [3])
    saver.dump(table, tmp_path, since="last")
    other, optimizer = restored(sok, tmp_path)
    assert other.stats().bytes >= 4 * 50 + restored(sok, tmp_path)[0].stats().arena_bytes
    train(other, optimizer, [4, 60], 2)
    saver.dump(other, tmp_path, since="last")
    assert shard_of(tmp_path, 2)["keys"].tolist() == [4, 60]
    check_same(state(restored(sok, tmp_path)[0]), state(other))
    with pytest.raises(RuntimeError, match="must have different names"):
        saver.dump(made(sok)[0], tmp_path)


def test_a_table_that_has_policies_from_a_delta_on(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(5))
    saver.dump(table, tmp_path)
    del table
    policies = {"ev_option": sok.EmbeddingVariableOption(record_statistics=True)}
    table, optimizer = restored(sok, tmp_path, **policies)
    with tf.GradientTape():
        sok.group_embedding_lookup_sparse([table], [tf.ragged.constant([[3, 9]])], ["sum"])
    saver.dump(table, tmp_path, since="last")
    found, _ = restored(sok, tmp_path, **policies)
    assert found.get_frequency([0, 3, 9]).numpy().tolist() == [0, 1, 1]
    check_same(state(found), state(table))
    saver.compact(table, tmp_path)
    check_same(state(restored(sok, tmp_path, **policies)[0]), state(table))


def test_rows_without_a_hash_table(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok, "decayed", capacity=64, use_hashtable=False)
    train(table, optimizer, [1, 2, 3], 2)
    saver.dump(table, tmp_path)
    train(table, optimizer, [3, 9], 2)
    saver.dump(table, tmp_path, since="last")
    assert shard_of(tmp_path, 1)["keys"].tolist() == [3, 9]
    other = restored(sok, tmp_path, "decayed", capacity=64, use_hashtable=False)[0]
    check_same(state(other), state(table))


def test_compact_leaves_one_base_of_the_same_content(sok, tmp_path):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(30))
    saver.dump(table, tmp_path)
    train(table, optimizer, [100, 3], 2)
    table.erase([4])
    saver.dump(table, tmp_path, since="last")
    saver.compact(table, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    full = tmp_path / "full"
    saver.dump_to_file(table, full, sok1_files=False)
    manifest = json.loads((full / "grown.json").read_text())
    with np.load(full / manifest["shards"][0]["file"]) as arrays:
        check_same(shard_of(tmp_path, 0), dict(arrays))


def test_compact_that_wrote_what_cannot_be_read_removes_nothing(sok, tmp_path, monkeypatch):
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(30))
    saver.dump(table, tmp_path)
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

    for wrong, message in (
        (without_slots, "slot variables and records"),
        (backwards, "out of order"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(deltas.MergedDump, "sorted", wrong)
            with pytest.raises(RuntimeError, match=message):
                saver.compact(table, tmp_path)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    saver.compact(table, tmp_path)
    check_same(state(restored(sok, tmp_path)[0]), state(table))


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
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(20))
    for since in (None, "last", "last"):
        saver.dump(table, tmp_path / "chain", since=since)
        train(table, optimizer, [1, 2])
    other = made(sok)[0]
    sok.assign(other, [1], tf.ones([1, DIM]))
    return tmp_path / "chain", other, state(other)


def files_of(folder):
    manifest = json.loads((folder / "grown.json").read_text())
    return [folder / d["shards"][0]["file"] for d in [manifest, *manifest["deltas"]]]


def edited(folder, change):
    """The manifest with other deltas, and a checksum that fits."""
    manifest = json.loads((folder / "grown.json").read_text())
    change(manifest["deltas"])
    manifest["sha256"] = manifest_file._checksum(manifest)
    (folder / "grown.json").write_text(json.dumps(manifest))


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
    shards = json.loads((folder / "grown.json").read_text())["shards"]
    edited(folder, lambda deltas: deltas[0].update(shards=shards))


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
    check_same(state(table), before)


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
    saver, (table, optimizer) = sok.Saver(), made(sok)
    train(table, optimizer, range(5))
    saver.dump(table, tmp_path)
    saver.restore(table, tmp_path, rows_only=True)
    train(table, optimizer, [2, 7])
    saver.dump(table, tmp_path, since="last")
    assert shard_of(tmp_path, 1)["keys"].tolist() == [0, 1, 2, 3, 4, 7]
    check_same(state(restored(sok, tmp_path)[0]), state(table))
