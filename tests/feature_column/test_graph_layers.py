"""`sok.feature_column.input_layer` in graphs, against stock `tf.compat.v1...input_layer`."""

import numpy as np
import pytest
import tensorflow as tf

from tests.feature_column import cases

v1 = tf.compat.v1
stock = v1.feature_column


@pytest.fixture
def fc(sok, graph):
    sok.Init(global_batch_size=4, seed=3)
    return sok.feature_column


def run(*fetches, before=()):
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(v1.tables_initializer())
        session.run(list(before))
        return session.run(fetches[0] if len(fetches) == 1 else fetches)


def assign(sok):
    def to(table, rows):
        if isinstance(table, sok.EmbeddingVariable):
            return sok.assign(table, np.arange(cases.BUCKETS), rows)
        return table.assign(rows)

    return to


def operations(graph, kind):
    return [op for op in graph.get_operations() if op.type == kind]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_equals_stock(sok, fc, graph, kind):
    """Order, shape, values and gradients; all combiners, weights, shared tables, other columns."""
    held, parts = {}, {}
    output = fc.input_layer(
        cases.tensors(kind),
        cases.group_columns(fc),
        cols_to_vars=held,
        cols_to_output_tensors=parts,
    )
    assert len(operations(graph, "SokLookup")) == len(cases.GROUPS) + 1
    right, factors, right_gradients = cases.expected()
    assert output.shape == right.shape and output.dtype == tf.float32
    assert [column.name for column in parts] == cases.NAMES
    gradients = cases.dense_gradients(output, factors, held)
    ready = cases.assignments(held, assign(sok))
    found, gradients, parts = run(output, gradients, parts, before=ready)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate(list(parts.values()), 1), found)
    assert set(gradients) == set(right_gradients) == set(cases.DIMS)
    for name, gradient in right_gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-6, err_msg=name)


def test_names_are_those_of_stock(fc, graph):
    fc.input_layer(cases.tensors("ragged"), cases.group_columns(fc))
    ours = {variable.name for variable in v1.global_variables()}
    assert ours == {variable.name for variable in v1.get_collection("model_variables")}
    with tf.Graph().as_default():
        stock.input_layer(cases.tensors("sparse"), cases.stock_columns())
        assert ours == {variable.name for variable in v1.global_variables()}


def test_stock_input_layer_takes_our_columns(sok, fc, graph):
    """Each table looked up by itself, and the same values."""
    ours, again = {}, {}
    columns = cases.group_columns(fc)
    found = fc.input_layer(cases.tensors("sparse"), columns, cols_to_vars=ours)
    before = len(operations(graph, "SokLookup"))
    with v1.variable_scope("again"):
        other = stock.input_layer(
            cases.tensors("sparse"),
            [c for c in columns if c.name[:4] != "site"],
            cols_to_vars=again,
        )
    assert len(operations(graph, "SokLookup")) == before + 5  # two of them of the shared table
    ready = cases.assignments(ours, assign(sok))
    ready += cases.assignments(again, assign(sok))
    found, other = run(found, other, before=ready)
    np.testing.assert_allclose(other, found[:, :-3], rtol=0, atol=1e-6)


def columns_of(fc, *names, **arguments):
    """EV-backed columns `[x_embedding]` of 2 floats."""
    return [
        fc.embedding_column(fc.categorical_column_with_embedding(name, tf.int64), 2, **arguments)
        for name in names
    ]


IDS = {"a": np.array([[1, 2], [3, -1]]), "b": np.array([[4], [5]])}


@pytest.mark.parametrize("reuse", [True, v1.AUTO_REUSE])
def test_variable_scopes_share(fc, graph, reuse):
    columns = columns_of(fc, "a", "b")
    with v1.variable_scope("net"):
        first = fc.input_layer(IDS, columns)
    with v1.variable_scope("net", reuse=reuse):
        second = fc.input_layer(IDS, columns)
    other = fc.input_layer(IDS, columns)
    names = [v.name for v in v1.trainable_variables()]
    assert names == [
        f"{scope}/{column}_embedding/embedding_weights:0"
        for scope in ("net/input_layer", "input_layer")
        for column in "ab"
    ]
    first, second, other = run(first, second, other)
    np.testing.assert_array_equal(first, second)
    assert (first != other).all()


def test_a_shared_table_is_found_in_all_the_graph(fc, graph):
    def columns(dim):
        keys = [fc.categorical_column_with_embedding(name, tf.int64) for name in "ab"]
        return fc.shared_embedding_columns(keys, dim)

    first = fc.input_layer(IDS, columns(2))
    second = fc.input_layer(IDS, columns(2))
    assert len(v1.trainable_variables()) == 1
    np.testing.assert_array_equal(*run(first, second))
    with pytest.raises(ValueError, match=r"shape \[None, 3\] for the columns that share it"):
        fc.input_layer(IDS, columns(3))


def test_trainable_and_collections(fc, graph):
    columns = columns_of(fc, "a") + columns_of(fc, "b", trainable=False)
    fc.input_layer(IDS, columns, weight_collections=["mine"])
    assert len(v1.get_collection("mine")) == len(v1.global_variables()) == 2
    assert [v.name for v in v1.trainable_variables()] == [
        "input_layer/a_embedding/embedding_weights:0"
    ]
    with v1.variable_scope("frozen"):
        fc.input_layer(IDS, columns, trainable=False)
    assert len(v1.trainable_variables()) == 1


