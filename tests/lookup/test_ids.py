"""SparseTensors whose entries are in no order: each door sorts them by sample first."""

import functools

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2) ** 2
INDICES = np.array([[2, 1], [0, 0], [2, 0], [0, 1], [3, 0]])  # sample 1 has no ids
IDS = np.array([4, 1, 3, 5, 2], np.int64)
WEIGHTS = np.array([0.5, 2.0, 3.0, 1.0, 4.0], np.float32)
SHAPE = [4, 2]


def sparse(values=IDS):
    return tf.SparseTensor(INDICES, tf.constant(values), SHAPE)


def samples(weights=None):
    """Sums by sample, NumPy."""
    sums = np.zeros([4, 2], np.float32)
    given = np.ones(5) if weights is None else weights
    for (sample, _), i, w in zip(INDICES, IDS, given, strict=True):
        sums[sample] += np.float32(w) * ROWS[i]
    return sums


def filled(sok, name):
    table = sok.EmbeddingVariable(2, name=name)
    sok.assign(table, np.arange(6), ROWS)
    return table


def distributed_embedding(sok):
    layer = sok.DistributedEmbedding("sum", None, 2, slot_num=1, max_nnz=2, name="distributed")
    sok.assign(layer.table, np.arange(6), ROWS)
    return lambda: [layer(sparse())[:, 0]], [samples()]


def hash_embedding(sok):
    layer = sok.HashEmbedding(2, "sum", name="hashed")
    layer.build()
    sok.assign(layer.table, np.arange(6), ROWS)
    return lambda: [layer(sparse())], [samples()]


def dense_embedding(sok):
    layer = sok.Embedding(6, 2, combiner="sum", name="dense")
    layer.build()
    layer.set_weights([ROWS])
    right = [samples(), samples(WEIGHTS)]
    return lambda: [layer(sparse()), layer(sparse(), weights=sparse(WEIGHTS))], right


def group_of_tables(sok):
    pair, weights = [filled(sok, "group"), tf.Variable(ROWS)], [None] * 2 + [sparse(WEIGHTS)] * 2
    look_up = functools.partial(sok.group_embedding_lookup_sparse, sp_weights=weights)
    right = [samples()] * 2 + [samples(WEIGHTS)] * 2
    return lambda: look_up(pair * 2, [sparse()] * 4, "sum"), right


def group_of_sequences(sok):
    pair = [filled(sok, "sequence"), tf.Variable(ROWS)]
    look_up = functools.partial(sok.group_embedding_lookup_sparse, is_sequence=True)
    right = np.zeros([4, 2, 2], np.float32)
    right[tuple(INDICES.T)] = ROWS[IDS]
    return lambda: look_up(pair, [sparse()] * 2, "sum"), [right] * 2


def embedding_lookup_without_combiner(sok):
    variable = tf.Variable(ROWS)

    def call():
        found = sok.embedding_lookup(variable, sparse())
        return [found.flat_values, tf.cast(found.row_splits, tf.float32)]

    return call, [ROWS[IDS[[1, 3, 2, 0, 4]]], [0, 2, 2, 4, 5]]  # by sample, then by column


def dmp_layer(sok):
    layer = sok.dist_model_parallel.DistributedEmbedding(
        [sok.Embedding(6, 2, combiner="sum"), sok.HashEmbedding(2, "sum", name="dmp_hashed")]
    )
    layer([sparse(), sparse()])
    layer.set_weights([ROWS, (np.arange(6), ROWS)])
    return lambda: layer([sparse(), sparse()]), [samples()] * 2


DOORS = (
    *(distributed_embedding, hash_embedding, dense_embedding),
    *(group_of_tables, group_of_sequences, embedding_lookup_without_combiner, dmp_layer),
)


@pytest.mark.parametrize("door", DOORS)
def test_entries_in_any_order(sok, door):
    call, right = door(sok)
    for look_up in (call, tf.function(call, autograph=False)):
        for found, expected in zip(look_up(), right, strict=True):
            np.testing.assert_allclose(found, expected)


def test_a_group_is_sorted_by_one_op(sok):
    tables = [filled(sok, f"t{i}") for i in range(5)]

    @tf.function(autograph=False)
    def look(ids, weighted):
        return sok.group_embedding_lookup_sparse(
            tables,
            [ids] * 4 + [weighted],
            "sum",
            sp_weights=[None] * 4 + [weighted.with_values(WEIGHTS)],
        )

    ids = sparse(IDS.astype(np.int32))
    ops = [op.type for op in look.get_concrete_function(ids, sparse()).graph.get_operations()]
    assert ops.count("SokSparseSamples") == 1
    assert not {"SparseReorder", "LowerBound", "StridedSlice", "Range"} & set(ops)
    right = np.stack([samples()] * 4 + [samples(WEIGHTS)])
    np.testing.assert_allclose(tf.stack(look(ids, sparse())), right)


@pytest.mark.parametrize("row", [-1, 4])
def test_an_index_outside_of_the_batch(sok, row):
    table = filled(sok, "outside")
    indices = INDICES.copy()
    indices[4, 0] = row
    ids = tf.SparseTensor(indices, tf.constant(IDS), SHAPE)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row_splits must begin.*'outside'"):
        sok.group_embedding_lookup_sparse([table], [ids], "sum")


def test_a_sparse_tensor_with_too_few_values(sok):
    table = filled(sok, "short")

    @tf.function(
        input_signature=[tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([None], tf.int64)]
    )
    def look(indices, values):
        return sok.group_embedding_lookup_sparse(
            [table], [tf.SparseTensor(indices, values, SHAPE)], "sum"
        )

    with pytest.raises(tf.errors.InvalidArgumentError, match="an index and a weight for each key"):
        look(INDICES, IDS[:4])
