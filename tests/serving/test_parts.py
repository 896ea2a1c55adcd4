"""Hash tables that the ranks write in parts: a SavedModel has their rows."""

import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.serving import parts


class Rows(tf.Module):
    """Tables of several kinds, whose rows are returned beside each other."""

    def __init__(self):
        super().__init__()
        self.tables = [
            sok.EmbeddingVariable(4, name="sharded_hash"),
            sok.EmbeddingVariable(4, name="sharded_narrow", dtype="bfloat16"),
            sok.EmbeddingVariable(4, name="sharded_plain", capacity=40, use_hashtable=False),
        ]

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
    model, keys = Rows(), _sharded_keys(count)
    for table, ids in zip(model.tables, (keys, keys, np.arange(40)[:count]), strict=True):
        rows = np.random.default_rng(len(ids)).normal(size=[len(ids), 4]).astype(np.float32)
        sok.assign(table, ids, rows)
    with mock.patch.object(parts, "CHUNK_BYTES", 100_000):  # so that there are several parts
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
            (2, "shared", 50_000, "int8", "zeros", True),
            (2, "shared", 1, "float32", "zeros", False),
            # `ram://` is another file system in each process. So ranks send their parts there.
            (2, "sent", 3_000, "bfloat16", "initial", True),
        ]
    ],
)
def test_a_saved_model_has_the_rows_of_all_ranks(
    on_processes, tmp_path, world_size, where, count, row_dtype, missing, follows
):
    place = f"{tmp_path}/model" if where == "shared" else f"ram://parts/{count}/model"
    on_processes(world_size, in_parts, place, count, row_dtype, missing, follows)
