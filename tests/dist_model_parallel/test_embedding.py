"""`sok.Embedding` and `sok.embedding_lookup` against NumPy and TensorFlow's own lookup."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.dist_model_parallel.cases import tensor_of

pytestmark = pytest.mark.keras

ROWS, DIM = 12, 5
TABLE = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
RAGGED = [[3, 1, 4, 1], [], [5, 9, 2], [6], []]  # an id twice, empty samples inside and at the end


def layer_of(combiner=None, **kwargs):
    layer = sok.Embedding(ROWS, DIM, combiner=combiner, **kwargs)
    layer.build(None)
    layer.set_weights([TABLE])
    return layer


IDS_OF = {  # by sample; the most of one sample
    "one-hot": ([[7], [0], [11]], 1),
    "fixed": ([[7, 7, 2], [0, 1, 2], [11, 3, 11], [5, 5, 5]], 3),
    "ragged": (RAGGED, None),
    "sparse": (RAGGED, 6),
}


def right(table, lists, combiner, weights):
    """By TensorFlow's own operations, sample by sample."""
    if combiner is None:
        return tf.gather(table, [i for ids in lists for i in ids])
    found = []
    for ids, of_sample in zip(lists, weights, strict=True):
        factors = tf.constant(of_sample, tf.float32, [len(ids), 1])
        row = tf.reduce_sum(tf.gather(table, tf.constant(ids, tf.int64)) * factors, 0)
        found.append(row / sum(of_sample) if combiner == "mean" and ids else row)
    return tf.stack(found)


@pytest.mark.parametrize(
    "combiner, weighted, function",
    [(None, False, True), ("sum", False, False), ("mean", True, True), ("mean", False, False)],
)
@pytest.mark.parametrize("kind", IDS_OF)
def test_rows_and_gradients(kind, combiner, weighted, function):
    lists, most = IDS_OF[kind]
    ids = tensor_of(kind, lists, tf.int32 if function else tf.int64, most)
    layer, rng = layer_of(combiner), np.random.default_rng(1)
    weights = [rng.uniform(0.5, 2.0, len(row)).tolist() for row in lists]
    options = {"weights": tensor_of(kind, weights, tf.float32, most)} if weighted else {}
    weights = weights if weighted else [[1.0] * len(row) for row in lists]

    def run(look_up, variable):
        with tf.GradientTape() as tape:
            rows = look_up()
            flat = rows.flat_values if isinstance(rows, tf.RaggedTensor) else rows
            flat = tf.reshape(flat, [-1, DIM])
            loss = tf.reduce_sum(flat**2 * tf.range(1.0, DIM + 1))
        return rows, flat, tape.gradient(loss, variable)

    (variable,) = layer.trainable_variables

    def ours():
        return run(lambda: layer(ids, **options), variable)

    rows, flat, gradient = (tf.function(ours) if function else ours)()
    dense = tf.Variable(TABLE)
    _, expected, right_gradient = run(lambda: right(dense, lists, combiner, weights), dense)
    np.testing.assert_allclose(flat, expected, rtol=1e-5, atol=1e-6)
    if combiner is not None:
        assert rows.shape == (len(lists), DIM)
    elif kind in ("ragged", "sparse"):
        assert rows.shape == (len(lists), None, DIM)
        assert rows.row_lengths().numpy().tolist() == [len(row) for row in lists]
    else:
        assert rows.shape == (*ids.shape, DIM)
    assert isinstance(gradient, tf.IndexedSlices)  # with each row once
    assert sorted(gradient.indices.numpy()) == sorted({i for row in lists for i in row})
    by_row = np.zeros([ROWS, DIM])
    by_row[gradient.indices] = gradient.values
    np.testing.assert_allclose(by_row, tf.convert_to_tensor(right_gradient), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_weights_have_the_gradient_of_the_stock_lookup(combiner):
    rng = np.random.default_rng(3)
    lists = [rng.integers(0, ROWS, rng.integers(1, 6)).tolist() for _ in range(40)]
    ids, table = tf.ragged.constant(lists, dtype=tf.int64), tf.Variable(TABLE)
    weights = tf.constant(rng.uniform(0.1, 1, len(ids.flat_values)), tf.float32)

    def run(lookup):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            given = ids.with_flat_values(weights)
            loss = tf.reduce_sum(lookup(given) ** 2)
        return tape.gradient(loss, weights)

    ours = run(lambda given: sok.embedding_lookup(table, ids, combiner, weights=given))
    sparse, stock_lookup = ids.to_sparse(), tf.nn.embedding_lookup_sparse
    stock = run(lambda given: stock_lookup(table, sparse, given.to_sparse(), combiner=combiner))
    np.testing.assert_allclose(ours, stock, rtol=2e-5, atol=1e-5)


def test_weights_that_cancel_give_zeros():
    out = layer_of("mean")(tf.constant([[1, 2]]), weights=tf.constant([[1.0, -1.0]]))
    np.testing.assert_array_equal(out, np.zeros([1, DIM]))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4)])
