"""Group lookups in one process, against stock lookups in dense tables and against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras
KEYS = np.array([0, -1, 7, 2**40, -(2**63), 2**63 - 1, 12, 5], np.int64)


def rows_of(dim, seed):
    return np.random.default_rng(seed).normal(size=[len(KEYS), dim]).astype(np.float32)


def make_ev(sok, name, dim, seed=0):
    table = sok.EmbeddingVariable(dim, name=name)
    sok.assign(table, KEYS, rows_of(dim, seed))
    return table


def make_variable(dim, seed=0):
    return tf.Variable(rows_of(dim, seed))


def samples(seed=0):
    """Positions in KEYS and weights, lists of lists; empty samples at the end and between."""
    rng = np.random.default_rng(seed)
    lengths = [2, 0, 3, 1, 4, 0]
    positions = [rng.integers(0, len(KEYS), n).tolist() for n in lengths]
    weights = [rng.uniform(0.5, 2.0, n).astype(np.float32).tolist() for n in lengths]
    return positions, weights


def ragged(lists, dtype=tf.int64):
    return tf.ragged.constant(lists, dtype=dtype, ragged_rank=1)


def keys_at(positions):
    return [[int(KEYS[p]) for p in sample] for sample in positions]


def expected(table, positions, combiner, weights=None):
    """What `tf.nn.embedding_lookup_sparse` finds, and zeros for last samples without ids."""
    given = None if weights is None else tf.cast(weights, table.dtype).to_sparse()
    found = tf.nn.embedding_lookup_sparse(table, positions.to_sparse(), given, combiner=combiner)
    return tf.pad(found, [[0, positions.shape[0] - found.shape[0]], [0, 0]])


def ways(function):
    """The same call eagerly and in a graph."""
    yield function()
    yield tf.function(function, autograph=False)()


def test_rows_whose_weights_sum_to_zero(sok):
    ev, dense = make_ev(sok, "zero", 2), make_variable(2)
    positions, weights = [[1, 2], [3], []], ragged([[1.0, -1.0], [0.0], []], tf.float32)
    for table, ids in ((ev, keys_at(positions)), (dense, positions)):
        for combiner in ("mean", "sqrtn"):
            with tf.GradientTape() as tape:
                (found,) = sok.group_embedding_lookup_sparse(
                    table, [ragged(ids)], combiner, sp_weights=[weights]
                )
                gradient = tape.gradient(tf.reduce_sum(found), table)
            zero_rows = [0, 1, 2] if combiner == "mean" else [1, 2]
            assert (found.numpy()[zero_rows] == 0).all()
            assert np.isfinite(gradient.values).all()


def test_weights_of_a_table_of_doubles_are_doubles(sok):
    table = tf.Variable(rows_of(2, 1), dtype=tf.float64)
    ids, weights = tf.ragged.constant([[1, 2]]), tf.ragged.constant([[1 / 3, 1 / 7]], tf.float64)
    (rows,) = sok.group_embedding_lookup_sparse([table], [ids], ["sum"], sp_weights=[weights])
    expected = table.numpy()[1] / 3 + table.numpy()[2] / 7
    np.testing.assert_allclose(rows, [expected], rtol=1e-15)


@pytest.mark.parametrize("use_ev", [True, False])
def test_sequences(sok, use_ev):
    table = make_ev(sok, "sequence", 3) if use_ev else make_variable(3)
    positions, _ = samples()
    right = tf.gather(rows_of(3, 0), ragged(positions)).to_tensor()
    ids = ragged(keys_at(positions) if use_ev else positions)
    # With a gap before the key, and one place more than the longest sample has.
    gap = tf.SparseTensor([[0, 2], [2, 0]], ids.values[:2], [3, 5])
    right_gap = np.zeros([3, 5, 3], np.float32)
    right_gap[[0, 2], [2, 0]] = rows_of(3, 0)[positions[0]]
    # uint64 keys are those of the same bits.
    unsigned = ids.with_values(tf.bitcast(ids.values, tf.uint64)) if use_ev else ids

    def ours():
        with tf.GradientTape() as tape:
            found = sok.group_embedding_lookup_sparse(
                [table] * 3, [unsigned, ids.to_sparse(), gap], "mean", is_sequence=True
            )
            loss = tf.add_n([tf.reduce_sum(f) for f in found])
        gradient = tape.gradient(loss, table)
        return found, tf.reduce_sum(gradient.values)

    for found, total in ways(ours):
        np.testing.assert_array_equal(found[0], right)
        np.testing.assert_array_equal(found[1], right)
        np.testing.assert_array_equal(found[2], right_gap)
        assert float(total) == 3 * (10 + 10 + 2)


def test_empty_batches_and_batches_without_ids(sok):
    ev, dense = make_ev(sok, "empty", 2), make_variable(2)
    params = [ev, dense, ev, dense]
    nothing, no_ids = ragged([]), ragged([[], []])
    ids = [nothing, nothing, no_ids, no_ids]
    for kinds in (ids, [i.to_sparse() for i in ids]):
        for combiner in ("mean", "sum", "sqrtn"):
            found = sok.group_embedding_lookup_sparse(params, kinds, combiner)
            assert [f.shape for f in found] == [(0, 2), (0, 2), (2, 2), (2, 2)]
            assert all((f.numpy() == 0).all() for f in found)
        found = sok.group_embedding_lookup_sparse(params, kinds, "sum", is_sequence=True)
        assert [f.shape for f in found] == [(0, 0, 2), (0, 0, 2), (2, 0, 2), (2, 0, 2)]


def test_dense_ids_of_any_shape(sok):
    ev, dense = make_ev(sok, "dense", 3), make_variable(3, 5)
    positions = np.array([[1, 2, 3], [3, 0, 1]])
    params, ids = [ev, dense, ev, dense], [KEYS[positions], positions, KEYS[4], positions[0]]

    def ours():
        with tf.GradientTape() as tape:
            found = sok.group_embedding_lookup(params, ids)
            loss = tf.add_n([tf.reduce_sum(f) for f in found])
        return found, [tf.reduce_sum(g.values) for g in tape.gradient(loss, [ev, dense])]

    for found, totals in ways(ours):
        right = [
            tf.nn.embedding_lookup(rows_of(3, seed), i)
            for seed, i in ((0, positions), (5, positions), (0, 4), (5, positions[0]))
        ]
        for ours_, right_ in zip(found, right, strict=True):
            np.testing.assert_array_equal(ours_, right_)
        assert [float(t) for t in totals] == [3 * 7, 3 * 9]


def test_weights_of_a_keras_layer(sok):
    """Keras 3 wraps an EmbeddingVariable and a plain one; both are taken as they are."""
    layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="wrapped")
    plain = tf.keras.layers.Embedding(8, 2)
    plain.build([None])
    sok.assign(layer.table, KEYS, rows_of(2, 0))
    params = [layer.embedding_variable, plain.trainable_weights[0]]
    found = sok.group_embedding_lookup_sparse(
        params, [ragged(keys_at([[1]])), ragged([[1]])], "sum"
    )
    np.testing.assert_array_equal(found[0], rows_of(2, 0)[[1]])
    np.testing.assert_array_equal(found[1], plain(np.array([1])))


def test_v1_graph_and_session(sok, graph):
    """Placeholders without shapes, a partitioned variable of one part, Adagrad."""
    v1 = tf.compat.v1
    init = sok.Init(global_batch_size=2, seed=1)
    table = sok.EmbeddingVariable(2, name="v1", initializer="ones")
    with v1.variable_scope("s", partitioner=v1.fixed_size_partitioner(1)):
        dense = v1.get_variable("dense", [4, 2], initializer=v1.ones_initializer())
    sparse = v1.sparse_placeholder(tf.int64)
    weights = v1.sparse_placeholder(tf.float32)
    found = sok.group_embedding_lookup_sparse(
        [table, dense, table], [sparse] * 3, ["mean", "sum", "sqrtn"], sp_weights=[weights] * 3
    )
    loss = tf.add_n([tf.reduce_sum(f) for f in found[:2]])
    optimizer = sok.OptimizerWrapper(v1.train.AdagradOptimizer(0.1, 1.0))
    train = optimizer.minimize(loss)
    size = table.size()
    with v1.Session() as session:
        session.run(init)
        session.run(v1.global_variables_initializer())
        value = v1.SparseTensorValue([[0, 0], [0, 1], [2, 0]], [1, 3, 1], [4, 3])
        w = v1.SparseTensorValue(value.indices, [1.0, 3.0, 0.5], [4, 3])
        outputs = session.run(found, {sparse: value, weights: w})
        right = [[1, 0, 1, 0], [4, 0, 0.5, 0], [4 / np.sqrt(10), 0, 1, 0]]
        for output, column in zip(outputs, right, strict=True):
            np.testing.assert_allclose(output, np.tile(column, [2, 1]).T, rtol=1e-6)
        session.run(train, {sparse: value, weights: w})
        after = session.run(found[1], {sparse: value, weights: w})
        # Gradients 1.5 of row 1 and 3 of row 3: Adagrad from an accumulator of 1.
        rows = [1 - 0.1 * g / np.sqrt(1 + g * g) for g in (1.5, 3)]
        np.testing.assert_allclose(after[0], [rows[0] + 3 * rows[1]] * 2, rtol=1e-6)
        assert session.run(size) == 2
        wrong = v1.SparseTensorValue([[0, 0], [0, 2], [2, 0]], [1.0, 3.0, 0.5], [4, 3])
        with pytest.raises(tf.errors.InvalidArgumentError, match="one weight per id"):
            session.run(found, {sparse: value, weights: wrong})
