"""A warning where a rank owns far more keys than others: keys with a common factor."""

import itertools
import warnings

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm

RANDOM = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 40_000, np.int64)


def told(monkeypatch, batches, rank=0, world_size=2, **placement):
    """Warnings of the routing of these batches, as rank `rank` sees them."""
    monkeypatch.setattr(comm.current(), "rank", rank)
    name = f"t{np.random.default_rng().integers(2**60)}"  # of an op that has seen no keys
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for keys in batches:
            libraries.ops().sok_route(
                problems=[],
                keys=[tf.constant(keys)],
                row_splits=[tf.zeros([0], tf.int64)],
                weights=[tf.zeros([0])],
                world_size=world_size,
                table_names=[name],
                dims=[1],
                combiners=["none"],
                max_hotness=[0],
                key_limits=[0],
                batch_multiples=[1],
                **placement,
            )
    return [str(w.message) for w in caught if "times the mean" in str(w.message)]


def batches_of(keys, size=512):
    return [keys[i : i + size] for i in range(0, len(keys), size)]


@pytest.mark.parametrize(
    "keys, world_size, ratio",
    [
        (np.arange(1, 2000) * 10**15, 2, "2.00"),
        (np.arange(4000) << 22, 8, "8.00"),
        (np.concatenate([np.arange(1000) * 2, np.arange(100)]), 2, "1.90"),
    ],
)
def test_uneven(sok, monkeypatch, keys, world_size, ratio):
    (message,) = told(monkeypatch, [keys.astype(np.int64)], 0, world_size)
    assert f"rank 0 owns {ratio} times the mean" in message
    assert told(monkeypatch, [keys.astype(np.int64)], 1, world_size) == []  # rank 0 warns


@pytest.mark.parametrize(
    "batches, world_size",
    [
        ([RANDOM], 2),
        (batches_of(RANDOM), 64),
        ([np.arange(5000)], 3),
        ([np.arange(0, 400, 2)] * 2000, 2),  # few keys, often
    ],
)
def test_even_or_few(sok, monkeypatch, batches, world_size):
    assert told(monkeypatch, batches, 0, world_size) == []


@pytest.mark.ranks
def test_ranks(sok, on_threads):
    """Once, though both lookups of the table and both ranks see it."""

    def look_up():
        table = sok.EmbeddingVariable(2, name="uneven")
        one = tf.function(
            lambda ids: sok.group_embedding_lookup([table], [ids], training=True), autograph=False
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for of_batch in (one.python_function, one):
                for start in range(0, 2000, 100):
                    of_batch(tf.range(start, start + 100, dtype=tf.int64) * 10**15)
        return [str(w.message) for w in caught if "times the mean" in str(w.message)]

    (message,) = itertools.chain(*on_threads(2, look_up))
    assert "Table 'uneven': rank 0 owns 2.00 times the mean" in message
