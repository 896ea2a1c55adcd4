"""Programs without tables find TensorFlow and Keras as they are, after `sok.Init` as before it."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests import forks

pytestmark = pytest.mark.keras(slow=True)

KERAS_3 = not hasattr(tf.keras, "__internal__")
# Of Keras' own tests, which its wheels hold: files, and parts of the tests' names.
SELECTED = {
    "saving/saving_lib_test.py": "save_load_weights_only or saved_module_paths or partial_load "
    "or custom_assets or metadata or h5_io_store_basics or redefinition or bidirectional",
    "optimizers/optimizer_test.py": "iterations_counter or clip or test_ema or constraints or "
    "accumulation or tf_checkpointing or static_loss or overwrite or pickleable",
    "optimizers/adam_test.py": "correctness or weight_decay",
}
INITIALIZED = """
import tensorflow as tf
import sok_like as sok
from sok_like.__main__ import wrapped
sok.Init(global_batch_size=8)
assert len(wrapped()) > 25
sok.EmbeddingVariable(4, name="a_table").as_weight()
"""


def found(folder):
    """The numbers of a small program that trains, saves and loads by both ways of TensorFlow."""
    tf.keras.utils.set_random_seed(3)
    inputs = np.random.default_rng(1).normal(size=[16, 3]).astype(np.float32)
    layers = [tf.keras.layers.Dense(4, "relu", kernel_regularizer="l2"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input([3]), *layers])
    model.compile(tf.keras.optimizers.Adam(0.1, clipnorm=0.5), "mse", metrics=["mae"])
    history = model.fit(inputs, inputs[:, 0], batch_size=4, epochs=2, verbose=0).history
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    model.save(folder / "model.h5")
    tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    loaded = [
        tf.keras.models.load_model(folder / name, compile=name == "model.keras")
        for name in ("model.keras", "model.h5")
    ]
    loaded[0].load_weights(folder / "model.weights.h5")
    tf.train.Checkpoint(model=loaded[0]).read(str(folder / "checkpoint"))
    loaded[0].fit(inputs, inputs[:, 0], batch_size=4, verbose=0)

    @tf.function
    def slopes(x):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(model(x) ** 2)
            again = tf.recompute_grad(lambda z: tf.reduce_sum(model(z) ** 3))(x)
            slope = inner.gradient(y, x)
        found = [slope, outer.gradient(slope, x), outer.gradient(again, x)]
        return tf.clip_by_global_norm(found, 0.1)[0]

    weights = [weight for m in (model, *loaded) for weight in m.get_weights()]
    values = [*weights, *history.values(), *slopes(tf.constant(inputs))]
    return [np.asarray(value) for value in values]


def test_the_same_bits(tmp_path):
    program = (
        "import pathlib, sys, numpy as np\n"
        "from tests.runtime.test_unaffected import INITIALIZED, found\n"
        "folders = [pathlib.Path(sys.argv[1]) / name for name in ('before', 'after')]\n"
        "results = []\n"
        "for folder in folders:\n"
        "    folder.mkdir()\n"
        "    results.append(found(folder))\n"
        "    exec(INITIALIZED)\n"
        "assert len(results[0]) == len(results[1]) > 15\n"
        "for before, after in zip(*results, strict=True):\n"
        "    np.testing.assert_array_equal(before, after)\n"
    )
    done = forks.run("-c", program, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not KERAS_3, reason="the wheels of tf_keras hold no tests")
def test_keras_own_tests_find_the_same(tmp_path):
    import keras

    source = pathlib.Path(keras.__file__).parent / "src"
    if not (source / next(iter(SELECTED))).exists():
        pytest.skip("this Keras was installed without its tests")
    files = ", ".join(repr(str(source / name)) for name in SELECTED)
    program = (
        "import os, sys, pytest\n"
        "os.environ['KERAS_BACKEND'] = 'tensorflow'\n"
        "class Outcomes:\n"
        "    def __init__(self): self.by_test = {}\n"
        "    def pytest_runtest_logreport(self, report):\n"
        "        outcome = self.by_test.get(report.nodeid, 'passed')\n"
        "        if report.outcome != 'passed': outcome = report.outcome\n"
        "        self.by_test[report.nodeid] = outcome\n"
        "def run():\n"
        "    outcomes = Outcomes()\n"
        f"    arguments = ['-q', '-p', 'no:cacheprovider', '-c', '/dev/null', {files}]\n"
        f"    arguments += ['--rootdir', {str(source)!r}]\n"
        f"    arguments += ['-k', {' or '.join(SELECTED.values())!r}]\n"
        "    pytest.main(arguments, plugins=[outcomes])\n"
        "    return outcomes.by_test\n"
        "before = run()\n"
        "from tests.runtime.test_unaffected import INITIALIZED\n"
        "exec(INITIALIZED)\n"
        "after = run()\n"
        "assert len(before) > 20 and 'failed' not in before.values(), before\n"
        "assert after == before, after\n"
    )
    done = forks.run("-c", program)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
