"""A fault on one rank: every rank raises its message soon, and no key is lost."""

import re
import time

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.ranks import HANG_LIMIT
from tests.training import rows_by_key

LIMIT = HANG_LIMIT / 2  # seconds, also on a slow machine; what hangs is ended after them all
# Options of a layer, wrong keys and right ones, and the text of the error. The first rank has the
# wrong keys, of `rows` the last one, and is named, but for `pairs`.
FAULTS = {
    "rows": (
        {"slot_num": 2, "max_nnz": 1, "max_vocabulary_size_per_gpu": 10, "use_hashtable": False},
        lambda ranks: [[1], [2], [3], [10 * ranks]],
        *([[1], [2]], r"must lie in \[0, {rows}\).*key {rows}.*'rows'"),
    ),
    "short": (
        *({"slot_num": 1, "max_nnz": 2}, lambda ranks: [[1], [2, 3, 4]], [[1, 2]]),
        r"at most 2 keys.*3 keys in row 1.*'short'",
    ),
    "pairs": (
        *({"slot_num": 2, "max_nnz": 2}, lambda ranks: [[1], [2], [3]], [[1], [2]]),
        r"multiple of 2.*3.*'pairs'",
    ),
    # As many rows as two samples have, but not two in each sample.
    "uneven": (
        *({"slot_num": 2, "max_nnz": 2}, lambda ranks: [[[1]], [[2], [3], [4]]], [[[1], [2]]]),
        r"slot_num=2 fields. Received: 1",
    ),
}


def check_raised(layer, bad, good, spec, error, words):
    """`bad` input on the first or the last rank, eagerly and compiled; then `good` on all."""
    last = sok.size() - 1
    culprit = last if layer.name == "rows" else 0
    if last and layer.name != "pairs":
        words = f"rank {last if layer.name in ('rows', 'full') else 0}: .*{words}"
    for call in (layer, tf.function(layer, input_signature=[spec])):
        size, start = int(layer.table.size()), time.monotonic()
        with pytest.raises(error) as raised:
            call(bad if sok.rank() == culprit else good)
        assert re.search(words, raised.value.message, re.S)
        assert time.monotonic() - start < LIMIT
        assert int(layer.table.size()) == size or layer.name != "full"
    assert (layer(good, training=True).numpy() > 0).all()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_gets_the_message_and_can_go_on(on_threads, name, world_size):
    options, bad, good, words = FAULTS[name]

    def check():
        of_all = {"combiner": "mean", "max_vocabulary_size_per_gpu": None, "embedding_vec_size": 2}
        of_all |= {"embedding_initializer": "ones", "name": name}
        layer = sok.DistributedEmbedding(**{**of_all, **options})
        given = [tf.ragged.constant(keys, tf.int64) for keys in (bad(world_size), good)]
        spec = tf.RaggedTensorSpec([None] * given[1].shape.rank, tf.int64)
        error = tf.errors.InvalidArgumentError
        check_raised(layer, *given, spec, error, words.format(rows=10 * world_size))

    on_threads(world_size, check)


@pytest.mark.parametrize("world_size", [1, 3])
def test_full_table_loses_nothing(on_threads, world_size):
    """Rank 0 sends too many keys of the last rank's; nothing is lost, and no rank goes on."""

    def check():
        layer = sok.All2AllDenseEmbedding(
            4, 2, 1, 1, dynamic_input=True, name="full", embedding_initializer="ones"
        )
        good, bad = (tf.range(n, dtype=tf.int64) * world_size + world_size - 1 for n in (3, 5))
        layer(good, training=True)
        before = rows_by_key(layer.table)
        error = tf.errors.ResourceExhaustedError
        words = r"max_capacity=4.*2 new keys at size 3.*'full'"
        check_raised(layer, bad, good, tf.TensorSpec([None], tf.int64), error, words)
        assert rows_by_key(layer.table) == before

    on_threads(world_size, check)


def test_assign_overfills_one_rank_only(sok, on_threads):
    def check():
        variable = sok.EmbeddingVariable(2, name="assigned_full", capacity=4)
        keys = np.arange(6) * 2 + 1
        if sok.rank() == 0:
            sok.assign(variable, keys, np.ones([6, 2]))
        else:
            words = r"max_capacity=4. Received: 6 new keys at size 0 \(table 'assigned_full'\)"
            with pytest.raises(tf.errors.ResourceExhaustedError, match=words):
                sok.assign(variable, keys, np.ones([6, 2]))
        assert int(variable.size()) == 0

    on_threads(2, check)
