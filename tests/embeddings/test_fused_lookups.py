"""`sok.fuse_lookups`: embedding layers of a functional model look up together."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm

pytestmark = pytest.mark.keras
BATCH, STEPS, KEYS, RATE = 12, 4, 20, 0.1


def data():
    rng = np.random.default_rng(3)
    samples = BATCH * STEPS
    inputs = {
        "a": rng.integers(0, KEYS, [samples, 3]),
        "b": rng.integers(0, KEYS, [samples, 2, 2]),
        "c": rng.random([samples, 1]).astype(np.float32),
    }
    return inputs, rng.random([samples, 1]).astype(np.float32)


def functional(name):
    """Three tables; the third one's keys are made from an input by a layer of Keras."""
    a = tf.keras.Input([3], dtype="int64", name="a")
    b = tf.keras.Input([2, 2], dtype="int64", name="b")
    c = tf.keras.Input([1], name="c")
    options = {"embedding_initializer": "ones"}
    rows = [
        sok.DistributedEmbedding("sum", None, 4, 3, 1, name=f"{name}_a", **options)(a),
        sok.DistributedEmbedding("mean", None, 2, 2, 2, name=f"{name}_b", **options)(b),
        sok.All2AllDenseEmbedding(None, 4, 3, 1, name=f"{name}_c", **options)(
            tf.keras.layers.Hashing(KEYS)(a)
        ),
    ]
    joined = tf.keras.layers.Concatenate()([*map(tf.keras.layers.Flatten(), rows), c])
    outputs = tf.keras.layers.Dense(1, kernel_initializer="ones")(joined)
    return tf.keras.Model({"a": a, "b": b, "c": c}, outputs)


def mine(array):
    """This rank's part of each batch."""
    ranks = comm.current()
    batches = array.reshape(STEPS, BATCH, *array.shape[1:])
    return np.concatenate(np.split(batches, ranks.world_size, axis=1)[ranks.rank])


def keys_input(name="keys", width=2):
    return tf.keras.Input([width], dtype="int64", name=name)


def embedding(sok, name, **options):
    return sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1, name=name, **options)


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_as_the_model_it_was_made_from(on_threads, world_size):
    def check():
        inputs, targets = data()
        inputs, targets = {name: mine(array) for name, array in inputs.items()}, mine(targets)
        tables = {}
        for name in ("plain", "fused"):
            made = functional(name)
            model = sok.fuse_lookups(made) if name == "fused" else made
            # One rank trains in a traced step, several train eagerly.
            optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
            model.compile(optimizer, "mse", run_eagerly=world_size > 1)
            model.fit(inputs, targets, batch_size=BATCH // world_size, verbose=0, shuffle=False)
            tables[name] = [made.get_layer(f"{name}_{which}").table for which in "abc"]
            if name == "fused":
                predictions = [one.predict(inputs, verbose=0) for one in (made, model)]
                np.testing.assert_array_equal(*predictions)
        for pair in zip(*tables.values(), strict=True):
            (keys, rows), (fused_keys, fused_rows) = map(sok.export, pair)
            assert len(keys) > 3
            np.testing.assert_array_equal(fused_keys, keys)
            # Rows grow to thousands, and TensorFlow adds in another order on other processors.
            np.testing.assert_allclose(fused_rows, rows, rtol=5e-5, atol=1e-6)

    on_threads(world_size, check)


def test_two_exchanges_for_the_keys_and_rows_of_all_layers(on_threads):
    def check():
        plain = functional("counted")
        inputs = {name: tf.constant(mine(array)) for name, array in data()[0].items()}

        def count(model):
            step = tf.function(lambda inputs: model(inputs, training=True))
            operations = step.get_concrete_function(inputs).graph.get_operations()
            return sum(operation.type == "SokBeginWait" for operation in operations)

        assert (count(plain), count(sok.fuse_lookups(plain))) == (6, 2)

    on_threads(2, check)


def test_a_model_from_a_file_is_fused(sok, tmp_path):
    model = sok.fuse_lookups(functional("filed"))
    inputs, targets = data()
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    model.fit(inputs, targets, batch_size=12, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert any(type(layer).__name__ == "FusedLookups" for layer in loaded.layers)
    np.testing.assert_array_equal(
        loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0)
    )


def test_sparse_ids_and_a_frozen_layer(sok):
    sparse = tf.keras.Input([2], dtype="int64", sparse=True, name="sparse")
    keys = keys_input()
    frozen = embedding(sok, "still", embedding_initializer="ones", trainable=False)
    moved = sok.DistributedEmbedding(
        "mean", None, 4, slot_num=1, max_nnz=2, embedding_initializer="ones", name="moved"
    )
    flat = [tf.keras.layers.Flatten()(rows) for rows in (frozen(keys), moved(sparse))]
    output = tf.keras.layers.Concatenate()(flat)
    model = sok.fuse_lookups(tf.keras.Model([keys, sparse], output))
    ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], tf.constant([7, 8, 7], tf.int64), [2, 2])
    with tf.GradientTape() as tape:
        found = model([tf.constant([[1, 2], [3, 4]], tf.int64), ids], training=True)
    assert found.shape == (2, 12)
    (trained,) = model.trainable_variables
    gradient = tape.gradient(found, trained)
    np.testing.assert_array_equal(np.sort(gradient.indices), [7, 8])
    # Sample 0 is half of either row, sample 1 the row of 7.
    by_key = dict(zip(gradient.indices.numpy().tolist(), gradient.values.numpy(), strict=True))
    np.testing.assert_array_equal(by_key[7], [1.5] * 4)
    np.testing.assert_array_equal(by_key[8], [0.5] * 4)


