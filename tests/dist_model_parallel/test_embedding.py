"""`sok.Embedding` and `sok.embedding_lookup` against NumPy and TensorFlow's own lookup."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

pytestmark = pytest.mark.keras

ROWS, DIM = 12, 5
TABLE = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
RAGGED = [[3, 1, 4, 1], [], [5, 9, 2], [6], []]  # an id twice, empty samples inside and at the end


def layer_of(combiner=None, **kwargs):
    layer = sok.Embedding(ROWS, DIM, combiner=combiner, **kwargs)
    layer.build(None)
    layer.set_weights([TABLE])
    return layer


def as_sparse(rows, dtype, width=6):
    indices = [[i, k] for i, row in enumerate(rows) for k in range(len(row))]
    values = tf.constant([x for row in rows for x in row], dtype)
    return tf.SparseTensor(np.reshape(indices, [-1, 2]), values, [len(rows), width])


def ids_of(kind, dtype=tf.int64):
    """The ids as TensorFlow has them and as lists."""
    if kind == "one-hot":
        lists = [[7], [0], [11]]
    elif kind == "fixed":
        lists = [[7, 7, 2], [0, 1, 2], [11, 3, 11], [5, 5, 5]]
    else:
        lists = RAGGED
    if kind == "ragged":
        return tf.ragged.constant(lists, dtype=dtype), lists
    if kind == "sparse":
        return as_sparse(lists, dtype), lists
    return tf.constant(lists, dtype), lists


def combined(lists, combiner, weights=None):
    out = np.zeros([len(lists), DIM])
    for i, ids in enumerate(lists):
        w = np.ones(len(ids)) if weights is None else np.array(weights[i])
        out[i] = sum((x * TABLE[j].astype(float) for x, j in zip(w, ids, strict=True)), out[i])
        if combiner == "mean" and w.sum() != 0:
            out[i] /= w.sum()
    return out


KINDS = ["one-hot", "fixed", "ragged", "sparse"]


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_without_combiner(kind, dtype, function):
    ids, lists = ids_of(kind, dtype)
    layer = layer_of()
    out = tf.function(layer)(ids) if function else layer(ids)
    assert out.shape[-1] == DIM
    if kind in ("ragged", "sparse"):
        assert isinstance(out, tf.RaggedTensor)
        assert out.row_lengths().numpy().tolist() == [len(row) for row in lists]
        out, lists = out.flat_values, [j for row in lists for j in row]
    np.testing.assert_array_equal(out, TABLE[np.array(lists)])


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_combined(kind, combiner, function):
    ids, lists = ids_of(kind)
    layer = layer_of(combiner)
    out = tf.function(layer)(ids) if function else layer(ids)
    assert out.shape == (len(lists), DIM)
    np.testing.assert_allclose(out, combined(lists, combiner), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_weighted(kind, combiner):
    ids, lists = ids_of(kind)
    rng = np.random.default_rng(1)
    weights = [rng.uniform(0.5, 2.0, len(row)).astype(np.float32).tolist() for row in lists]
    if kind == "ragged":
        given = tf.ragged.constant(weights, dtype=tf.float32)
    elif kind == "sparse":
        given = as_sparse(weights, tf.float32)
    else:
        given = tf.constant(weights)
    expected = combined(lists, combiner, weights)
    out = layer_of(combiner)(ids, weights=given)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    out = sok.embedding_lookup(tf.constant(TABLE), ids, combiner, weights=given)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_weights_that_cancel_give_zeros():
    out = layer_of("mean")(tf.constant([[1, 2]]), weights=tf.constant([[1.0, -1.0]]))
    np.testing.assert_array_equal(out, np.zeros([1, DIM]))


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("combiner", [None, "sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_has_each_row_once(kind, combiner, function):
    ids, lists = ids_of(kind)
    layer = layer_of(combiner)
    slope = np.random.default_rng(2).normal(size=(100, DIM)).astype(np.float32)

    def gradient():
        with tf.GradientTape() as tape:
            out = layer(ids)
            out = out.flat_values if isinstance(out, tf.RaggedTensor) else out
            out = tf.reshape(out, [-1, DIM])
            loss = tf.reduce_sum(out * tf.constant(slope)[: tf.shape(out)[0]])
        (grad,) = tape.gradient(loss, layer.trainable_variables)
        return grad

    grad = tf.function(gradient)() if function else gradient()
    assert isinstance(grad, tf.IndexedSlices)
    indices = grad.indices.numpy()
    flat = [(i, j) for i, row in enumerate(lists) for j in row]
    assert sorted(indices) == sorted({j for _, j in flat})
    expected = np.zeros([ROWS, DIM])
    for k, (i, j) in enumerate(flat):
        if combiner is None:
            expected[j] += slope[k]
        else:
            expected[j] += slope[i] / (len(lists[i]) if combiner == "mean" else 1)
    dense = np.zeros([ROWS, DIM])
    dense[indices] = grad.values
    np.testing.assert_allclose(dense, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_to_the_stock_lookup(combiner, weighted):
    rng = np.random.default_rng(3)
    lists = [rng.integers(0, ROWS, rng.integers(1, 6)).tolist() for _ in range(40)]
    weights = [rng.uniform(0.1, 1, len(row)).tolist() for row in lists]
    ids = tf.ragged.constant(lists, dtype=tf.int64)
    given = tf.ragged.constant(weights, dtype=tf.float32) if weighted else None
    table = tf.Variable(TABLE)

    def run(lookup):
        with tf.GradientTape() as tape:
            if weighted:
                tape.watch(given.flat_values)
            out = lookup()
            loss = tf.reduce_sum(out**2)
        sources = [table, given.flat_values] if weighted else [table]
        return [out, *(tf.convert_to_tensor(g) for g in tape.gradient(loss, sources))]

    ours = run(lambda: sok.embedding_lookup(table, ids, combiner, weights=given))
    stock = run(
        lambda: tf.nn.embedding_lookup_sparse(
            table,
            ids.to_sparse(),
            None if given is None else given.with_values(given.flat_values).to_sparse(),
            combiner=combiner,
        )
    )
    for mine, theirs in zip(ours, stock, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-5)


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


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_integer_dtypes(dtype):
    out = layer_of()(tf.constant([[1, 11]], dtype))
    np.testing.assert_array_equal(out, TABLE[[[1, 11]]])


@pytest.mark.parametrize(
    "dtype, wide",
    # As int32 or int64 these would be -1 or 1.
    [("uint32", 2**32 - 1), ("uint64", 2**64 - 1), ("uint64", 2**32 + 1), ("int64", 2**32 + 1)],
)
def test_no_id_wraps_around_into_the_table(dtype, wide):
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be in"):
        layer_of()(tf.constant([[wide]], dtype))


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("combiner", [None, "sum"])
@pytest.mark.parametrize("kind", ["fixed", "ragged", "sparse"])
@pytest.mark.parametrize("bad", [-1, ROWS])
def test_an_id_out_of_range_is_named(bad, kind, combiner, function):
    lists = [[3, bad, 1], [2, 0, 1]]
    ids = {
        "fixed": lambda: tf.constant(lists),
        "ragged": lambda: tf.ragged.constant(lists),
        "sparse": lambda: as_sparse(lists, tf.int32),
    }[kind]()
    layer = layer_of(combiner, name="user_id")
    call = tf.function(layer) if function else layer
    with pytest.raises(tf.errors.InvalidArgumentError, match="user_id") as caught:
        call(ids)
    message = str(caught.value).replace("[", "").replace("]", "")
    assert f"Received: id {bad} with input_dim {ROWS}" in message


@pytest.mark.parametrize("dtype", [tf.float32, tf.bool])
def test_what_is_no_integer_is_refused(dtype):
    with pytest.raises(TypeError, match="must be integers"):
        layer_of()(tf.zeros([2, 2], dtype))


@pytest.mark.parametrize(
    "ids, message",
    [
        (lambda: tf.constant([1, 2]), "ambiguous"),
        (lambda: tf.ragged.constant([[[1], [2, 3]], [[4]]]), "nested ones are not supported"),
        (lambda: tf.RaggedTensor.from_row_lengths([[1, 2], [3, 4]], [2]), "must be 2-D"),
        (lambda: tf.sparse.expand_dims(as_sparse([[1]], tf.int32)), "must be 2-D"),
    ],
)
def test_shapes_that_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        layer_of("sum")(ids())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 4), "`input_dim` must be a positive integer. Received: input_dim=0"),
        ((4, -1), "`output_dim` must be a positive integer. Received: output_dim=-1"),
        ((4.5, 1), "input_dim=4.5"),
        ((4, 4, "uniform", None, None, None, "max"), "`combiner` must be one of.*combiner='max'"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sok.Embedding(*arguments)


def test_weights_that_are_refused():
    ids = tf.constant([[1, 2]])
    with pytest.raises(ValueError, match="`weights` need a combiner"):
        layer_of()(ids, weights=tf.ones([1, 2]))
    with pytest.raises(ValueError, match="the same kind and shape as `ids`"):
        layer_of("sum")(ids, weights=tf.ones([1, 3]))
    with pytest.raises(ValueError, match="the same kind and shape as `ids`"):
        layer_of("sum")(tf.ragged.constant([[1, 2]]), weights=tf.ones([1, 2]))
    with pytest.raises(TypeError, match="`weights` must be floats. Received: int32"):
        layer_of("sum")(ids, weights=tf.ones([1, 2], tf.int32))
    ragged = tf.ragged.constant([[1, 2], [3]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="exactly one weight per id"):
        layer_of("sum")(ragged, weights=tf.ragged.constant([[1.0], [2.0, 3.0]]))


def test_embedding_lookup_refuses():
    with pytest.raises(TypeError, match="`param` must be a dense tensor or a variable"):
        sok.embedding_lookup(TABLE, tf.constant([[1]]))
    for ids in (tf.constant([1]), tf.constant([[[1]]])):
        for combiner in (None, "sum"):
            with pytest.raises(ValueError, match="`ids` must be 2-D"):
                sok.embedding_lookup(tf.constant(TABLE), ids, combiner)
    with pytest.raises(ValueError, match="combiner='sqrtn'"):
        sok.embedding_lookup(tf.constant(TABLE), tf.constant([[1]]), "sqrtn")
    with pytest.raises(tf.errors.InvalidArgumentError, match="table 'items:0'.* id 12 "):
        sok.embedding_lookup(tf.Variable(TABLE, name="items"), tf.constant([[12]]))


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


def test_trains_as_keras_own_layer_does(tmp_path):
    rng = np.random.default_rng(5)
    ids, labels = rng.integers(0, ROWS, (64, 3)), rng.normal(size=(64, DIM))

    def trained(make):
        inputs = tf.keras.Input((3,), dtype="int64")
        layer = make()
        outputs = layer(inputs)
        if len(outputs.shape) == 3:
            outputs = tf.keras.layers.GlobalAveragePooling1D()(outputs)
        model = tf.keras.Model(inputs, outputs)
        layer.set_weights([TABLE])
        model.compile(tf.keras.optimizers.SGD(0.5), "mse")
        model.fit(ids, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model, layer

    _, stock = trained(lambda: tf.keras.layers.Embedding(ROWS, DIM))
    model, ours = trained(lambda: sok.Embedding(ROWS, DIM, combiner="mean"))
    np.testing.assert_allclose(ours.get_weights()[0], stock.get_weights()[0], rtol=1e-5, atol=1e-6)
    assert np.abs(ours.get_weights()[0] - TABLE).max() > 0.01
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(ids), model(ids))


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_in_a_functional_model(kind):
    ids, lists = ids_of(kind, tf.int64)
    width = None if kind == "ragged" else ids.shape[1]
    inputs = tf.keras.Input((width,), dtype="int64", **{kind: True})
    layer = layer_of("mean")
    model = tf.keras.Model(inputs, layer(inputs))
    np.testing.assert_allclose(model(ids), combined(lists, "mean"), rtol=1e-6, atol=1e-7)


def test_symbolic_floats_are_refused_at_once():
    inputs = tf.keras.Input((3,), dtype="float32")
    with pytest.raises(TypeError, match="must be integers"):
        layer_of()(inputs)


def test_the_initializer_runs_on_the_cpu():
    seen = []

    class Initializer(tf.keras.initializers.Initializer):
        def __call__(self, shape, dtype=None, **kwargs):
            rows = tf.ones(shape, dtype)
            seen.append(rows.device)
            return rows

    sok.Embedding(3, 2, Initializer())(tf.constant([[1]]))
    assert len(seen) == 1 and "CPU" in seen[0]
