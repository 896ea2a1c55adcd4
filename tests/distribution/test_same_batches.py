"""Batches that differ over ranks raise on all of them, before any weight has changed."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from sok_like import distribution as dist
from sok_like.runtime.ranks import comm
from tests.distribution.meshes import layouts, of_loop
from tests.training import train_step

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
AXES = {"wide/kernel": (None, "model")}


def samples(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(8, 3)).astype("f"),
        "y": rng.integers(0, 2, (8, 1)),
        "targets": rng.integers(0, 2, (8, 1)).astype("f"),
        "weights": rng.uniform(0.5, 1.5, 8).astype("f"),
        "ids": np.array([f"id {n}" for n in rng.integers(0, 99, 8)]),
    }


def samples_of(differing, rank):
    found = samples()
    if differing == "one" and rank:
        found["x"][2] *= 1.5
    elif rank and differing:
        found[differing] = samples(seed=rank)[differing]
    return found


class OwnStep(tf.keras.Model):
    """Has a step that computes a loss which Keras does not know."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - tf.cast(y, tf.float32)) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def make_model(cls=tf.keras.Model):
    tf.keras.utils.set_random_seed(2)
    inputs = tf.keras.Input([3])
    hidden = tf.keras.layers.Dense(4, "relu", name="wide")(inputs)
    return cls(inputs, tf.keras.layers.Dense(1, name="head")(hidden))


class OfTexts(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = tf.keras.layers.Embedding(7, 1, name="rows")
        self(tf.constant(["a"] * 8))

    def call(self, ids):
        return self.rows(tf.strings.to_hash_bucket_fast(ids, 7))


def use(model, how, data):
    optimizer = tf.keras.optimizers.SGD(0.1)
    if how not in ("predict", "loop_of_ids"):
        more = {"eager": {"run_eagerly": True}, "several": {"steps_per_execution": 2}}
        model.compile(optimizer, "mse", **more.get(how, {}))
    options = {"batch_size": 4, "verbose": 0}
    if how == "evaluate":
        model.evaluate(data["x"], data["y"], **options)
    elif how == "predict":
        model.predict(data["x"], **options)
    elif how == "own_step":
        model.fit(data["x"], data["y"], shuffle=False, **options)
    elif how in ("fit", "eager", "several"):
        labels = data["y" if how == "several" else "targets"]
        model.fit(data["x"], labels, sample_weight=data["weights"], shuffle=False, **options)
    else:
        optimizer = of_loop(optimizer)

        @tf.function
        def step(inputs):
            train_step(
                optimizer, model.trainable_variables, lambda: tf.reduce_mean(model(inputs) ** 2)
            )

        step(tf.constant(data["ids"]))


def told_of(name):
    rule, which = "Every rank must get the same batches", "on rank 1 other values than on rank 0 in"
    words = rf"(?s)(?=.*{rule}).*{which} {name}\."
    return pytest.raises(tf.errors.InvalidArgumentError, match=words)


def differing(shape, what, how, name):
    """Ranks raise if their batches differ in `what`, and keep their weights."""
    of_texts = how == "loop_of_ids"
    mesh, layout_map = layouts(shape, {} if of_texts else AXES)
    with dist.ModelParallel(mesh, layout_map, "batch").scope():
        kind = OwnStep if how == "own_step" else tf.keras.Model
        model = OfTexts() if of_texts else make_model(kind)
        before = [v.numpy() for v in model.weights]
        with told_of(name) if what else contextlib.nullcontext():
            use(model, how, samples_of(what, comm.current().rank))
        is_same = map(np.array_equal, before, [v.numpy() for v in model.weights])
        assert all(is_same) == (what is not None)


@pytest.mark.parametrize(
    "shape, what, how, name",
    [
        ((1, 2), "x", "fit", "inputs"),
        ((2, 1), "targets", "eager", "y"),
        ((1, 2), "weights", "eager", "sample_weight"),
        ((1, 2), "one", "eager", "inputs"),
        pytest.param(*((2, 1), "y", "several", "y"), marks=pytest.mark.keras(slow=True)),
        ((1, 2), "x", "own_step", "inputs"),
        ((2, 1), "y", "evaluate", "y"),
        ((2, 1), "x", "predict", "inputs"),
        pytest.param(*((2, 1), "ids", "loop_of_ids", "inputs"), marks=pytest.mark.keras(slow=True)),
    ],
)
def test_batches_that_differ_raise(on_processes, shape, what, how, name):
    on_processes(2, differing, shape, what, how, name)


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("how", ["several", "loop_of_ids"])  # and every other test of a mesh
def test_same_batches_do_not_raise(on_processes, how):
    on_processes(2, differing, (2, 1), None, how, None)


def own_shards(shape):
    """Ranks that read their own samples: only those of one index along the batch axis agree."""
    mesh, layout_map = layouts(shape, AXES)
    parallel = dist.ModelParallel(mesh, layout_map, "batch", auto_shard_dataset=False)
    with parallel.scope():
        for of_rank in (False, True):
            seed = comm.current().rank if of_rank else parallel.data_shard_id
            model, data = make_model(), samples(seed)
            model.compile("sgd", "mse", run_eagerly=True)
            raises = of_rank and shape == (1, 2)  # where both ranks are the same shard
            with told_of("inputs") if raises else contextlib.nullcontext():
                model.fit(data["x"], data["y"], batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_ranks_may_read_their_own_samples(on_processes, shape):
    on_processes(2, own_shards, shape)


def nearly():
    """Floats that another processor has rounded differently, and values that are no numbers."""
    mesh, layout_map = layouts((1, 2), AXES)
    x = samples()["x"] * (1 + 1e-6 * comm.current().rank)
    with dist.ModelParallel(mesh, layout_map, "batch").scope():
        model = make_model()
        assert np.isfinite(model(tf.constant(x))).all()
        x[0, 0] = np.nan
        missing = model(tf.constant(x)).numpy()
        assert np.isnan(missing[0]).all() and np.isfinite(missing[1:]).all()


def test_rounding_and_missing_values_do_not_raise(on_processes):
    on_processes(2, nearly)
