"""How programs use a distribution, on 2 ranks, beside the same by Keras alone."""

import pathlib
import tempfile
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf

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
    history = model.fit(x, y, batch_size=10, epochs=3, verbose=0, validation_split=0.1).history
    model.run_eagerly = True  # tracing a prediction takes longer than to make it
    return {
        "history": {k: np.array(v) for k, v in history.items()},
        "weights": numbers(model),
        "predicted": model.predict(x, verbose=0),
    }


def is_cut(model):
    """Ordinary models are not."""
    return dist.distribution() is None or local_shapes(model)["dense/kernel"] == (64, 4)


def published(eager):
    """The published example."""
    model = make_model()
    found = trained(compiled(model, eager))
    if dist.distribution() is not None and dist.distribution().device_mesh.shape == (1, 2):
        second, number = (8, 3 - comm.current().rank), (3, 3, 2, 2)
        shapes = local_shapes(model)
        assert (shapes["dense/kernel"], shapes["dense_1/kernel"]) == ((64, 4), second)
        assert shapes["conv2d/kernel"] == number
    else:
        assert local_shapes(model) == {}
    return found


def deferred():
    """A Sequential without an Input is built while its first step is traced."""
    model = make_model(deferred=True)
    found = trained(compiled(model, eager=False))
    assert is_cut(model)
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
    assert is_cut(model)
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
    "shape, body, arguments",
    [
        ((1, 2), published, [False]),
        pytest.param((1, 2), deferred, [], marks=pytest.mark.keras(slow=True)),
        pytest.param((2, 1), on_batches, [], marks=pytest.mark.keras(slow=True)),
        pytest.param((1, 2), loaded, [], marks=of_keras_3),
        pytest.param((1, 2), backed_up, [], marks=pytest.mark.keras(slow=True)),
    ],
)
def test_use_is_the_unsharded_one(on_processes, shape, body, arguments):
    check_as_alone(on_processes, shape, PUBLISHED, body, *arguments)


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
    assert is_cut(model)
    return found


def made_before(ready):
    """A model made before the distribution is sharded when it is compiled or called."""
    model = compiled(make_model()) if ready else make_model()

    def train():
        found = trained(model if ready else compiled(model))
        assert is_cut(model)
        return found

    return under((1, 2), PUBLISHED, train)


@of_keras_3
@pytest.mark.parametrize(
    "body, arguments", [(by_keras_classes, []), (made_before, [True]), (made_before, [False])]
)
def test_other_ways_to_begin(on_processes, body, arguments):
    expected = published(True)
    for found in on_processes(2, body, *arguments):
        assert_close(found, expected, body.__name__)


# ---- files ----


def written_under_a_mesh():
    folder = shared_folder()

    def write():
        model = make_model()
        trained(compiled(model))
        for name in NAMES:
            (model.save if name.endswith(".keras") else model.save_weights)(folder / name)
        return numbers(model)

    written = under((1, 2), PUBLISHED, write)
    for name in NAMES:
        if name.endswith(".keras"):
            model = tf.keras.models.load_model(folder / name)
        else:
            model = make_model()
            model.load_weights(folder / name)
        for found, expected in zip(numbers(model), written, strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=name)


def read_under_a_mesh():
    """Weights of an unsharded model; and whole weights set."""
    file, source = pathlib.Path(tempfile.mkdtemp()) / WEIGHTS_FILE, make_model()
    trained(compiled(source))
    source.save_weights(file)

    def read():
        for set_weights in (False, True):
            model = make_model()
            model.set_weights(source.get_weights()) if set_weights else model.load_weights(file)
            for found, expected in zip(numbers(model), numbers(source), strict=True):
                np.testing.assert_array_equal(found, expected)

    under((1, 2), PUBLISHED, read)


def unsharded():
    """On a mesh that shards nothing files have the values of rank 0; rank 1 saves later."""
    rank, folder = comm.current().rank, shared_folder()

    def write():
        model = compiled(make_model())
        model.set_weights([np.full(v.shape, rank, np.float32) for v in model.weights])
        for name in NAMES:
            time.sleep(0.2 * rank)
            (model.save if name.endswith(".keras") else model.save_weights)(str(folder / name))
        time.sleep(0.2 * rank)
        tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
        return model

    model = under((2, 1), PUBLISHED, write)
    for name in NAMES:
        model.load_weights(str(folder / name))
        assert all((v.numpy() == 0).all() for v in model.weights), name
    tf.train.Checkpoint(model=model).read(str(folder / "checkpoint"))
    assert all((v.numpy() == 0).all() for v in model.weights)


