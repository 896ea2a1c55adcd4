"""How programs use a distribution, on 2 ranks, beside the same by Keras alone."""

import functools
import tempfile
import time

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import distribution as dist
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from tests.distribution.meshes import (
    assert_close,
    check_as_alone,
    local_shapes,
    shared_folder,
    under,
)

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
of_keras_3 = pytest.mark.skipif(not is_keras_3(), reason="Keras 3 alone has it")
UNITS = 5
PUBLISHED = {
    ".*dense.*kernel": (None, "model"),
    ".*dense.*bias": ("model",),
    ".*conv2d.*kernel": (None, None, None, "model"),
    ".*conv2d.*bias": ("model",),
}
WEIGHTS_FILE = "w.weights.h5"
NAMES = [WEIGHTS_FILE, "m.keras" if is_keras_3() else "w.h5"]


def samples():
    rng = np.random.default_rng(4)
    return rng.normal(size=(22, 6, 6, 2)).astype("f"), rng.integers(0, UNITS, 22)


def make_model(deferred=False):
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(9)
    stack = [
        layers.Conv2D(4, 3, activation="relu", name="conv2d"),
        layers.Flatten(),
        layers.Dense(8, activation="relu", name="dense"),
        layers.Dense(UNITS, activation="softmax", name="dense_1"),
    ]
    return tf.keras.Sequential(stack if deferred else [layers.Input([6, 6, 2]), *stack])


def compiled(model, eager=True):
    # XLA compiles no sharded model, and takes longer than the steps of one that is not.
    options = {"jit_compile": False, "run_eagerly": eager}
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def numbers(model):
    return [v.numpy() for v in model.weights]


def trained(model):
    x, y = samples()
    # 10, 10 and 2 samples, of which rank 1 may get one.
    history = model.fit(x, y, batch_size=10, epochs=2, verbose=0, validation_split=0.1).history
    model.run_eagerly = True  # tracing a prediction takes longer than to make it
    return {
        "history": {k: np.array(v) for k, v in history.items()},
        "weights": numbers(model),
        "predicted": model.predict(x, verbose=0),
    }


@functools.cache
def trained_alone():
    return trained(compiled(make_model()))


def check_cut(model):
    """Ordinary models are not."""
    if dist.distribution() is not None:
        shapes, second = local_shapes(model), (8, 3 - comm.current().rank)
        assert (shapes["dense/kernel"], shapes["dense_1/kernel"]) == ((64, 4), second)


def deferred():
    """A Sequential without an Input is built while its first step is traced."""
    model = make_model(deferred=True)
    found = trained(compiled(model, eager=False))
    check_cut(model)
    return found


def on_batches():
    """A tf.data.Dataset of whole batches on every rank, the last one smaller."""
    model, batches = make_model(), tf.data.Dataset.from_tensor_slices(samples()).batch(10)
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False)
    history = model.fit(batches, epochs=2, verbose=0).history
    return {
        "history": {k: np.array(v) for k, v in history.items()},
        "weights": numbers(model),
        "evaluated": np.array(model.evaluate(batches, verbose=0)),
    }


def loaded():
    """A model with its optimizer's state, loaded from a file and trained further."""
    name, model = shared_folder() / "m.keras", compiled(make_model())
    trained(model)
    model.save(name)
    model = tf.keras.models.load_model(name)
    steps = int(model.optimizer.iterations.numpy())
    x, y = samples()
    history = model.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False).history
    check_cut(model)
    return {"steps": steps, "loss": np.array(history["loss"]), "weights": numbers(model)}


class Interrupted(Exception):
    """What ends a training in its second epoch."""


def interrupt(epoch, logs=None):
    if epoch == 1:
        raise Interrupted


