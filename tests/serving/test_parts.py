"""Tables that the ranks write in parts: the rows, the memory, and what happens if a rank fails."""

import os
import pathlib
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.serving import contents, parts

each_world = pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])


class Rows(tf.Module):
    """Tables of several kinds, whose rows are returned beside each other."""

    def __init__(self, number=2, dim=4):
        super().__init__()
        self.tables = [
            sok.EmbeddingVariable(dim, name="sharded_hash"),
            sok.EmbeddingVariable(dim, name="sharded_narrow", dtype="bfloat16"),
            sok.EmbeddingVariable(dim, name="sharded_plain", capacity=40, use_hashtable=False),
        ][:number]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "keys")])
    def __call__(self, keys):
        rows = [tf.nn.embedding_lookup(table, keys) for table in self.tables[:2]]
        rows += [tf.nn.embedding_lookup(table, keys % 40) for table in self.tables[2:]]
        return {"rows": tf.stack(rows)}


def _sharded_keys(number):
    """Keys of which 50,000 are more than one rank places, and 1 leaves other ranks without any."""
    return np.arange(number) * 12_345_678_901_234 - 2**58


def narrow(rows, row_dtype):
    """What rows float32 `[..., dim]` are after an export in another dtype."""
    if row_dtype == "float32":
        return rows
    if row_dtype == "bfloat16":
        return tf.cast(tf.cast(rows, tf.bfloat16), tf.float32).numpy()
    wanted = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
    scales = tf.cast(tf.cast(wanted, tf.bfloat16), tf.float32).numpy()
    # To nearest, and then up: bfloat16 has 8 bits.
    above = (scales.view(np.uint32) + 0x10000).view(np.float32)
    scales = np.where((scales < wanted) & (wanted > 0), above, scales)
    return np.rint(rows / np.where(scales > 0, scales, np.float32(1))) * scales


def in_parts(place, count, row_dtype, missing, follows):
    """A SavedModel returns the rows of the tables, those of all ranks."""
    model, keys = Rows(3), _sharded_keys(count)
    for table, ids in zip(model.tables, (keys, keys, np.arange(40)[:count]), strict=True):
        rows = np.random.default_rng(len(ids)).normal(size=[len(ids), 4]).astype(np.float32)
        sok.assign(table, ids, rows)
    with mock.patch.object(contents, "CHUNK_BYTES", 100_000):  # so that there are several parts
        sok.export_saved_model(model, place, missing, row_dtype, refreshable=follows)
    asked = np.r_[keys, 5, -7]
    # What the rows are, by key: float32 of all ranks, by the model's own lookups.
    expected = model(asked)["rows"].numpy()
    absent = np.zeros(expected.shape[:2], bool)
    absent[:2, count:] = True
    if missing == "zeros":
        expected[absent] = 0
    expected[~absent] = narrow(expected[~absent], row_dtype)
    if sok.rank() == 0:
        serve = tf.saved_model.load(place).signatures["serving_default"]
        np.testing.assert_array_equal(serve(keys=tf.constant(asked))["rows"], expected)
        left = [name for name in tf.io.gfile.listdir(os.path.dirname(place)) if "." in name]
        assert [name for name in left if ".deltas" not in name] == []
        if count > 1:
            files = tf.io.gfile.listdir(f"{place}/variables")
            assert len(files) > 2 + sok.size() and np.abs(expected).max() > 1


@pytest.mark.parametrize(
    "world_size, where, count, row_dtype, missing, follows",
    [
        pytest.param(*case, marks=[pytest.mark.ranks] * (case[0] > 1))
        for case in [
            (1, "shared", 3_000, "int8", "initial", False),
            (1, "shared", 0, "float32", "initial", True),
            (2, "shared", 50_000, "float32", "initial", False),
            (2, "shared", 50_000, "bfloat16", "zeros", False),
            (2, "shared", 50_000, "int8", "zeros", True),
            (2, "shared", 1, "float32", "zeros", False),
            # `ram://` is another file system in each process. So ranks send their parts there.
            (2, "sent", 20_000, "int8", "initial", True),
            (2, "sent", 3_000, "bfloat16", "initial", False),
        ]
    ],
)
def test_a_saved_model_has_the_rows_of_all_ranks(
    on_processes, tmp_path, world_size, where, count, row_dtype, missing, follows
):
    place = f"{tmp_path}/model" if where == "shared" else f"ram://parts/{count}/model"
    on_processes(world_size, in_parts, place, count, row_dtype, missing, follows)


