"""`dmp.ConcatInitializer`: each table's rows as its own initializer makes them."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like.dist_model_parallel as dmp

pytestmark = pytest.mark.keras


class Shape(tf.keras.initializers.Initializer):
    """Rows whose values show the requested shape."""

    def __call__(self, shape, dtype=None, **kwargs):
        return tf.fill(shape, tf.cast(100 * shape[0] + shape[1], dtype))


def test_each_table_has_its_own_shape():
    rows = dmp.ConcatInitializer(Shape(), [2, 3])((5, 4), dtype="float64")
    assert rows.dtype == tf.float64
    np.testing.assert_array_equal(rows[:, 0], [204, 204, 304, 304, 304])


def test_one_initializer_each():
    initializer = dmp.ConcatInitializer(["ones", Shape()], [1, 2])
    np.testing.assert_array_equal(initializer((3, 2), dtype="float32")[:, 1], [1, 202, 202])


def test_round_trip():
    initializer = dmp.ConcatInitializer(["ones", "zeros"], [1, 2])
    again = tf.keras.initializers.deserialize(tf.keras.initializers.serialize(initializer))
    assert isinstance(again, dmp.ConcatInitializer)
    np.testing.assert_array_equal(again((3, 1), dtype="float32"), [[1], [0], [0]])


def test_joined_configurations_of_the_planner():
    layers = [
        tf.keras.layers.Embedding(rows, 2, rule) for rows, rule in [(3, "ones"), (4, Shape())]
    ]
    (config,) = dmp.DistEmbeddingStrategy(layers, 1).local_configs[0]
    initializers = config["embeddings_initializer"]
    sizes = [3, 4]
    with tf.keras.utils.custom_object_scope({"Shape": Shape}):
        rows = dmp.ConcatInitializer(initializers, sizes)((7, 2), dtype="float32")
    np.testing.assert_array_equal(rows[:, 0], [1, 1, 1, 402, 402, 402, 402])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((["ones"], [1, 2]), "1 initializers for 2 sizes"),
        (("ones", []), r"`sizes` must be positive integers. Received: sizes=\[\]"),
        (("ones", [2, 0]), r"Received: sizes=\[2, 0\]"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dmp.ConcatInitializer(*arguments)


def test_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"sum\(sizes\)=3. Received: shape=\(4, 1\)"):
        dmp.ConcatInitializer("ones", [1, 2])((4, 1))
