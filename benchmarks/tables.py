"""W3 and W4: a table through its ops, against TensorFlow's DenseHashTable."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import sok_like as sok
from benchmarks import workloads
from benchmarks.harness import Contender, Match
from benchmarks.steps import DELETED_KEY, EMPTY_KEY
from sok_like.lookup import hash_lookup as group_lookup

PEER = "TF DenseHashTable"
ASSIGN, LOOKUP = "ours, assign", "ours, lookup"
ASSIGN_PRESIZED = "ours presized, assign"
PRESIZED = f"{PEER} presized"


def _dense_hash_table(num_keys, dim):
    """At most half full from the start, so that it never grows."""
    return tf.lookup.experimental.DenseHashTable(
        tf.int64,
        tf.float32,
        default_value=[0.0] * dim,
        empty_key=EMPTY_KEY,
        deleted_key=DELETED_KEY,
        initial_num_buckets=1 << (2 * num_keys - 1).bit_length(),
    )


class _Fresh:
    """A contender that starts every call with an empty table; creating the table is not timed.

    This favours the peer, which touches all of its memory when it is made. Ours does so as it
    grows.
    """

    def __init__(self, make, insert, batches):
        self._make, self._batches = make, batches
        self._table = None
        self._function = None
        self._insert = insert

    def prepare(self, i):
        self._table = None
        self._table = self._make()
        table = self._table
        self._function = tf.function(
            lambda *inputs: self._insert(table, *inputs)
        ).get_concrete_function(
            *(tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in self._batches[0])
        )

    def call(self, i):
        for inputs in self._batches:
            self._function(*inputs)


def w3(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """Ours with and without `initial_capacity`; the peer with it. All are given rows.

    One of our contenders inserts as training does: by a lookup, which makes and returns initial
    rows.
    """
    data = workloads.w3(quick)
    rows = np.random.default_rng(3).random((data.batch, data.dim), np.float32)
    cuts = range(0, len(data.keys), data.batch)
    keys = [tf.constant(data.keys[c : c + data.batch]) for c in cuts]
    with_rows = [(k, tf.constant(rows[: len(k)])) for k in keys]

    def insert_dense(table, keys, rows):
        table.insert(keys, rows)

    def assign(table, keys, rows):
        sok.assign(table, keys, rows)

    def look(table, keys):
        return group_lookup.lookup([group_lookup.HashFeature(table, keys)], training=True)

    def ours(initial_capacity=0):
        return sok.EmbeddingVariable(data.dim, initial_capacity=initial_capacity, name="w3")

    def contender(make, insert, batches):
        fresh = _Fresh(make, insert, batches)
        return Contender(fresh.call, fresh.prepare, warm_up=1)

    contenders = {
        ASSIGN: contender(ours, assign, with_rows),
        ASSIGN_PRESIZED: contender(lambda: ours(len(data.keys)), assign, with_rows),
        LOOKUP: contender(ours, look, [(k,) for k in keys]),
        PRESIZED: contender(
            lambda: _dense_hash_table(len(data.keys), data.dim), insert_dense, with_rows
        ),
    }
    return contenders, [
        Match("W3 inserting with growth", ASSIGN, PRESIZED, 0.35),
        Match("W3 inserting", ASSIGN_PRESIZED, PRESIZED, 0.35),
        Match("W3 inserting with growth", LOOKUP, PRESIZED),
    ]


def w4(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """`find` returns rows and which keys were present; `lookup` is a layer's evaluation."""
    data = workloads.w3(quick)
    picks = workloads.w4(quick)
    keys = [(tf.constant(data.keys[p]),) for p in picks]
    positions = [(tf.constant(p),) for p in picks]
    table = sok.EmbeddingVariable(data.dim, name="w4")
    peer = _dense_hash_table(len(data.keys), data.dim)
    for start in range(0, len(data.keys), data.batch):
        part = tf.constant(data.keys[start : start + data.batch])
        group_lookup.lookup([group_lookup.HashFeature(table, part)], training=True)
        peer.insert(part, tf.zeros([len(part), data.dim]))
    array = tf.Variable(tf.zeros([len(data.keys), data.dim]))

    find = tf.function(lambda keys: table.find(keys))
    look = tf.function(
        lambda keys: group_lookup.lookup([group_lookup.HashFeature(table, keys)], training=False)
    )
    theirs = tf.function(lambda keys: peer.lookup(keys))
    gather = tf.function(lambda positions: tf.gather(array, positions))

    def cycled(function, batches):
        return Contender(lambda i: function(*batches[i % len(batches)]), warm_up=20)

    contenders = {
        "ours, find": cycled(find, keys),
        LOOKUP: cycled(look, keys),
        f"{PEER} lookup": cycled(theirs, keys),
        "tf.gather": cycled(gather, positions),
    }
    return contenders, [
        Match("W4 warm lookup", "ours, find", f"{PEER} lookup", 0.25),
        Match("W4 warm lookup", LOOKUP, f"{PEER} lookup", 0.25),
        Match("W4 warm lookup", "ours, find", "tf.gather"),
    ]