def test_evaluation_inserts_nothing(fc, graph):
    (column,) = columns = columns_of(fc, "a")
    held = {}
    with v1.variable_scope("net"):
        read = fc.input_layer(IDS, columns, training=False)
    with v1.variable_scope("net", reuse=True):
        train = fc.input_layer(IDS, columns, cols_to_vars=held)
    size = held[column][0].size()
    with v1.Session() as session:
        rows, before = session.run([read, size])
        np.testing.assert_array_equal(session.run(train), rows)
        assert (before, session.run(size)) == (0, 3)


def test_a_stock_column_with_max_norm_is_looked_up_by_tensorflow(fc, graph):
    identity = tf.feature_column.categorical_column_with_identity("a", 6)
    initializer = v1.constant_initializer([[3.0, 4.0]] * 6)
    with fc.group_embedding_column_scope():
        column = fc.embedding_column(identity, 2, initializer=initializer, max_norm=1.0)
    found = run(fc.input_layer({"a": np.array([[1], [2]])}, [column]))
    np.testing.assert_allclose(found, [[0.6, 0.8]] * 2, rtol=1e-6)


def test_sequences(sok, fc, graph):
    ids = tf.ragged.constant([[3, 1], [], [2, 2, 2]], dtype=tf.int64)
    with fc.group_embedding_column_scope("s"):
        columns = [
            fc.embedding_column(fc.sequence_categorical_column_with_embedding(name, tf.int64), 2)
            for name in "ba"
        ]
    found = fc.sequence_input_layer({"a": ids, "b": ids.to_sparse()}, columns)
    assert len(operations(graph, "SokLookup")) == 1
    tables = sorted(v1.trainable_variables(), key=lambda v: v.name)
    rows = [cases.rows_of(name, 2) for name in "ab"]
    ready = [assign(sok)(*pair) for pair in zip(tables, rows, strict=True)]
    right = tf.gather(np.concatenate(rows, 1), ids).to_tensor()
    (found, lengths), right = run(found, right, before=ready)
    np.testing.assert_array_equal(found, right)
    assert lengths.tolist() == [2, 0, 3]
    ragged = {"a": ids, "b": tf.ragged.constant([[3, 1], [2], [2, 2]], dtype=tf.int64)}
    with (
        v1.variable_scope("other"),
        pytest.raises(tf.errors.InvalidArgumentError, match="must have the same lengths"),
    ):
        run(fc.sequence_input_layer(ragged, columns))


def test_refused(fc, graph):
    keys = fc.categorical_column_with_embedding("a", tf.int64)
    column = fc.embedding_column(keys, 2)
    with v1.variable_scope("net", reuse=True), pytest.raises(ValueError, match="reuse=True"):
        fc.input_layer(IDS, columns_of(fc, "a"))
    with pytest.raises(ValueError, match="Dense columns are required.*indicator_column"):
        fc.input_layer(IDS, [keys])
    with pytest.raises(ValueError, match="Duplicate feature column name"):
        fc.input_layer(IDS, [column, fc.embedding_column(keys, 3)])
    with pytest.raises(ValueError, match="Feature missing is not in features"):
        fc.input_layer(IDS, columns_of(fc, "missing"))
    with pytest.raises(ValueError, match="must match the dtype of its column, int64.*string"):
        fc.input_layer({"a": np.array([["x"]])}, [column])
    with pytest.raises(ValueError, match="has keys of a hash table and no number of buckets"):
        stock.input_layer(IDS, [tf.feature_column.indicator_column(keys)])
    with pytest.raises(ValueError, match="has keys of a hash table and no number of buckets"):
        stock.input_layer(IDS, [tf.feature_column.embedding_column(keys, 2)])
    sequence = fc.sequence_categorical_column_with_embedding("a", tf.int64)
    with pytest.raises(ValueError, match="'a_embedding' must not have a sequence"):
        fc.input_layer(IDS, [fc.embedding_column(sequence, 2)])
    with pytest.raises(ValueError, match="must have a sequence categorical column"):
        fc.sequence_input_layer(IDS, [column])
    stock_sequence = tf.feature_column.sequence_categorical_column_with_identity("a", 3)
    with pytest.raises(ValueError, match="Embedding columns of this package are required"):
        fc.sequence_input_layer(IDS, [tf.feature_column.embedding_column(stock_sequence, 2)])
    weighted = fc.weighted_categorical_column(keys, "w")
    ragged = tf.ragged.constant([[1]], dtype=tf.int64)
    with pytest.raises(ValueError, match="'w' must be a RaggedTensor, like 'a'"):
        fc.input_layer({"a": ragged, "w": [[1.0]]}, [fc.embedding_column(weighted, 2)])


def test_outside_of_a_graph(sok):
    fc = sok.feature_column
    columns = columns_of(fc, "a")
    for call in (fc.input_layer, tf.function(fc.input_layer, autograph=False)):
        with pytest.raises(
            RuntimeError, match="must be called in a tf.compat.v1 graph.*DenseFeatures"
        ):
            call(IDS, columns)
    with pytest.raises(RuntimeError, match="SequenceFeatures"):
        sequence = fc.sequence_categorical_column_with_embedding("a", tf.int64)
        fc.sequence_input_layer(IDS, [fc.embedding_column(sequence, 2)])
