"""Floats for the integer inputs of a model: keys raise, other integers are Keras' affair."""

import numpy as np
import pytest
import tensorflow as tf

from tests.lookup.test_keras_call import Looks

pytestmark = pytest.mark.keras

LARGE = np.array([[2**53 + 1]], np.int64)


def group(sok, keys):
    return sok.GroupEmbedding({"k": 2})({"k": keys})["k"]


def sok1(sok, keys):
    return sok.All2AllDenseEmbedding(None, 2, slot_num=1, nnz_per_slot=1)(keys)


def nested(sok, keys):
    inner = tf.keras.Input([1], dtype="int64")
    return tf.keras.Model(inner, sok1(sok, inner))(keys)


def reshaped(sok, keys):
    return sok1(sok, tf.keras.layers.Reshape([1, 1])(keys))


def own_layer(sok, keys):
    return Looks(sok)(keys)


@pytest.mark.parametrize("through", [group, sok1, nested, reshaped, own_layer])
def test_keys(sok, through):
    keys = tf.keras.Input([1], dtype="int64", name="ids")
    rows = tf.keras.layers.Flatten()(through(sok, keys))
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(rows))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", run_eagerly=False)
    model.fit(LARGE, np.ones([1, 1]), verbose=0)
    model.predict(LARGE.astype(np.uint32), verbose=0)
    for wrong in (LARGE.astype(float), np.array([[0.7]], np.float32), np.array([[np.nan]])):
        data = tf.data.Dataset.from_tensors((wrong, np.ones([1, 1])))
        for call in (
            lambda wrong=wrong: model.fit(wrong, np.ones([1, 1]), verbose=0),
            lambda data=data: model.fit(data, verbose=0),
            lambda data=data: model.evaluate(data, verbose=0),
            lambda wrong=wrong: model.predict(wrong, verbose=0),
            lambda wrong=wrong: model(tf.constant(wrong)),
        ):
            with pytest.raises(TypeError, match="'ids' must be integers.*Received.*float"):
                call()
    (table,) = (v for v in model.variables if hasattr(v, "table_name"))
    assert sok.export(table)[0].numpy().tolist() == LARGE[0].tolist()


def test_sequential(sok):
    layer = sok.All2AllDenseEmbedding(None, 2, slot_num=1, nnz_per_slot=1)
    model = tf.keras.Sequential([tf.keras.Input([1], dtype="int64"), layer])
    assert model.predict(LARGE, verbose=0).shape == (1, 1, 1, 2)
    for call in (model, lambda keys: model.predict(keys, verbose=0)):
        with pytest.raises(TypeError, match="must be integers"):
            call(LARGE.astype(float))


def test_inputs_that_are_no_keys(sok):
    keys = tf.keras.Input([1], dtype="int64")
    number, price = tf.keras.Input([1], dtype="int32"), tf.keras.Input([1])
    stock = tf.keras.layers.Embedding(9, 2)(number)
    both = tf.keras.layers.Concatenate()([tf.keras.layers.Flatten()(stock), price])
    model = tf.keras.Model([keys, number, price], [both, sok1(sok, keys)])
    model.predict([LARGE, np.array([[2.0]]), np.array([[0.5]])], verbose=0)