def not_loaded():
    """The last layer of rank 1 cannot be read: the shards that ranks have read are put back."""
    file, cls = shared_folder() / WEIGHTS_FILE, tf.keras.layers.Dense
    own = cls.load_own_variables

    def fail(self, store):
        own(self, store)
        if comm.current().rank == 1 and self.name == "dense_1":
            raise OSError(5, "the disk is ill")

    def read():
        model = make_model()
        model.save_weights(file)
        for variable in model.weights:
            variable.assign(np.asarray(variable) + 1)
        before = numbers(model)
        cls.load_own_variables = fail
        try:
            with pytest.raises(RuntimeError, match="(?s)rank 1: .*the disk is ill"):
                model.load_weights(file)
        finally:
            cls.load_own_variables = own
        assert all(map(np.array_equal, before, numbers(model))) and local_shapes(model)

    under((1, 2), PUBLISHED, read)


@pytest.mark.parametrize(
    "body",
    [
        *(written_under_a_mesh, unsharded, not_loaded),
        pytest.param(read_under_a_mesh, marks=pytest.mark.keras(slow=True)),
    ],
)
def test_files(on_processes, body):
    on_processes(2, body)


def exported():
    """A SavedModel would hold one rank's shards."""
    folder, model, module = tempfile.mkdtemp(), compiled(make_model()), tf.Module()
    trained(model)
    module.kernel = model.get_layer("dense").kernel
    for write in (
        model.export,
        lambda path: tf.saved_model.save(model, path),
        lambda path: tf.saved_model.save(module, path),
    ):
        with pytest.raises(ValueError, match="sok.export_saved_model"):
            write(f"{folder}/saved")


@pytest.mark.keras(slow=True)
def test_saved_model_of_shards_is_refused(on_processes):
    on_processes(2, under, (1, 2), PUBLISHED, exported)


# ---- errors and layouts ----


def built(axes, *patterns):
    mesh = dist.DeviceMesh((1, 2), ("batch", "model"))
    layout_map = dist.LayoutMap(mesh)
    for pattern in patterns or (".*dense/kernel",):
        layout_map[pattern] = axes
    with dist.ModelParallel(mesh, layout_map).scope():
        model = make_model()
        model.compile("sgd", "mse")
        return model


def constrained():
    mesh, layers = dist.DeviceMesh((1, 2), ("batch", "model")), tf.keras.layers
    layout_map = dist.LayoutMap(mesh)
    layout_map["dense/kernel"] = (None, "model")
    with dist.ModelParallel(mesh, layout_map).scope():
        inputs = layers.Input([6])
        dense = layers.Dense(4, kernel_constraint="max_norm", name="dense")
        model = tf.keras.Model(inputs, dense(inputs))
        model.compile("sgd", "mse")
        model.train_on_batch(np.zeros((2, 6), "f"), np.zeros((2, 4), "f"))


def too_large():
    wide = dist.DeviceMesh((2, 4), ("batch", "model"), list(range(8)))
    dist.ModelParallel(wide, dist.LayoutMap(wide))


def other_order():
    dist.DataParallel(dist.DeviceMesh((2,), ("batch",), [1, 0]))


def of_the_shard():
    """A value of the shard's shape is not one of the variable."""
    kernel = built((None, "model")).get_layer("dense").kernel

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def assign(value):
        kernel.assign(value)

    value = np.ones(kernel.local_shape, np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="64,4"):
        assign(value)
    kernel.assign(value)


def raises(call, words, *args):
    with pytest.raises(ValueError) as raised:
        call(*args)
    text = str(raised.value)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    "call, arguments, words",
    [
        (built, [("model",)], ["must have an item for each dimension", "('model',)", "(64, 8)"]),
        (built, [("model", "model")], ["must name an axis once", "'model'", "dense/kernel"]),
        (built, [(None, "modle")], ["must name axes of the mesh", "'modle'", "dense/kernel"]),
        (
            built,
            [(None, "model"), ".*dense/k.*", ".*se/kernel"],
            ["'.*dense/k.*'", "'.*se/kernel'", "dense/kernel", "(64, 8)"],
        ),
        (constrained, [], ["other than NonNeg", "MaxNorm", "dense/kernel"]),
        (of_the_shard, [], ["(64, 8)", "(64, 4)"]),
        (too_large, [], ["(2, 4)", "('batch', 'model')", "2 rank(s)"]),
        (other_order, [], ["in the order of list_devices()", "[1, 0]"]),
        (dist.initialize, [None, 3], ["`num_processes`", "num_processes=3"]),
    ],
)
def test_errors_say_what_is_wrong(on_processes, call, arguments, words):
    on_processes(2, raises, call, words, *arguments)


def unmatched():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built((None, "model"), "no_such.*kernel")(samples()[0])
    (warning,) = [str(w.message) for w in caught if "LayoutMap" in str(w.message)]
    assert "'no_such.*kernel'" in warning and "dense/kernel" in warning


def test_pattern_that_matches_nothing_warns(on_processes):
    on_processes(2, unmatched)


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


@of_keras_3
def test_explicit_layouts(on_processes):
    axes = {**PUBLISHED, ".*dense/output": ("batch", "model")}
    on_processes(2, under, (1, 2), axes, explicit)
