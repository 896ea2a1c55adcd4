"""How programs use a distribution, on 2 ranks: each check returns what a test compares."""

import os
import pathlib
import tempfile
import warnings

import numpy as np
import tensorflow as tf

from sok_like.distribution.sharded_variable import path_of, shard_of
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks import Alone

UNITS = 5


def checks(world_size):
    if world_size != 2:
        return {}
    found = {
        f.__name__: f
        for f in (
            published,
            deferred,
            eager,
            dataset,
            own_loop,
            files,
            from_files,
            not_loaded,
            errors,
            exported,
            backed_up,
        )
    }
    for_keras_3 = (keras_classes, made_before, loaded, explicit)
    return found | ({f.__name__: f for f in for_keras_3} if is_keras_3() else {})


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


def compiled(model, **options):
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def train(model, **options):
    return trained(compiled(model, **options))


def trained(model):
    x, y = samples()
    # 10, 10 and 2 samples, of which rank 1 may get one.
    history = model.fit(x, y, batch_size=10, epochs=3, verbose=0, validation_split=0.1).history
    model.run_eagerly = True  # tracing a prediction takes longer than to make it
    return {
        "history": {k: np.array(v) for k, v in history.items()},
        "weights": [v.numpy() for v in model.weights],
        "predicted": model.predict(x, verbose=0),
    }


def alone(deferred=False, **options):
    """The training of Keras alone. Not compiled by XLA, which takes longer than the steps."""
    return train(make_model(deferred), jit_compile=False, **options)


def eager_alone():
    return alone(run_eagerly=True)


PUBLISHED = {
    ".*dense.*kernel": (None, "model"),
    ".*dense.*bias": ("model",),
    ".*conv2d.*kernel": (None, None, None, "model"),
    ".*conv2d.*bias": ("model",),
}


def layouts(dist, shape, axes=None):
    mesh = dist.DeviceMesh(shape=shape, axis_names=("batch", "model"), devices=dist.list_devices())
    layout_map = dist.LayoutMap(mesh)
    for path, layout in (axes or PUBLISHED).items():
        layout_map[path] = layout
    return mesh, layout_map


def under(shape, body, axes=None):
    """`body(distribution module)` with layouts, by default the published ones, on a mesh."""
    from sok_like import distribution as dist

    mesh, layout_map = layouts(dist, shape, axes)
    parallel = dist.ModelParallel(
        device_mesh=mesh, layout_map=layout_map, batch_dim_name=mesh.axis_names[0]
    )
    dist.set_distribution(parallel)
    try:
        return body(dist)
    finally:
        dist.set_distribution(None)


def local_shapes(model):
    return {path_of(v): tuple(v.local.shape) for v in model.variables if shard_of(v)}


def published():
    """The published example. `dataset` and `own_loop` train on the other shape of the mesh."""

    def body(dist):
        model = make_model()
        return {**train(model), "local": local_shapes(model)}

    other = under((2, 1), lambda dist: local_shapes(compiled(make_model())))
    return {"oracle": Alone(alone), (1, 2): under((1, 2), body), "local on (2, 1)": other}


def deferred():
    """A Sequential without an Input is built while its first step is traced."""

    def body(dist):
        model = make_model(deferred=True)
        sharded = train(model)
        return {"oracle": Alone(alone, (True,)), "sharded": sharded, "local": local_shapes(model)}

    return under((1, 2), body)


def eager():
    """Steps that are not traced."""
    steps = lambda dist: train(make_model(), run_eagerly=True)  # noqa: E731
    return {"oracle": Alone(eager_alone), **{s: under(s, steps) for s in ((1, 2), (2, 1))}}


def _on_batches(dist=None):
    model, batches = make_model(), tf.data.Dataset.from_tensor_slices(samples()).batch(10)
    # XLA compiles no sharded model, and takes longer than the steps of one that is not.
    options = {} if dist else {"jit_compile": False}
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    history = model.fit(batches, epochs=2, verbose=0).history
    return {
        "history": {k: np.array(v) for k, v in history.items()},
        "weights": [v.numpy() for v in model.weights],
        "evaluated": np.array(model.evaluate(batches, verbose=0)),
    }


def dataset():
    """A tf.data.Dataset of whole batches on every rank, the last one smaller; two distributions."""
    from sok_like import distribution as dist

    found = {"oracle": Alone(_on_batches), (2, 1): under((2, 1), _on_batches)}
    with dist.DataParallel().scope():
        return {**found, "data parallel": _on_batches(dist)}


def _loop(dist=None):
    model, optimizer = make_model(), tf.keras.optimizers.Adam(0.01)
    if dist is not None:
        optimizer = dist.distribution().optimizer(optimizer)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(y, model(x))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = [float(step(*samples())) for _ in range(4)]
    return {"losses": np.array(losses), "weights": [v.numpy() for v in model.weights]}