def epochs(folder, *callbacks):
    (x, y), model = samples(), compiled(make_model())
    callbacks = [*callbacks, tf.keras.callbacks.BackupAndRestore(str(folder))]
    fitting = {"batch_size": 11, "epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=callbacks, **fitting)
    return len(history.epoch), numbers(model)


def backed_up():
    """A training that goes on from the backup of the one before; and a folder for each rank."""
    folder, stop = shared_folder(), tf.keras.callbacks.LambdaCallback(interrupt)
    if dist.distribution() is None:
        return epochs(folder)[1]  # not interrupted
    with pytest.raises(Interrupted):
        epochs(folder / "b", stop)
    done, weights = epochs(folder / "b")
    assert done == 2  # the first one is not done again
    with pytest.raises(Exception, match="All ranks must save to the same path"):
        epochs(folder / str(comm.current().rank))
    return weights


@pytest.mark.parametrize(
    "body",
    [
        deferred,
        pytest.param(loaded, marks=of_keras_3),
        pytest.param(backed_up, marks=pytest.mark.keras(slow=True)),
    ],
)
def test_use_is_the_unsharded_one(on_processes, body):
    check_as_alone(on_processes, (1, 2), PUBLISHED, body)


def data_parallel():
    with dist.DataParallel().scope():
        return on_batches()


@pytest.mark.keras(slow=True)
def test_data_parallel_is_one_process(on_processes):
    expected = on_batches()
    for found in on_processes(2, data_parallel):
        assert_close(found, expected, "data parallel")


def by_keras_classes():
    """Keras' own mesh, map (with its `fullmatch`) and distribution."""
    import keras

    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), dist.list_devices())
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*dense.*kernel"] = (None, "model")
    layout_map["dense"] = (None,)  # matches nothing as a whole
    parallel = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    dist.set_distribution(parallel)
    model = make_model()
    found = trained(compiled(model))
    check_cut(model)
    return found


def made_before(ready):
    """A model made before the distribution is sharded when it is compiled or called."""
    model = compiled(make_model()) if ready else make_model()

    def train():
        found = trained(model if ready else compiled(model))
        check_cut(model)
        assert local_shapes(model)["conv2d/kernel"] == (3, 3, 2, 2)
        return found

    return under((1, 2), PUBLISHED, train)


@of_keras_3
@pytest.mark.parametrize(
    "body, arguments", [(by_keras_classes, []), (made_before, [True]), (made_before, [False])]
)
def test_other_ways_to_begin(on_processes, body, arguments):
    for found in on_processes(2, body, *arguments):
        assert_close(found, trained_alone(), body.__name__)


# ---- files ----


def shifted():
    """A model that has no initial weight any more."""
    model = compiled(make_model())
    for variable in model.weights:
        variable.assign(np.asarray(variable) + 1)
    return model


def save(model, folder, name):
    (model.save if name.endswith(".keras") else model.save_weights)(str(folder / name))


def written_under_a_mesh():
    folder = shared_folder()

    def write():
        model = shifted()
        for name in NAMES:
            save(model, folder, name)
        return numbers(model)

    written = under((1, 2), PUBLISHED, write)
    for name in NAMES:
        model = make_model()
        if name.endswith(".keras"):
            model = tf.keras.models.load_model(str(folder / name))
        else:
            model.load_weights(str(folder / name))
        assert all(map(np.array_equal, numbers(model), written)), name


def unsharded():
    """On a mesh that shards nothing files have the values of rank 0; rank 1 saves later."""
    rank, folder = comm.current().rank, shared_folder()

    def write():
        model = compiled(make_model())
        model.set_weights([np.full(v.shape, rank, np.float32) for v in model.weights])
        for name in NAMES:
            time.sleep(0.2 * rank)
            save(model, folder, name)
        time.sleep(0.2 * rank)
        tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
        return model

    model = under((2, 1), PUBLISHED, write)
    for name in NAMES:
        model.load_weights(str(folder / name))
        assert not any(map(np.any, numbers(model))), name
    tf.train.Checkpoint(model=model).read(str(folder / "checkpoint"))
    assert not any(map(np.any, numbers(model)))