def test_what_cannot_be_fused_stays_as_it_is(sok):
    keys = keys_input()
    twice, first, second = (embedding(sok, name) for name in ("twice", "first", "second"))
    asked, behind = embedding(sok, "asked"), embedding(sok, "behind")
    rows = [twice(keys), twice(keys), first(keys), second(keys), asked(keys, training=False)]
    made = tf.keras.layers.Discretization([0.0])(first.output)  # from rows of a fused layer
    made = tf.keras.layers.Reshape([2, 4])(made)[:, :, 0]
    rows.append(behind(made))
    model = sok.fuse_lookups(tf.keras.Model(keys, rows))
    (group,) = (layer for layer in model.layers if type(layer).__name__ == "FusedLookups")
    assert {layer.name for layer in group.layers} == {"first", "second"}
    assert {"twice", "asked", "behind"} <= {layer.name for layer in model.layers}
    ids = tf.constant([[1, 2]], tf.int64)
    found = model(ids)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], first(ids, training=False))
    np.testing.assert_array_equal(found[3], second(ids, training=False))


def test_errors(sok):
    class Subclassed(tf.keras.Model):
        def train_step(self, data):
            return {}

    keys = keys_input()
    rows = [embedding(sok, name)(keys) for name in ("left", "right")]
    scaled = [embedding(sok, name, gradient_scale=name)(keys) for name in ("sum", "mean")]
    for model, error, words in (
        (tf.keras.Model(keys, rows[0]), ValueError, "must have two .* Received: model '.*' with 1"),
        (Subclassed(), TypeError, "GroupEmbedding in a subclassed.*Received: Subclassed"),
        (Subclassed(keys, rows), TypeError, "train_step, would be lost. Received: Subclassed"),
        (tf.keras.Model(keys, scaled), ValueError, "same `gradient_scale`.*'mean', 'sum'"),
    ):
        with pytest.raises(error, match=words):
            sok.fuse_lookups(model)
    if not is_keras_3():
        model = tf.keras.Model(keys, rows)
        model.add_loss(tf.reduce_sum(rows[0]))
        with pytest.raises(ValueError, match=r"would lose them.*Received: .*add_loss"):
            sok.fuse_lookups(model)


def test_what_a_layer_does_beside_its_lookup_is_kept(sok):
    class Doubled(sok.DistributedEmbedding):
        def call(self, inputs, training=True):
            return 2 * super().call(inputs, training=training)

    keys, ones = keys_input(), {"embedding_initializer": "ones"}
    doubled = Doubled("sum", None, 4, slot_num=2, max_nnz=1, name="doubled", **ones)
    penal = embedding(sok, "penal", activity_regularizer=tf.keras.regularizers.L2(0.5), **ones)
    plain = [embedding(sok, name, **ones) for name in ("plain0", "plain1")]
    model = sok.fuse_lookups(
        tf.keras.Model(keys, [layer(keys) for layer in (doubled, penal, *plain)])
    )
    found = model(tf.constant([[1, 2]], tf.int64))
    np.testing.assert_array_equal(found[0], np.full([1, 2, 4], 2.0))
    assert float(sum(model.losses)) == 4.0  # half of the squares of 8 ones; batch 1