def own_loop():
    """A loop with a tape."""
    return {"oracle": Alone(_loop), (2, 1): under((2, 1), _loop), (1, 2): under((1, 2), _loop)}


def _names():
    return ["w.weights.h5", "m.keras"] if is_keras_3() else ["w.weights.h5", "w.h5"]


def _shared_folder():
    """A folder that rank 0 makes for all."""
    from sok_like.runtime.ranks import comm

    name = tempfile.mkdtemp() if comm.current().rank == 0 else ""
    sent = comm.current().all_gather(tf.constant(np.frombuffer(name.encode(), np.uint8)), "folder")
    return pathlib.Path(sent.numpy().tobytes().decode())


def files():
    """Written under a mesh, read by an unsharded model."""
    folder = _shared_folder()

    def body(dist):
        model = make_model()
        trained = train(model, run_eagerly=True)
        for name in _names():
            (model.save if name.endswith(".keras") else model.save_weights)(folder / name)
        return trained["weights"]

    written, read = under((1, 2), body), {}
    for name in _names():
        if name.endswith(".keras"):
            model = tf.keras.models.load_model(folder / name)
        else:
            model = make_model()
            model.load_weights(folder / name)
        read[name] = [v.numpy() for v in model.weights]
    return {"written": written, "read": read}


def from_files():
    """Written by an unsharded model, read under a mesh; and whole weights set."""
    folder = pathlib.Path(tempfile.mkdtemp())
    source = make_model()
    train(source, run_eagerly=True)
    names = [name for name in _names() if not name.endswith(".keras")]
    for name in names:
        source.save_weights(folder / name)

    def body(dist):
        read = {}
        for name in names:
            model = make_model()
            model.load_weights(folder / name)
            read[name] = [v.numpy() for v in model.weights]
        model = make_model()
        model.set_weights(source.get_weights())
        read["set_weights"] = [v.numpy() for v in model.weights]
        return {"read": read, "local": local_shapes(model)}

    return {"written": [v.numpy() for v in source.weights], **under((1, 2), body)}


def not_loaded():
    """The last layer of rank 1 cannot be read: the shards that ranks have read are put back."""
    from sok_like.runtime.ranks import comm

    folder, cls = _shared_folder(), tf.keras.layers.Dense
    own = cls.load_own_variables

    def fail(self, store):
        own(self, store)
        if comm.current().rank == 1 and self.name == "dense_1":
            raise OSError(5, "the disk is ill")

    def body(dist):
        model = make_model()
        name = next(name for name in _names() if not name.endswith(".keras"))
        model.save_weights(folder / name)
        for variable in model.weights:
            variable.assign(np.asarray(variable) + 1)
        before = [v.numpy() for v in model.weights]
        cls.load_own_variables = fail
        try:
            model.load_weights(folder / name)
        except RuntimeError as error:
            message = str(error)
        finally:
            cls.load_own_variables = own
        same = all(map(np.array_equal, before, [v.numpy() for v in model.weights]))
        return {"message": message, "same": same, "local": local_shapes(model)}

    return under((1, 2), body)


def errors():
    """The text of each error, and of the warning."""
    from sok_like import distribution as dist

    def said(body):
        try:
            body()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    mesh = dist.DeviceMesh((1, 2), ("batch", "model"))

    def built(axes, *patterns):
        layout_map = dist.LayoutMap(mesh)
        for pattern in patterns or (".*dense/kernel",):
            layout_map[pattern] = axes
        with dist.ModelParallel(mesh, layout_map).scope():
            model = make_model()
            model.compile("sgd", "mse")
            return model

    def unmatched():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            built((None, "model"), "no_such.*kernel")(samples()[0])
        return [str(w.message) for w in caught if "LayoutMap" in str(w.message)]

    def constrained():
        layout_map = dist.LayoutMap(mesh)
        layout_map["dense/kernel"] = (None, "model")
        layers = tf.keras.layers
        with dist.ModelParallel(mesh, layout_map).scope():
            inputs = layers.Input([6])
            dense = layers.Dense(4, kernel_constraint="max_norm", name="dense")
            model = tf.keras.Model(inputs, dense(inputs))
            model.compile("sgd", "mse")
            model.train_on_batch(np.zeros((2, 6), "f"), np.zeros((2, 4), "f"))

    wide = dist.DeviceMesh((2, 4), ("batch", "model"), list(range(8)))
    return {
        "rank": said(lambda: built(("model",))),
        "twice": said(lambda: built(("model", "model"))),
        "axis": said(lambda: built((None, "modle"))),
        "two patterns": said(lambda: built((None, "model"), ".*dense/k.*", ".*se/kernel")),
        "constraint": said(constrained),
        "mesh": said(lambda: dist.ModelParallel(wide, dist.LayoutMap(wide))),
        "order": said(lambda: dist.DataParallel(dist.DeviceMesh((2,), ("batch",), [1, 0]))),
        "process": said(lambda: dist.initialize(num_processes=3)),
        "unmatched": unmatched(),
    }


