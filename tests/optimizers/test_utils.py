"""Telling embedding variables from others."""

import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras


@pytest.mark.parametrize("kind", [list, tuple])
def test_split_keeps_the_order(sok, kind):
    layers = [sok.All2AllDenseEmbedding(None, 2, 1, 1, name=name) for name in ("a", "b")]
    dense = tf.keras.layers.Dense(1)
    dense.build([None, 2])
    kernel, bias = dense.trainable_variables
    first, second = (layer.embedding_variable for layer in layers)
    variables = kind([kernel, first, bias, second, layers[0].table, tf.Variable(1.0)])
    embedding, other = sok.split_embedding_variable_from_others(variables)
    assert [id(v) for v in embedding] == [id(variables[i]) for i in (1, 3, 4)]
    assert [id(v) for v in other] == [id(variables[i]) for i in (0, 2, 5)]
    assert (type(embedding), type(other)) == (tuple, tuple)  # as SOK 1.x documents
    assert list(map(len, sok.filter_variables(variables))) == [3, 3]
    assert list(map(type, sok.filter_variables(variables))) == [list, list]
    assert sok.split_embedding_variable_from_others([]) == ((), ())


@pytest.mark.parametrize("received", [None, {}, "v", 3, iter([])])
def test_split_wants_a_list_or_a_tuple(sok, received):
    with pytest.raises(ValueError, match="`variables` must be a list or a tuple.*Received"):
        sok.split_embedding_variable_from_others(received)
