"""Wrong inputs of both layers are refused as a Keras model is built, and as one is revived."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras
LAYERS = {
    "distributed": lambda sok: sok.DistributedEmbedding("sum", None, 4, 2, 3, name="fields"),
    "all_to_all": lambda sok: sok.All2AllDenseEmbedding(None, 4, 2, 3, name="fields"),
}


def model(layer, shape=(2, 3), dtype="int64"):
    keys = tf.keras.Input(shape, dtype=dtype)
    return tf.keras.Model(keys, layer(keys))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "shape, dtype, words",
    [
        ((2, 3), "float32", "float32.*tf.keras.Input.shape, dtype='int64'."),
        ((2, 3), None, "float32.*tf.keras.Input.shape, dtype='int64'."),
        ((2, 3), "string", "string.*tf.keras.layers.Hashing"),
        ((2, 3), "bool", "bool"),
        ((5, 3), "int64", "5, 3"),
        ((7,), "int64", "7"),
        ((2, 4), "int64", "4"),
        ((2, 3, 1, 1, 2), "int64", "2, 3, 1, 1, 2"),
    ],
)
def test_refused_as_the_model_is_built(sok, name, shape, dtype, words):
    with pytest.raises((TypeError, ValueError), match=f"(?s){words}"):
        model(LAYERS[name](sok), shape, dtype)


@pytest.mark.parametrize("name, dtype", zip(LAYERS, ["int32", "uint64"], strict=True))
def test_inputs_of_other_kinds(sok, name, dtype):
    assert model(LAYERS[name](sok), (2, 3), dtype)(tf.ones([5, 2, 3], dtype)).shape[0] == 5
    keys = [tf.keras.Input([2, 3], dtype="int64") for _ in range(2)]
    with pytest.raises(TypeError, match="The input must be"):
        LAYERS[name](sok)(keys)
    if name == "distributed":
        sparse = tf.keras.Input([3], dtype="int64", sparse=True)
        assert LAYERS[name](sok)(sparse).shape[1:] == (2, 4)


def test_the_hint_on_strings_works(sok):
    words = tf.keras.Input([2], dtype="string")
    keys = tf.keras.layers.Hashing(2**62)(words)
    layer = sok.DistributedEmbedding("sum", None, 4, 2, 1)
    built = tf.keras.Model(words, layer(keys))
    rows = built(tf.constant([["film", "genre"], ["film", "other"]]), training=True).numpy()
    assert (rows[0, 0] == rows[1, 0]).all() and (rows[0, 1] != rows[1, 1]).all()
    assert int(layer.table.size()) == 3
    for lookup in (layer, lambda ids: sok.group_embedding_lookup([layer.table], [ids])):
        with pytest.raises(TypeError, match="string.*tf.keras.layers.Hashing"):
            lookup(tf.constant([["film", "genre"]]))


@pytest.mark.parametrize("argument, value", [("slot_num", "x"), ("no_such", 1), ("combiner", "no")])
def test_the_cause_comes_first_where_a_model_cannot_be_revived(sok, argument, value):
    built = model(LAYERS["distributed"](sok))
    config, keys = built.get_config(), np.ones([4, 2, 3], np.int64)
    assert tf.keras.Model.from_config(built.get_config())(keys).shape == built(keys).shape
    for layer in config["layers"]:
        if layer["config"]["name"] == "fields":
            layer["config"][argument] = value
    with pytest.raises(ValueError) as caught:
        tf.keras.Model.from_config(config)
    start = "DistributedEmbedding 'fields' cannot be made from its configuration: "
    assert str(caught.value).startswith(start)
    assert argument in str(caught.value) and len(str(caught.value)) < 400
