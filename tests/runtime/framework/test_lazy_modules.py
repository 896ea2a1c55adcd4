"""Models in files of Keras, loaded by a program that has only imported the package."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests import forks

pytestmark = pytest.mark.keras

KERAS_3 = not hasattr(tf.keras, "__internal__")
X = np.arange(8).reshape(4, 2)

LOAD = """
import importlib.util, sys
import sok_like

def seen():
    hooks = [finder for finder in sys.meta_path if "sok_like" in type(finder).__module__]
    return len(hooks), "sok_like.table.variable" in sys.modules

before = seen()
import keras
if importlib.util.find_spec("tf_keras"):
    import tf_keras
after = seen()
import numpy as np
import tensorflow as tf
model = tf.keras.models.load_model(sys.argv[1])
rows = model.predict(np.arange(8).reshape(4, 2), verbose=0)
history = model.fit(np.arange(8).reshape(4, 2), np.ones([4, 1]), verbose=0)
print([before, after, rows.ravel().tolist()])
"""


def save(sok, path):
    keys = tf.keras.Input([2], dtype="int64")
    combined = sok.DistributedEmbedding("sum", None, 3, slot_num=2, max_nnz=1, name="combined")
    hashed = sok.HashEmbedding(3, name="hashed")
    both = tf.keras.layers.Concatenate()([combined(keys), hashed(keys)])
    output = tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(both))
    model = tf.keras.Model(keys, output)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    model.fit(X, np.ones([4, 1]), verbose=0)
    model.save(path)
    return model.predict(X, verbose=0).ravel()


@pytest.mark.keras(slow=True)
def test_a_model_is_loaded_after_an_import_alone(sok, tmp_path):
    """In a process that has imported nothing, and in one that has imported Keras."""
    left = int(importlib.util.find_spec("tf_keras") is None)  # of a nightly
    path = str(tmp_path / "model.keras")
    expected = save(sok, path)
    keras = "keras" if KERAS_3 else "tf_keras"
    after_keras = forks.command("-c", f"import {keras}\n{LOAD}", path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [([sys.executable, "-c", LOAD, path], 2), (after_keras, 1)]
    if not KERAS_3:  # `tf.keras` itself loads it
        imports, rest = LOAD.partition("import keras")[0], LOAD.partition("after = seen()")[2]
        program = f"{imports}after = {left}, False{rest}"
        commands.append(([sys.executable, "-c", program, path], 2))
    for command, hooks in commands:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        before, after, rows = eval(done.stdout.splitlines()[-1])
        assert before == (hooks, False) and after == (left, False)  # hooks that are done go
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_every_class_that_registers_itself_is_announced(sok):
    of_keras_3 = {"sok_like>EmbeddingAwareLossScaleOptimizer"}
    for name in set(sok._IN_FILES) - (set() if KERAS_3 else of_keras_3):
        loaded = sok._class_in_file(name)
        assert tf.keras.utils.get_registered_name(loaded) == name
    for name in sok.__all__:
        getattr(sok, name)
    aware = "sok_like>EmbeddingAware"  # of any optimizer that a test has wrapped
    registered = {n for n in tf.keras.utils.get_custom_objects() if n.startswith("sok_like")}
    assert {n for n in registered ^ set(sok._IN_FILES) if not n.startswith(aware)} == set()
