"""A subclassed model with a table, saved whole and loaded: the weights of its other layers, too.

Keras 3 builds such a model with symbolic floats, and leaves out what it could not build.
"""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = pytest.mark.keras
IDS = np.arange(16).reshape(8, 2)
FEATURES = {"a": np.arange(8), "b": np.array(list("abcdefgh"))}


@tf.keras.utils.register_keras_serializable("tests")
class Subclassed(tf.keras.Model):
    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        import sok_like as sok

        self.kind = kind
        self.rows = {
            "distributed": lambda: sok.DistributedEmbedding("sum", None, 4, 2, 1, name="rows"),
            "all2all": lambda: sok.All2AllDenseEmbedding(None, 4, 2, 1, name="rows"),
            "group": lambda: sok.GroupEmbedding({"a": 4, "b": 4}, name="rows"),
        }[kind]()
        self.flatten, self.head = tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)

    def call(self, inputs):
        rows = self.rows(inputs)
        both = tf.concat([rows["a"], rows["b"]], 1) if self.kind == "group" else rows
        return self.head(self.flatten(both))

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras saves no subclassed model by its config")
@pytest.mark.parametrize("kind", ["distributed", "all2all", "group"])
def test_a_subclassed_model_is_loaded_whole(sok, tmp_path, kind):
    model, inputs = Subclassed(kind), FEATURES if kind == "group" else IDS
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse")
    data = tf.data.Dataset.from_tensor_slices((inputs, np.ones([8, 1], np.float32))).batch(4)
    model.fit(data, verbose=0)
    expected = model.predict(data, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(data, verbose=0), expected)
