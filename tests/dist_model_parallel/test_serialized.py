"""Compiled models with averaging optimizers, cloned, and saved and loaded with their optimizer."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.framework.running_keras import is_keras_3
from tests import forks

pytestmark = pytest.mark.keras
distributed, wrap = dmp.DistributedOptimizer, sok_like.OptimizerWrapper
KEYS = np.arange(24).reshape(12, 2) % 20


def scaled(optimizer):
    cls = tf.keras.optimizers if is_keras_3() else tf.keras.mixed_precision
    return cls.LossScaleOptimizer(optimizer, initial_scale=8.0)


def with_schedule():
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    return distributed(tf.keras.optimizers.Adam(rate, beta_1=0.8), sparse_as_dense=True)


def scaled_adam():
    stock = tf.keras.optimizers.Adam(0.1)
    return distributed(scaled(stock)) if is_keras_3() else scaled(distributed(stock))


OPTIMIZERS = {
    "schedule": with_schedule,
    "momentum": lambda: distributed(tf.keras.optimizers.SGD(0.1, momentum=0.9)),
    "wrapped": lambda: distributed(
        sok_like.OptimizerWrapper(tf.keras.optimizers.Adam(), lazy=True)
    ),
    "scaled": scaled_adam,
    "wrapped around scaled": lambda: wrap(scaled(tf.keras.optimizers.Adam())),
}


def make_model(kind):
    keys = tf.keras.Input([2], dtype="int64")
    tables = [tf.keras.layers.Embedding(20, 4)]
    (rows,) = dmp.DistributedEmbedding(tables)([keys])
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(rows)))
    # One is traced: that takes longer than the steps.
    model.compile(OPTIMIZERS[kind](), "mse", jit_compile=False, run_eagerly=kind != "wrapped")
    return model


def fit(model):
    model.fit(KEYS, np.ones([12, 1]), batch_size=4, shuffle=False, verbose=0)
    return model.predict(KEYS, verbose=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loaded_model_trains_on_and_a_clone_starts_anew(sok, tmp_path, kind):
    model = make_model(kind)
    fit(model)
    cloned = tf.keras.models.clone_model(model)
    assert np.isfinite(cloned.predict(KEYS, verbose=0)).all()
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    # tf_keras does not compile clones.
    for other, steps in ((loaded, 3), *([(cloned, 0)] if is_keras_3() else [])):
        assert type(other.optimizer) is type(model.optimizer)
        assert other.optimizer.get_config() == model.optimizer.get_config()
        assert int(tf.convert_to_tensor(other.optimizer.iterations)) == steps
    np.testing.assert_array_equal(fit(loaded), fit(model))


def test_a_new_process_makes_the_optimizer_again(sok, tmp_path):
    model = make_model("wrapped")
    expected = fit(model)
    path = str(tmp_path / "m.keras")
    model.save(path)
    lines = f"""
import sok_like
import numpy as np
import tensorflow as tf
model = tf.keras.models.load_model({path!r})
assert type(model.optimizer).__name__ == "DistributedEmbeddingAwareAdam"
assert int(tf.convert_to_tensor(model.optimizer.iterations)) == 3
print(model.predict(np.arange(24).reshape(12, 2) % 20, verbose=0).ravel().tolist())
"""
    done = forks.run("-c", lines)
    assert done.returncode == 0, done.stderr
    found = eval(done.stdout.strip().splitlines()[-1])
    np.testing.assert_array_equal(np.array(found, np.float32), expected.ravel())