def not_loaded():
    """The last layer of rank 1 cannot be read: the shards that ranks have read are put back."""
    file, cls = shared_folder() / WEIGHTS_FILE, tf.keras.layers.Dense
    own = cls.load_own_variables

    def fail(self, store):
        own(self, store)
        if comm.current().rank == 1 and self.name == "dense_1":
            raise OSError(5, "the disk is ill")

    make_model().save_weights(file)
    model = shifted()
    before = numbers(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "load_own_variables", fail)
        with pytest.raises(RuntimeError, match="(?s)rank 1: .*the disk is ill"):
            model.load_weights(file)
    assert all(map(np.array_equal, before, numbers(model))) and local_shapes(model)


@pytest.mark.parametrize("body", [written_under_a_mesh, unsharded])
def test_files(on_processes, body):
    on_processes(2, body)


def exported():
    """A SavedModel would hold one rank's shards."""
    folder, model, module = tempfile.mkdtemp(), compiled(make_model()), tf.Module()
    module.kernel = model.get_layer("dense").kernel
    for write in (
        model.export,
        lambda path: tf.saved_model.save(model, path),
        lambda path: tf.saved_model.save(module, path),
    ):
        with pytest.raises(ValueError, match="sok.export_saved_model"):
            write(f"{folder}/saved")


# ---- errors and layouts ----


def of_shards():
    """A constraint that needs the whole variable; a value of the shard's shape is not one of it."""
    dense = tf.keras.layers.Dense(4, kernel_constraint="max_norm", name="dense")
    model = tf.keras.Sequential([tf.keras.layers.Input([6]), dense])
    with pytest.raises(ValueError, match="other than NonNeg.*MaxNorm.*dense/kernel"):
        model.compile("sgd", "mse")
        model.train_on_batch(np.zeros((2, 6), "f"), np.zeros((2, 4), "f"))
    kernel = make_model().get_layer("dense").kernel

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def assign(value):
        kernel.assign(value)

    value = np.ones(kernel.local_shape, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="64,4"):
        assign(value)
    with pytest.raises(ValueError, match=r"(?=.*\(64, 8\)).*\(64, 4\)"):
        kernel.assign(value)


def explicit():
    """Layouts of a variable's own, and of an output."""
    import keras

    own = keras.Variable(
        lambda shape, dtype: tf.reshape(tf.range(10.0), shape),
        shape=(5, 2),
        dtype="float32",
        layout=dist.TensorLayout(("model", None), dist.distribution().device_mesh),
    )
    whole = np.arange(10.0).reshape(5, 2)
    here = slice(3, None) if comm.current().rank else slice(3)
    np.testing.assert_array_equal(own.local, whole[here])
    np.testing.assert_array_equal(own, whole)
    layout = dist.distribution().get_tensor_layout("dense/output")
    assert layout.axes == ("batch", "model")
    assert make_model().predict(samples()[0], verbose=0).shape == (22, 5)


@pytest.mark.parametrize(
    "body", [*(not_loaded, of_shards), pytest.param(exported, marks=pytest.mark.keras(slow=True))]
)
def test_shards(on_processes, body):
    on_processes(2, under, (1, 2), PUBLISHED, body)


class OfTable(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.bag = sok.Embedding(9, 3, combiner="sum", name="bag")

    def call(self, ids):
        return self.bag(ids)


def of_floats():
    """Ids that are not integers are not truncated."""
    model = OfTable()
    assert model(tf.constant([[1, 2]])).shape == (1, 3) and local_shapes(model)
    with pytest.raises(TypeError, match="Ids of table 'bag' must be integers.*float32"):
        model(tf.constant([[1.7, 2.0]]))


def test_ids_of_a_sharded_table(on_processes):
    on_processes(2, under, (1, 2), {".*embeddings": ("model", None)}, of_floats)


@of_keras_3
def test_explicit_layouts(on_processes):
    axes = {**PUBLISHED, ".*dense/output": ("batch", "model")}
    on_processes(2, under, (1, 2), axes, explicit)
