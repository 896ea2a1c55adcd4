"""Arguments as programs for SOK 1.x give them: by position, as None, as NumPy's numbers."""

import json

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras

KEYS = np.array([[[3, 1], [4, 1]]], np.int64)  # [batch, slot_num, nnz_per_slot]


@pytest.mark.parametrize("use_hashtable", [True, np.bool_(True), 1, 0])
@pytest.mark.parametrize(
    "key_dtype, dtype", [(None, tf.int64), ("uint32", tf.uint32), (tf.int32, tf.int32)]
)
def test_key_dtype_and_initializer_by_position(sok, use_hashtable, key_dtype, dtype):
    ones = tf.keras.initializers.Ones()
    dense = sok.All2AllDenseEmbedding(8, 4, 2, 2, False, use_hashtable, key_dtype, ones)
    sparse = sok.DistributedEmbedding("sum", 8, 4, 2, 2, 1, use_hashtable, key_dtype, "ones")
    keys = tf.cast(KEYS, dtype)
    np.testing.assert_array_equal(dense(keys), np.ones([1, 2, 2, 4]))
    np.testing.assert_array_equal(sparse(keys), np.full([1, 2, 4], 2.0))
    for layer in (dense, sparse):
        assert (layer.key_dtype, layer.table.key_dtype) == (dtype, dtype)
        assert layer.use_hashtable is bool(use_hashtable)
        again = type(layer).from_config(layer.get_config())
        assert again.get_config() == layer.get_config()


def test_numbers_of_numpy(sok):
    two, four, eight = (np.array([2, 4, 8])[i] for i in range(3))
    dense = sok.All2AllDenseEmbedding(eight, four, two, two)
    sparse = sok.DistributedEmbedding("sum", eight, four, two, two, np.int32(4))
    assert dense(KEYS).shape == (1, 2, 2, 4)
    assert sparse(KEYS).shape == (1, 2, 4)
    for layer in (dense, sparse):
        config = {key: v for key, v in layer.get_config().items() if key != "embedding_initializer"}
        assert json.loads(json.dumps(config))["slot_num"] == 2
    variable = sok.EmbeddingVariable(four, capacity=eight, initial_capacity=two, name="numpy")
    assert variable.dim == 4
    assert json.dumps(variable.options["capacity"]) == "8"
    option = sok.EmbeddingVariableOption(
        evict_option=sok.GlobalStepEvict(four), filter_option=sok.CounterFilter(two)
    )
    assert sok.get_embedding_variable("by_name", four, capacity=eight, ev_option=option).dim == 4
    ids = tf.ragged.constant([[1]], dtype=tf.int64)
    sok.group_embedding_lookup_sparse([variable], [ids], "sum", params_num_per_group=two)
    assert sok.Embedding(eight, four)(KEYS[0]).shape == (2, 2, 4)
    assert sok.HashEmbedding(four, capacity=eight, initial_capacity=two)(KEYS[0]).shape == (2, 2, 4)


def test_names_of_a_variable(sok):
    layer = sok.All2AllDenseEmbedding(None, 4, 1, 1, name="films")
    variable = layer.embedding_variable
    assert variable.m_var_name == "films"
    assert [v.m_var_name for v in variable.values] == ["films"]
    assert variable.emb_handle is layer.table.handle


def test_layers_by_name_belong_to_their_graph(sok):
    arguments = dict(embedding_vec_size=4, slot_num=1, nnz_per_slot=2)

    def named():
        return sok.get_embedding(
            "films", sok.All2AllDenseEmbedding, max_vocabulary_size_per_gpu=None, **arguments
        )

    eager = named()
    assert tf.function(lambda: named() is eager)()
    values = []
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            with pytest.raises(ValueError, match="`constructor` must be given.*'films'"):
                sok.get_embedding("films")
            layer = named()
            assert layer is not eager and layer.name == "films"
            assert sok.get_embedding("films") is layer
            assert sok.get_embedding("films", sok.DistributedEmbedding, anything=1) is layer
            rows = layer(tf.constant([[3, 1]], tf.int64))
            session.run(tf.compat.v1.global_variables_initializer())
            values.append(session.run(rows))
    np.testing.assert_array_equal(values[0], values[1])
    assert named() is eager


def test_modules_are_reached_through_the_package(sok):
    assert sok.core.context_scope.OptimizerScope is sok.OptimizerScope
    assert sok.core.initialize.Init is sok.Init
    assert sok.saver.Saver.Saver is sok.Saver
    for package in (sok.core, sok.saver):
        with pytest.raises(AttributeError, match="has no attribute 'x'"):
            package.x  # noqa: B018
