"""Ids of all tables in one RaggedTensor `[num_tables, batch, None]`: a list is the oracle."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.group_embedding.test_lookup_sparse import (
    keys_at,
    make_ev,
    make_variable,
    ragged,
    samples,
)

pytestmark = pytest.mark.keras(slow=True)
COMBINERS = ["mean", "sum", "sqrtn"]


def group(sok, kinds):
    """Tables, and each one's ids and weights; batches of 6, 6 and 2 samples."""
    params = [
        make_ev(sok, f"t{i}", 3, i) if kind == "ev" else make_variable(3, i)
        for i, kind in enumerate(kinds)
    ]
    every = [samples(1), samples(2), ([[1, 2], [3]], [[1.0, 2.0], [0.5]])]
    ids = [
        ragged(keys_at(p) if kind == "ev" else p) for (p, _), kind in zip(every, kinds, strict=True)
    ]
    return params, ids, [ragged(w, tf.float32) for _, w in every]


@pytest.mark.parametrize("kinds", [["ev"] * 3, ["ev", "dense", "ev"]], ids=["tables", "mixed"])
@pytest.mark.parametrize("form", ["plain", "weighted", "other splits", "sequence", "reading"])
def test_is_the_list(sok, kinds, form):
    params, ids, weights = group(sok, kinds)
    is_weighted = form in ("weighted", "other splits")
    if form == "weighted":
        weights = [i.with_values(w.values) for i, w in zip(ids, weights, strict=True)]
    options = {"is_sequence": form == "sequence", "training": form != "reading"}
    one_tensor = tf.ragged.stack(ids), tf.ragged.stack(weights)
    if form == "weighted":
        one_tensor = one_tensor[0], one_tensor[0].with_flat_values(one_tensor[1].flat_values)

    def run(one):
        one_ids, one_weights = one_tensor if one else (ids, weights)
        with tf.GradientTape() as tape:
            found = sok.group_embedding_lookup_sparse(
                params,
                one_ids,
                COMBINERS,
                sp_weights=one_weights if is_weighted else None,
                gradient_scale="sum",
                **options,
            )
            loss = tf.add_n([tf.reduce_sum(f * f) for f in found])
        slices = tape.gradient(loss, params)
        dense = [tf.math.unsorted_segment_sum(g.values, tf.unique(g.indices)[1], 8) for g in slices]
        return found, dense

    expected = run(False)
    traced = [tf.function(run, autograph=False)] if form in ("other splits", "sequence") else []
    for call in (run, *traced):
        found = call(True)
        for ours, right in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(ours, right)
    assert all(np.abs(f).sum() > 0 for f in expected[0])


def test_forms_of_one_tensor(sok):
    """As in a KeyedJaggedTensor, with int32 splits and ids, one size of batch, and no ids."""
    tables = [make_ev(sok, f"t{i}", 2, i) for i in range(2)]
    values, lengths = tf.constant([7, 12, 7, 5, 0], tf.int32), tf.constant([1, 0, 2, 1, 1, 0])
    lists = [
        tf.RaggedTensor.from_row_lengths(values[:3], lengths[:3]),
        tf.RaggedTensor.from_row_lengths(values[3:], lengths[3:]),
    ]
    jagged = tf.RaggedTensor.from_row_lengths(values, lengths)
    right = sok.group_embedding_lookup_sparse(tables, lists, "sum")
    for ids in (
        tf.RaggedTensor.from_uniform_row_length(jagged, 3),
        tf.ragged.stack(lists),
        tf.RaggedTensor.from_nested_row_splits(
            values, [tf.constant([0, 3, 6], tf.int32), tf.cast(jagged.row_splits, tf.int32)]
        ),
    ):
        found = sok.group_embedding_lookup_sparse(tables, ids, "sum")
        for ours, expected in zip(found, right, strict=True):
            np.testing.assert_array_equal(ours, expected)
    spec = tf.RaggedTensorSpec([2, None, None], tf.int64, 2)
    look = tf.function(
        lambda ids: sok.group_embedding_lookup_sparse(tables, ids, "sum"), input_signature=[spec]
    )
    nothing = tf.RaggedTensor.from_nested_row_splits(tf.zeros([0], tf.int64), [[0, 1, 1], [0, 0]])
    assert [f.numpy().tolist() for f in look(nothing)] == [[[0, 0]], []]
    uniform = tf.function(
        lambda flat: sok.group_embedding_lookup_sparse(
            tables, tf.RaggedTensor.from_uniform_row_length(flat, 3), "sum"
        )
    ).get_concrete_function(tf.RaggedTensorSpec([6, None], tf.int64, 1))
    assert [tuple(s) for s in uniform.output_shapes] == [(3, 2), (3, 2)]