def test_dense_ids_of_any_rank(shape):
    ids = np.random.default_rng(4).integers(0, ROWS, shape)
    np.testing.assert_array_equal(layer_of()(tf.constant(ids)), TABLE[ids])
    if len(shape) > 1:
        out = layer_of("sum")(tf.constant(ids))
        np.testing.assert_allclose(out, TABLE[ids].sum(-2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
def test_no_ids_at_all(combiner):
    layer = layer_of(combiner)
    last = (3, DIM) if combiner is None else (DIM,)
    assert layer(tf.zeros([0, 3], tf.int32)).shape == (0, *last)
    out = layer(tf.zeros([2, 0], tf.int32))
    np.testing.assert_array_equal(out, np.zeros([2, 0, DIM] if combiner is None else [2, DIM]))
    out = layer(tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [0, 0]))
    assert out.shape[0] in (2, None)


def test_shapes_unknown_until_run():
    for combiner, expected in [(None, TABLE[[[1, 2]]]), ("sum", TABLE[[[1, 2]]].sum(1))]:
        layer = layer_of(combiner)
        for shape in ([None, None], [None, 2], [1, None]):
            call = tf.function(layer, input_signature=[tf.TensorSpec(shape, tf.int64)])
            np.testing.assert_allclose(call(tf.constant([[1, 2]], tf.int64)), expected, rtol=1e-6)


def test_integer_dtypes():
    layer = layer_of()
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        np.testing.assert_array_equal(layer(tf.constant([[1, 11]], dtype)), TABLE[[[1, 11]]])
    # As int32 or int64 these would be -1 or 1.
    wide = {"uint32": 2**32 - 1, "uint64": 2**64 - 1, "int64": 2**32 + 1}
    for dtype, number in (*wide.items(), ("uint64", 2**32 + 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be in"):
            layer(tf.constant([[number]], dtype))


@pytest.mark.parametrize(
    "bad, kind, combiner, function",
    [
        (-1, "fixed", None, True),
        (ROWS, "fixed", "sum", False),
        (-1, "ragged", "sum", False),
        (ROWS, "ragged", None, True),
        (ROWS, "sparse", "sum", True),
    ],
)
def test_an_id_out_of_range_is_named(bad, kind, combiner, function):
    ids = tensor_of(kind, [[3, bad, 1], [2, 0, 1]], tf.int32, 3)
    layer = layer_of(combiner, name="user_id")
    call = tf.function(layer) if function else layer
    with pytest.raises(tf.errors.InvalidArgumentError, match="user_id") as caught:
        call(ids)
    message = str(caught.value).replace("[", "").replace("]", "")
    assert f"Received: id {bad} with input_dim {ROWS}" in message


IDS, RAGGED_IDS = tf.constant([[1, 2]]), tf.ragged.constant([[1, 2], [3]])
ONE, TWO = tf.ones([1, 1]), tf.ones([1, 2])
OF_OTHER_SAMPLES = tf.ragged.constant([[1.0], [2.0, 3.0]])
NESTED, OF_PAIRS = [[[1], [2, 3]], [[4]]], [[1, 2], [3, 4]]
SPARSE_3D = tf.sparse.expand_dims(tf.sparse.from_dense([[1]]))
INVALID, VARIABLE = tf.errors.InvalidArgumentError, tf.Variable(TABLE, name="items")


def summed(ids, **options):
    return layer_of("sum")(ids, **options)


def lookup(ids, *arguments):
    return sok.embedding_lookup(VARIABLE, tf.constant(ids), *arguments)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: layer_of()(TWO), TypeError, "must be integers"),
        (lambda: layer_of()(tf.zeros([2, 2], tf.bool)), TypeError, "must be integers"),
        (lambda: layer_of()(tf.keras.Input((3,), dtype="float32")), TypeError, "must be integers"),
        (lambda: summed(tf.constant([1, 2])), ValueError, "ambiguous"),
        (lambda: summed(tf.ragged.constant(NESTED)), ValueError, "nested ones are not supported"),
        (
            lambda: summed(tf.RaggedTensor.from_row_lengths(OF_PAIRS, [2])),
            ValueError,
            "must be 2-D",
        ),
        (lambda: summed(SPARSE_3D), ValueError, "must be 2-D"),
        (lambda: sok.Embedding(0, 4), ValueError, "`input_dim` must be .* Received: input_dim=0"),
        (lambda: sok.Embedding(4, -1), ValueError, "`output_dim` must be a pos.*output_dim=-1"),
        (lambda: sok.Embedding(4.5, 1), ValueError, "input_dim=4.5"),
        (lambda: sok.Embedding(4, 4, combiner="max"), ValueError, "`combiner` must be.*'max'"),
        (lambda: layer_of()(IDS, weights=TWO), ValueError, "`weights` need a combiner"),
        (lambda: summed(IDS, weights=ONE), ValueError, "the same kind and shape as `ids`"),
        (lambda: summed(RAGGED_IDS[:1], weights=TWO), ValueError, "the same kind and shape"),
        (lambda: summed(IDS, weights=IDS), TypeError, "`weights` must be floats. Received: int32"),
        (lambda: summed(RAGGED_IDS, weights=OF_OTHER_SAMPLES), INVALID, "exactly one weight per"),
        (lambda: sok.embedding_lookup(TABLE, IDS), TypeError, "`param` must be a dense tensor or"),
        (lambda: lookup([1]), ValueError, "`ids` must be 2-D"),
        (lambda: lookup([[[1]]], "sum"), ValueError, "`ids` must be 2-D"),
        (lambda: lookup([[1]], "sqrtn"), ValueError, "combiner='sqrtn'"),
        (lambda: lookup([[12]]), INVALID, "table 'items:0'.* id 12 "),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_embedding_lookup_takes_a_layers_weight():
    (weight,) = layer_of().trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.embedding_lookup(weight, tf.constant([[3, 3, 1]]), "sum"))
    grad = tape.gradient(loss, [weight])[0]
    assert dict(zip(grad.indices.numpy(), grad.values.numpy()[:, 0], strict=True)) == {3: 2, 1: 1}


@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_mixed_precision(half, combiner):
    layer = layer_of(combiner, dtype=f"mixed_{half}")
    ids = tf.constant([[1, 2, 2], [3, 4, 5]])
    with tf.GradientTape() as tape:
        out = layer(ids)
        loss = tf.reduce_sum(out)
    grad = tape.gradient(loss, layer.trainable_variables)[0]
    # Rows are combined as float32 and rounded once, at the end.
    exact = layer_of(combiner)(ids)
    assert out.dtype == half and grad.dtype == tf.float32
    np.testing.assert_array_equal(
        tf.cast(out, tf.float32), tf.cast(tf.cast(exact, half), "float32")
    )


def test_configuration_round_trip():
    layer = sok.Embedding(
        ROWS, DIM, "ones", "l2", "l1", "non_neg", "mean", False, name="items", dtype="float64"
    )
    config = layer.get_config()
    again = sok.Embedding.from_config(config)
    assert again.get_config() == config
    assert config["combiner"] == "mean" and config["use_custom_kernel"] is False
    out = again(tf.constant([[1, 2]]))
    np.testing.assert_array_equal(out, np.ones([1, DIM]))
    assert out.dtype == tf.float64
    # L2 of 12 * 5 ones at its default of 0.01, L1 of 5 ones at 0.01 over a batch of one.
    losses = sorted(float(loss) for loss in again.losses)
    np.testing.assert_allclose(losses, [0.05, 0.6], rtol=1e-6)
    assert type(again.embeddings_constraint).__name__ == "NonNeg"


def test_configuration_of_keras_own_layer():
    stock = tf.keras.layers.Embedding(7, 3, mask_zero=True, name="stock")
    layer = sok.Embedding.from_config(stock.get_config())
    assert layer.mask_zero
    assert (layer.input_dim, layer.output_dim, layer.combiner) == (7, 3, None)
    assert layer.name == "stock"
    legacy = {"name": "old", "input_dim": 7, "output_dim": 3, "input_length": 4}
    assert sok.Embedding.from_config(legacy).input_dim == 7
    old = {**legacy, "batch_input_shape": (None, None), "dtype": "float32", "trainable": True}
    assert sok.Embedding.from_config(old).output_dim == 3


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_in_a_functional_model(kind):
    lists, width = IDS_OF[kind]
    ids, layer = tensor_of(kind, lists, tf.int64, width), layer_of("mean")
    inputs = tf.keras.Input((width,), dtype="int64", **{kind: True})
    model = tf.keras.Model(inputs, layer(inputs))
    expected = right(TABLE, lists, "mean", [[1.0] * len(row) for row in lists])
    np.testing.assert_allclose(model(ids), expected, rtol=1e-6, atol=1e-7)


def test_the_initializer_runs_on_the_cpu():
    seen = []

    class Initializer(tf.keras.initializers.Initializer):
        def __call__(self, shape, dtype=None, **kwargs):
            rows = tf.ones(shape, dtype)
            seen.append(rows.device)
            return rows

    sok.Embedding(3, 2, Initializer())(tf.constant([[1]]))
    assert len(seen) == 1 and "CPU" in seen[0]