def peak_of(call):
    """Bytes of rows that this rank writes in parts, and by how much the call raises its peak."""
    contents.CHUNK_BYTES //= 32
    save, written = parts._save, []

    def counted(prefix, slices):
        rows = [each.value for each in slices if list(each.shape[1:]) == [128]]
        written.extend(4 * np.prod(v.shape) for v in rows if v.dtype == np.float32)
        return save(prefix, slices)

    parts._save = counted
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        call()
    finally:
        contents.CHUNK_BYTES *= 32
        parts._save = save
    return {"peak": _status("VmHWM") - before, "written": int(sum(written))}


def _status(name):
    """Bytes from a line of /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def peak(place):
    """Bytes of a table, those that this rank writes, and by how much an export raises its peak."""
    model, dim, count = Rows(1, 128), 128, 300_000
    sok.export_saved_model(model, place, missing="zeros")  # what TensorFlow needs once
    for at in range(0, count, 20_000):
        keys = np.arange(at, at + 20_000)
        sok.assign(model.tables[0], keys, np.full([len(keys), dim], 0.5, np.float32))
    found = peak_of(lambda: sok.export_saved_model(model, place, missing="zeros"))
    return {"table": 4 * dim * count, **found}


@each_world
def test_no_rank_holds_a_table_and_each_writes_its_share(on_processes, tmp_path, world_size):
    ranks = on_processes(world_size, peak, f"{tmp_path}/model")
    for rank in ranks:
        assert rank["peak"] < 0.5 * rank["table"], rank
        assert rank["written"] < 1.25 * rank["table"] / world_size, rank
    assert sum(rank["written"] for rank in ranks) == ranks[0]["table"]


def failing(own, fails):
    """A scope in which the last rank cannot write those parts of which `fails` is true."""

    def save(prefix, slices):
        if sok.rank() == sok.size() - 1 and fails(slices):
            raise OSError("the disk is full")
        return own(prefix, slices)

    return mock.patch.object(parts, "_save", save)


def cannot(folder):
    """The last rank fails in writing, and in reading rows: all raise, and what was is left."""
    model, last = Rows(1), sok.size() - 1
    sok.assign(model.tables[0], np.arange(50_000), np.ones([50_000, 4], np.float32))
    export = lambda **options: sok.export_saved_model(model, f"{folder}/model", "zeros", **options)  # noqa: E731
    export()
    of_rank = f"rank {last}: " if last else ""
    with failing(parts._save, lambda slices: True):
        with pytest.raises(Exception, match=f"(?s){of_rank}.*the disk is full"):
            export()
    mine = np.arange(50_000)[np.arange(50_000) % sok.size() == last]
    sok.assign(model.tables[0], mine[:1], np.full([1, 4], np.nan, np.float32))
    with pytest.raises(Exception, match="`row_dtype` int8 needs finite rows"):
        export(row_dtype="int8")
    serve = tf.saved_model.load(f"{folder}/model").signatures["serving_default"]
    rows = serve(keys=tf.constant(np.arange(-3, 50_000)))["rows"].numpy()
    assert float(rows.sum()) == 200_000
    if sok.rank() == 0:  # which removes the parts, maybe after others have raised
        assert os.listdir(folder) == ["model"]


@each_world
def test_if_a_rank_fails_all_raise_and_the_previous_model_is_left(
    on_processes, tmp_path, world_size
):
    on_processes(world_size, cannot, str(tmp_path))