def test_takes_one_op_for_all_tables(sok):
    tables = [sok.EmbeddingVariable(2, name=f"t{i}") for i in range(9)]
    spec = tf.RaggedTensorSpec([9, None, None], tf.int64, 2)
    look = tf.function(lambda ids: sok.group_embedding_lookup_sparse(tables, ids, "sum"))
    ops = [op.type for op in look.get_concrete_function(spec).graph.get_operations()]
    assert ops.count("SokGroupSamples") == 1
    assert len(ops) < 9 + 25


IDS = tf.ragged.constant([[[1], [2, 3]], [[0]]], dtype=tf.int64)
WEIGHTS = tf.ragged.constant([[[1.0], [2.0, 3.0]], [[4.0]]])
INVALID, RISE = tf.errors.InvalidArgumentError, "row_splits must rise from 0 to"


def split(values, row_splits):
    return tf.RaggedTensor.from_row_splits(values, row_splits, validate=False)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize(
    "ids, weights, error, words",
    [
        (IDS[:1], None, ValueError, "[num_tables, batch, None].*for 2 tables. Received.*(1, None"),
        (IDS[0], None, ValueError, "a tuple, or one RaggedTensor [num_tables, batch, None]"),
        (IDS.to_sparse(), None, ValueError, "a list or a tuple, or one RaggedTensor"),
        (IDS.to_tensor(), None, ValueError, "a list or a tuple, or one RaggedTensor"),
        (tf.RaggedTensor.from_tensor(IDS.to_tensor()), None, ValueError, "ragged_rank 1"),
        (WEIGHTS, None, TypeError, "`sp_ids` must be integers. Received: float32.*'first', 't"),
        (IDS, IDS, TypeError, "`sp_weights` must be floats. Received: int64"),
        (IDS, WEIGHTS[0], ValueError, "`sp_weights` must be a RaggedTensor of the shape"),
        (IDS, [WEIGHTS[0], WEIGHTS[1]], ValueError, "`sp_weights` must be a RaggedTensor"),
        (IDS, WEIGHTS.to_tensor(), ValueError, "`sp_weights` must be a RaggedTensor"),
        (IDS, tf.ragged.constant([[[1.0], [2.0]], [[3.0, 4.0]]]), INVALID, "one weight per id"),
        (IDS, tf.ragged.constant([[[1.0]], [[2.0, 3.0], [4.0]]]), INVALID, "one weight per id"),
        (split(IDS.values, [0, 3, 2]), None, INVALID, f"the tables' {RISE} 3. Received: 0 3 2"),
        (split(IDS.values, [0, 2, 2]), None, INVALID, f"the tables' {RISE} 3"),
        (IDS.with_values(split([1, 2, 3, 0], [0, 1, 3, 3])), None, INVALID, f"samples' {RISE} 4"),
    ],
)
def test_refused(sok, ids, weights, error, words, is_mixed):
    if is_mixed and "row_splits" in words:
        return  # TensorFlow slices those
    tables = [sok.EmbeddingVariable(2, name=name) for name in ("first", "t")]
    if is_mixed:
        tables[1] = tf.Variable(tf.ones([9, 2]), name="t")
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    with pytest.raises(error, match=f"(?s){pattern}"):
        sok.group_embedding_lookup_sparse(tables, ids, "sum", sp_weights=weights)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_number_of_tables_that_only_the_call_knows(sok, is_mixed):
    tables = [sok.EmbeddingVariable(2, name=f"t{i}") for i in range(3)]
    if is_mixed:
        tables[1] = tf.Variable(tf.ones([9, 2]))
    look = tf.function(
        lambda ids: sok.group_embedding_lookup_sparse(tables, ids, "sum"),
        input_signature=[tf.RaggedTensorSpec([None, None, None], tf.int64, 2)],
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="3 tables"):
        look(IDS)
    assert [len(f) for f in look(tf.concat([IDS, IDS[:1]], 0))] == [2, 1, 2]
