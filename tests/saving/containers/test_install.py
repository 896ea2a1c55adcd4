"""What is changed in TensorFlow and Keras is there from `sok.Init`, or a first use, on."""

import ast
import subprocess
import sys

import pytest

from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = pytest.mark.keras

_PROGRAM = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import sok_like as sok
from sok_like.runtime.framework import hooks
assert hooks.listing() == [], "nothing is wrapped before"
sok.Saver  # loads the modules of saving
assert hooks.listing() == [], "nothing is wrapped before"
import tensorflow as tf
{start}
group = sok.GroupEmbedding([4], gradient_scale="sum")
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(group([tf.constant([1, 2])])[0])
optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
variables = group.trainable_variables
optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
print([name for name, _, state in hooks.listing() if state == "in place"])
tf.keras.Sequential()
with tf.Graph().as_default():
    sok.get_embedding_variable("in_graph", 2)
for door in (hooks.CHECKPOINTS, hooks.DENSE_TABLES, hooks.RANKS):
    hooks.open_door(door)
print([name for name, _, state in hooks.listing() if state == "in place"])
"""
_EXPECTED = (
    *("checkpoint.TrackableSaver.restore", "saving_lib.load_model", "saving_lib._load_state"),
    "Layer.load_own_variables",
)
_LATER = (
    *("functional_saver.MultiDeviceSaver.save", "Layer._trackable_children"),
    *("CheckpointSaverHook.begin", ".Saver.restore", "ask_to_proceed_with_overwrite"),
)
_OF_MODELS = ("saving_lib.load_weights_only", "Model.make_test_function")  # later in Keras 3
# Functions that are wrapped in a program with one group, on one process.
_MOST = 24 if is_keras_3() else 33


# Keras 3 tells nobody that a model that is older than the first use gets a table.
_OLDER_MODEL = """
class Model(tf.keras.Model): pass
model = Model()
sok.get_embedding_variable('table', 2)
"""


@pytest.mark.parametrize(
    "start, with_model",
    [
        ("sok.Init(global_batch_size=8)", False),
        pytest.param(_OLDER_MODEL, True, marks=pytest.mark.keras(slow=True), id="older model"),
    ],
)
def test_the_first_initialization_and_the_first_use_install(start, with_model):
    program = _PROGRAM.format(start=start)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names, later = map(ast.literal_eval, done.stdout.splitlines()[-2:])
    assert with_model or len(names) <= _MOST, names
    at_once = (*_EXPECTED, *(_OF_MODELS if with_model or not is_keras_3() else ()))
    for expected in (*_EXPECTED, *_OF_MODELS, *_LATER):
        assert any(name.endswith(expected) for name in later), (expected, later)
        assert any(name.endswith(expected) for name in names) == (expected in at_once), expected
