"""AutoGraph converts a user's function when it is traced, and nothing of the package."""

import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

pytestmark = pytest.mark.keras


@pytest.fixture
def converted(monkeypatch):
    """The modules of the functions that AutoGraph converts."""
    modules = set()
    convert = api._convert_actual

    def recording(entity, *args):
        modules.add(entity.__module__)
        return convert(entity, *args)

    monkeypatch.setattr(api, "_convert_actual", recording)
    return modules


def test_a_step_converts_nothing_of_the_package(sok, converted):
    tables = [sok.EmbeddingVariable(4, name=f"table{i}") for i in range(2)]
    ids = [tf.ragged.constant([[1, 2], [3]], tf.int64)] * 2
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam())

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            rows = sok.group_embedding_lookup_sparse(tables, ids, "sum", training=True)
            loss = tf.add_n([tf.reduce_sum(r) for r in rows])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
        if loss > 100.0:  # the user's own branch is converted
            loss = tf.zeros([])
        return loss

    step(ids)
    assert __name__ in converted
    assert not [m for m in converted if m.partition(".")[0] == "sok_like"]
