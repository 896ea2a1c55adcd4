"""DMP's user guide: its snippets and its examples do here what it says."""

import doctest

import numpy as np
import pytest
import tensorflow as tf

import sok_like
from tests.dist_model_parallel import user_guide

pytestmark = pytest.mark.keras

EMBEDDING_EXAMPLES = """
>>> layer = Embedding(1000, 64)
>>> onehot_input = tf.random.uniform(shape=(16, 1), maxval=1000, dtype=tf.int32)
>>> print(layer(onehot_input).shape)
(16, 1, 64)
>>> fixedhot_input = tf.random.uniform(shape=(16, 7), maxval=1000, dtype=tf.int32)
>>> print(fixedhot_input.shape)
(16, 7)
>>> layer = Embedding(1000, 64)
>>> print(layer(fixedhot_input).shape)
(16, 7, 64)
>>> layer = Embedding(1000, 64, combiner='mean')
>>> print(layer(fixedhot_input).shape)
(16, 64)
>>> variablehot_input = tf.ragged.constant(
...     [[3, 1, 4, 1], [87], [5, 9, 2], [6], [929]], dtype=tf.int64)
>>> print(variablehot_input.shape)
(5, None)
>>> layer = Embedding(1000, 64)
>>> print(layer(variablehot_input).shape)
(5, None, 64)
>>> layer = Embedding(1000, 64, combiner='sum')
>>> print(layer(variablehot_input).shape)
(5, 64)
"""


def test_examples_of_embedding_print_what_the_guide_prints():
    names = {"Embedding": sok_like.Embedding, "tf": tf}
    examples = doctest.DocTestParser().get_doctest(
        EMBEDDING_EXAMPLES, names, "user_guide", None, None
    )
    told = []
    found = doctest.DocTestRunner().run(examples, out=told.append)
    assert found.attempted == 15
    assert found.failed == 0, "".join(told)


def _train_on_one_process(world_size):
    """The guide's model with plain variables, on the samples of all ranks."""
    tables = [tf.Variable(table) for table in user_guide.tables()]
    head = [tf.Variable(tf.ones([12, 1])), tf.Variable([0.0])]
    variables = [*tables, *head]
    for step in range(user_guide.STEPS):
        parts = [user_guide.samples(step, rank) for rank in range(world_size)]
        labels = np.concatenate([labels for _, labels in parts])
        with tf.GradientTape() as tape:
            rows = [
                tf.gather(table, np.concatenate([ids[i] for ids, _ in parts]))
                for i, table in enumerate(tables)
            ]
            loss = tf.reduce_mean((tf.concat(rows, 1) @ head[0] + head[1] - labels) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(user_guide.RATE * tf.convert_to_tensor(gradient))
    return [v.numpy() for v in variables]


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("world_size", [1, 2])
def test_programs_of_the_guide(on_threads, world_size):
    """Three changed lines train as one process does; slices and shared tables."""
    expected, row = _train_on_one_process(world_size), user_guide.tables()[0][[2]]
    for seen in on_threads(world_size, user_guide.user_guide):
        for found, right in zip([*seen["tables"], *seen["head"]], expected, strict=True):
            # Values grow to thousands, and TensorFlow adds in another order on other processors.
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
        assert seen["whole"] == user_guide.TABLE_SIZES
        np.testing.assert_array_equal(seen["first"], row)
        np.testing.assert_array_equal(seen["last"], row)
