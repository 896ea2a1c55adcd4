"""TensorFlow's own lookups of a table, against the same calls on a dense variable."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.training import train_step

v1 = tf.compat.v1

# Row k of the dense variable is the row of key k. The first keys are not there: by position, and
# not by key, each of these calls would find other rows or none.
KEYS = [30, 7, 19, 4, 11, 0]
ROWS = np.random.default_rng(3).normal(size=[31, 3]).astype(np.float32)
SPARSE = tf.sparse.from_dense(tf.constant([[30, 7, 0], [19, 0, 0], [4, 11, 30]], tf.int64))
RAGGED = tf.RaggedTensor.from_sparse(SPARSE)
WITH_GAPS = tf.SparseTensor([[0, 0], [2, 0], [2, 1]], tf.constant([7, -3, 30], tf.int64), [4, 2])
WEIGHTS = tf.constant([0.5, 2.0, -1.0, 3.0, 0.25, 1.5])


def weights_of(ids, values=WEIGHTS):
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(values)
    return tf.SparseTensor(ids.indices, values[: len(ids.values)], ids.dense_shape)


def sparse(nn, ids, weights=None, **kwargs):
    return lambda table: nn.embedding_lookup_sparse(table, ids, weights, **kwargs)


def safe(nn, ids, weights=None, **kwargs):
    return lambda table: nn.safe_embedding_lookup_sparse(table, ids, weights, **kwargs)


def calls(nn):
    """Lookups of a table, by what is special about them."""
    square = tf.constant([[7, 30], [30, 4]], tf.int64)
    found = {
        "gather": lambda t: tf.gather(t, square),
        "gather of int32": lambda t: tf.gather(t, tf.constant([7, 0, 7])),
        "gather_nd": lambda t: tf.gather_nd(t, square[..., tf.newaxis]),
        "one row": lambda t: t[19],
        "a row by a tensor": lambda t: t[square[0, 1]],
        "sparse_read": lambda t: t.sparse_read(square),
        "embedding_lookup": lambda t: nn.embedding_lookup(t, square),
        "embedding_lookup in a list": lambda t: nn.embedding_lookup([t], square),
        "embedding_lookup with max_norm": lambda t: nn.embedding_lookup(t, square, max_norm=0.7),
        "embedding_lookup of ragged ids": lambda t: nn.embedding_lookup(t, RAGGED),
    }
    for kind, ids in (("sparse", SPARSE), ("ragged", RAGGED)):
        for combiner in (None, "sum", "mean", "sqrtn"):
            if nn is tf.nn or kind == "sparse":  # the rest raises: see below
                found[f"{kind} {combiner}"] = sparse(nn, ids, combiner=combiner)
            found[f"{kind} {combiner} with weights"] = sparse(
                nn, ids, weights_of(ids), combiner=combiner
            )
        found[f"{kind} with max_norm"] = sparse(nn, ids, combiner="sum", max_norm=0.5)
        found[f"{kind} fast"] = sparse(
            nn, ids, weights_of(ids), combiner="sum", allow_fast_lookup=True
        )
    for combiner in ("sum", "mean", "sqrtn"):
        found[f"safe {combiner}"] = safe(nn, WITH_GAPS, combiner=combiner)
        found[f"safe {combiner} with weights"] = safe(
            nn, SPARSE, weights_of(SPARSE), combiner=combiner
        )
        found[f"safe {combiner} with default_id"] = safe(
            nn, WITH_GAPS, weights_of(WITH_GAPS), combiner=combiner, default_id=11
        )
    found["safe in a list"] = lambda t: nn.safe_embedding_lookup_sparse([t], WITH_GAPS)
    found["safe ragged"] = safe(nn, RAGGED, weights_of(RAGGED), max_norm=0.6)
    return found


def values_and_gradient(call, table):
    """What a call returns, and the gradient of a weighted sum of it by key, `[31, 3]`."""
    with tf.GradientTape() as tape:
        found = call(table)
        found = found.flat_values if isinstance(found, tf.RaggedTensor) else found
        factors = tf.reshape(tf.range(tf.size(found, tf.int32), dtype=tf.float32), tf.shape(found))
        loss = tf.reduce_sum(found * (factors + 1))
    gradient = tape.gradient(loss, table)
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.scatter_nd(gradient.indices[:, tf.newaxis], gradient.values, ROWS.shape)
    return found, gradient


@pytest.fixture
def table(sok):
    variable = sok.EmbeddingVariable(3, name="users")
    sok.assign(variable, KEYS, ROWS[KEYS])
    return variable


@pytest.fixture
def of_layer(sok):
    """The same as a layer has it: under Keras 3 in a variable of Keras."""
    layer = sok.All2AllDenseEmbedding(None, 3, 1, 1, dynamic_input=True, name="of_layer")
    sok.assign(layer.embedding_variable, KEYS, ROWS[KEYS])
    yield layer.embedding_variable
    assert layer is not None  # the table lives as long as it


@pytest.mark.parametrize(
    "kind, nn, in_function",
    [
        ("table", tf.nn, False),
        pytest.param("of_layer", v1.nn, True, marks=pytest.mark.keras(slow=True)),
    ],
)
def test_lookups_of_tensorflow(request, kind, nn, in_function):
    table = request.getfixturevalue(kind)

    def all_of(table):
        return {name: values_and_gradient(call, table) for name, call in calls(nn).items()}

    expected = all_of(tf.Variable(ROWS))
    found = (tf.function(all_of, autograph=False) if in_function else all_of)(table)
    for name, (rows, gradient) in expected.items():
        np.testing.assert_allclose(found[name][0], rows, rtol=1e-5, atol=1e-6, err_msg=name)
        gradient, of = tf.convert_to_tensor(gradient), f"gradient of {name}"
        np.testing.assert_allclose(found[name][1], gradient, rtol=1e-4, atol=1e-5, err_msg=of)


def test_weights_have_the_gradient_they_have_on_a_dense_variable(table):
    gradients = []
    for params in (table, tf.Variable(ROWS)):
        weights = tf.Variable(WEIGHTS)
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup_sparse(params, SPARSE, weights_of(SPARSE, weights))
            loss = tf.reduce_sum(found**2)
        gradients.append(tape.gradient(loss, weights).numpy())
    np.testing.assert_allclose(*gradients, rtol=1e-5)
    assert gradients[0].any()


@pytest.mark.keras
@pytest.mark.parametrize("kind", ["weighted", "of_layer"])
def test_training_over_ranks(on_threads, kind):
    """Every rank's gradients reach the key's owner; keys meet on both ranks."""
    ids = [SPARSE, tf.sparse.from_dense(tf.constant([[7], [19]], tf.int64))]
    rate, dense = 0.5, tf.Variable(ROWS)

    def found_on(rank, table):
        if kind == "of_layer":  # under Keras 3 a variable of Keras
            return tf.nn.embedding_lookup(table, ids[rank].values)
        return sparse(tf.nn, ids[rank], weights_of(ids[rank]), combiner="sum")(table)

    with tf.GradientTape() as tape:
        expected = [found_on(rank, dense) for rank in range(2)]
        loss = tf.add_n([tf.reduce_sum(found**2) for found in expected])
    after = dense - rate * tf.convert_to_tensor(tape.gradient(loss, dense))

    def check():
        table, rank = sok.EmbeddingVariable(3, name="by_key"), sok.rank()
        if kind == "of_layer":
            layer = sok.All2AllDenseEmbedding(None, 3, 1, 1, name="by_key_layer")
            table = layer.embedding_variable
        sok.assign(table, np.arange(31), ROWS)

        def loss_of():
            found = found_on(rank, table)
            return tf.reduce_sum(found**2), found

        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(rate))
        _, found = train_step(optimizer, table, loss_of)
        np.testing.assert_allclose(found, expected[rank], rtol=1e-6)
        np.testing.assert_allclose(tf.gather(table, np.arange(31)), after, rtol=1e-5)

    on_threads(2, check)


# ---- which keys are inserted ----


def test_lookups_insert_the_keys_they_look_up_and_no_others(sok):
    table = sok.EmbeddingVariable(3, name="grows")
    tf.nn.safe_embedding_lookup_sparse(table, WITH_GAPS, combiner="sum")
    assert sorted(sok.export(table)[0].numpy()) == [7, 30]  # neither -3 nor a default
    tf.nn.safe_embedding_lookup_sparse(
        table, SPARSE, weights_of(SPARSE), combiner="mean", default_id=2
    )
    assert sorted(sok.export(table)[0].numpy()) == [2, 4, 7, 11, 30]  # 19 has a negative weight
    assert table[-3].shape == (3,)  # a key, not a position from the end
    assert -3 in sok.export(table)[0].numpy()


# ---- what has no answer by key ----

REFUSED = {
    "matmul": lambda v: tf.matmul(v, tf.ones([3, 2])),
    "matmul in a function": lambda v: tf.function(lambda: tf.matmul(v, tf.ones([3, 2])))(),
    "a sum": tf.reduce_sum,
    "a regularizer": tf.nn.l2_loss,
    "an operator": lambda v: v + 1,
    "a reflected operator": lambda v: 2.0 * v,
    "a tensor": tf.convert_to_tensor,
    "identity": tf.identity,
    "shape": tf.shape,
    "an array": np.asarray,
    "a mean of NumPy's": np.mean,
    "iteration": list,
    "a slice": lambda v: v[1:3],
    "an element": lambda v: v[3, 0],
    "several keys": lambda v: v[[3, 4]],
    "other columns": lambda v: tf.gather(v, [0, 1], axis=1),
    "elements": lambda v: tf.gather_nd(v, [[3, 0]]),
    "ragged ids without weights, of v1": lambda v: v1.nn.embedding_lookup_sparse(v, RAGGED, None),
    "parts that differ in size": lambda v: tf.nn.embedding_lookup([v, v], [3, 4]),
    "Keras' conversion": lambda v: (
        tf.keras.backend.eval(v)
        if hasattr(tf.keras, "__internal__")
        else tf.keras.ops.convert_to_numpy(v)
    ),
}


@pytest.mark.keras
@pytest.mark.parametrize("kind", ["table", "of_layer"])
@pytest.mark.parametrize("name", REFUSED)
def test_dense_reads_raise_and_name_the_way(request, kind, name):
    variable = request.getfixturevalue(kind)
    if name == "Keras' conversion" and hasattr(tf.keras, "__internal__"):
        pytest.skip("tf_keras asks for numpy(), which has a test of its own")
    with pytest.raises(TypeError, match="found by key.*embedding_lookup|no len"):
        REFUSED[name](variable)


@pytest.mark.parametrize("method", ["value", "read_value"])
def test_methods_for_dense_values_raise(table, method):
    with pytest.raises(TypeError, match=f"'users' has no dense value.*variable.{method}"):
        getattr(table, method)()


def test_a_session_does_not_fetch_a_table(sok, graph):
    with v1.Session() as session:
        sok.Init(global_batch_size=1, seed=7)
        table = sok.EmbeddingVariable(3, name="fetched")
        with pytest.raises(TypeError, match="EmbeddingVariable"):
            session.run(table)


def test_ids_that_are_no_integers(table):
    for ids in (tf.constant([1.0]), tf.constant(["a"])):
        with pytest.raises(TypeError, match="integer"):
            tf.nn.embedding_lookup(table, ids)


def test_a_variable_equals_itself_only(sok, table):
    other = sok.EmbeddingVariable(3, name="users")
    assert table == table and table != other
    assert table in [other, table] and {table: 1}[table] == 1


# ---- gradients that TensorFlow would make dense ----


def test_a_gradient_is_never_made_dense(table):
    """Its indices are keys: a dense tensor of all keys below the largest would fill the memory."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [3, 4]))
    gradient = tape.gradient(loss, table)
    for call in (tf.convert_to_tensor, tf.norm, lambda g: tf.multiply(g, 0.5)):
        with pytest.raises(NotImplementedError, match="no dense form"):
            call(gradient)

    @tf.function
    def loop():
        with tf.GradientTape() as tape:
            total = tf.constant(0.0)
            for key in tf.range(2):
                total += tf.reduce_sum(tf.gather(table, [key]))
        return tape.gradient(total, table)

    with pytest.raises(NotImplementedError, match="look all keys up before the loop"):
        loop()


@pytest.mark.parametrize("traced", [False, True])
def test_a_lookup_is_not_computed_again(table, traced):
    def step():
        again = tf.recompute_grad(lambda keys: tf.gather(table, keys))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(again(tf.constant([3, 4])))
        return tape.gradient(loss, table)

    with pytest.raises(NotImplementedError, match="'users' within it"):
        (tf.function(step) if traced else step)()