def keras_classes():
    """Keras' own mesh, map (with its `fullmatch`) and distribution."""
    import keras

    from sok_like import distribution as dist

    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), dist.list_devices())
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*dense.*kernel"] = (None, "model")
    layout_map["dense"] = (None,)  # matches nothing as a whole
    parallel = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    dist.set_distribution(parallel)
    try:
        model = make_model()
        sharded = train(model, run_eagerly=True)
        return {"oracle": Alone(alone), "sharded": sharded, "local": local_shapes(model)}
    finally:
        dist.set_distribution(None)


def made_before():
    """A model that was made before the distribution is sharded when it is compiled or called."""
    model, ready = make_model(), compiled(make_model())

    def body(dist):
        return {
            "oracle": Alone(alone),
            "sharded": train(model, run_eagerly=True),
            "compiled before": trained(ready),
            "local": local_shapes(model),
            "local of compiled": local_shapes(ready),
        }

    return under((1, 2), body)


def _trained_further(folder, **options):
    name, (x, y) = pathlib.Path(folder) / "m.keras", samples()
    model = make_model()
    train(model, **options)
    model.save(name)
    model = tf.keras.models.load_model(name)
    steps = int(model.optimizer.iterations.numpy())
    history = model.fit(x, y, batch_size=10, epochs=2, verbose=0, shuffle=False).history
    weights = [v.numpy() for v in model.weights]
    found = {"steps": np.array(steps), "loss": np.array(history["loss"]), "weights": weights}
    return found, model


def loaded_alone():
    with tempfile.TemporaryDirectory() as folder:
        return _trained_further(folder, jit_compile=False)[0]


def loaded():
    """A model with its optimizer's state, loaded from a file and trained further."""
    folder = _shared_folder()

    def body(dist):
        sharded, model = _trained_further(folder, run_eagerly=True)
        return {"oracle": Alone(loaded_alone), "sharded": sharded, "local": local_shapes(model)}

    return under((1, 2), body)


class Interrupted(Exception):
    """What ends a training in its second epoch."""


def _interrupt(epoch, logs=None):
    if epoch == 1:
        raise Interrupted


def _epochs(folder, *callbacks, **options):
    (x, y), callbacks = samples(), list(callbacks)
    if folder is not None:
        callbacks.append(tf.keras.callbacks.BackupAndRestore(str(folder)))
    model = compiled(make_model(), **options)
    fitting = {"batch_size": 11, "epochs": 3, "shuffle": False, "verbose": 0}
    try:
        history = model.fit(x, y, callbacks=callbacks, **fitting)
    except Interrupted:
        return None
    return len(history.epoch), {"weights": [v.numpy() for v in model.weights]}


def _not_interrupted():
    return _epochs(None, jit_compile=False)[1]


def backed_up():
    """A training that goes on from the backup of the one before; and a folder for each rank."""
    from sok_like.runtime.ranks import comm

    folder = _shared_folder()

    def body(dist):
        stop, eager = tf.keras.callbacks.LambdaCallback(_interrupt), {"run_eagerly": True}
        assert _epochs(folder / "b", stop, **eager) is None
        epochs, sharded = _epochs(folder / "b", **eager)
        assert epochs == 2, epochs  # the first one is not done again
        try:
            _epochs(folder / str(comm.current().rank), **eager)
            own = None
        except Exception as error:
            own = f"{type(error).__name__}: {error}"
        return {"oracle": Alone(_not_interrupted), "sharded": sharded, "local folders": own}

    return under((1, 2), body)


def exported():
    """What is said where a SavedModel would hold one rank's shards."""
    folder = tempfile.mkdtemp()

    def said(write, name):
        try:
            write(os.path.join(folder, name))
        except ValueError as error:
            return str(error)
        return "nothing"

    def body(dist):
        model = make_model()
        train(model, run_eagerly=True)
        module = tf.Module()
        module.kernel = model.get_layer("dense").kernel
        return {
            "export": said(model.export, "export"),
            "saved_model": said(lambda path: tf.saved_model.save(model, path), "saved"),
            "module": said(lambda path: tf.saved_model.save(module, path), "module"),
        }

    return under((1, 2), body)


def explicit():
    """Layouts of a variable's own, and of an output."""
    import keras

    def body(dist):
        mesh = dist.distribution().device_mesh
        own = keras.Variable(
            lambda shape, dtype: tf.reshape(tf.range(10.0), shape),
            shape=(5, 2),
            dtype="float32",
            layout=dist.TensorLayout(("model", None), mesh),
        )
        layout = dist.distribution().get_tensor_layout("dense/output")
        x, _ = samples()
        return {
            "local": own.local.numpy(),
            "whole": own.numpy(),
            "layout": layout.axes,
            "outputs": make_model().predict(x, verbose=0).shape,
        }

    return under((1, 2), body, {**PUBLISHED, ".*dense/output": ("batch", "model")})
