"""Batches that differ over ranks raise on all of them, before any weight has changed."""

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
    if how in ("fit", "eager", "several", "own_step", "evaluate"):
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

        step(tf.constant(data["ids" if how == "loop_of_ids" else "x"]))


def differing(shape, what, how):
    """What the user is told; the change of the largest weight, as this rank has it."""
    of_texts = how == "loop_of_ids"
    mesh, layout_map = layouts(shape, {} if of_texts else AXES)
    with dist.ModelParallel(mesh, layout_map, "batch").scope():
        kind = OwnStep if how == "own_step" else tf.keras.Model
        model = OfTexts() if of_texts else make_model(kind)
        before, said = [v.numpy() for v in model.weights], None
        try:
            use(model, how, samples_of(what, comm.current().rank))
        except tf.errors.InvalidArgumentError as error:
            said = error.message
        after = [v.numpy() for v in model.weights]
        pairs = zip(after, before, strict=True)
        return said, max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize(
    "shape, what, how, name",
    [
        pytest.param(*((2, 1), "x", "fit", "inputs"), marks=pytest.mark.keras(slow=True)),
        ((1, 2), "x", "fit", "inputs"),
        pytest.param(*((2, 1), "y", "own_step", "y"), marks=pytest.mark.keras(slow=True)),
        ((2, 1), "targets", "eager", "y"),
        ((1, 2), "weights", "eager", "sample_weight"),
        ((1, 2), "one", "eager", "inputs"),
        pytest.param(*((2, 1), "y", "several", "y"), marks=pytest.mark.keras(slow=True)),
        ((1, 2), "x", "own_step", "inputs"),
        ((2, 1), "y", "evaluate", "y"),
        ((2, 1), "x", "predict", "inputs"),
        ((1, 2), "x", "loop", "inputs"),
        pytest.param(*((2, 1), "ids", "loop_of_ids", "inputs"), marks=pytest.mark.keras(slow=True)),
    ],
)
def test_batches_that_differ_raise(on_processes, shape, what, how, name):
    for said, change in on_processes(2, differing, shape, what, how):
        assert said is not None and "Every rank must get the same batches" in said
        assert f"on rank 1 other values than on rank 0 in {name}." in said
        assert change == 0.0


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("how", ["several", "loop_of_ids"])  # and every other test of a mesh
def test_same_batches_do_not_raise(on_processes, how):
    for said, change in on_processes(2, differing, (2, 1), None, how):
        assert said is None
        assert change > 0


def own_shards(shape):
    """Ranks that read their own samples: only those of one index along the batch axis agree."""
    mesh, layout_map = layouts(shape, AXES)
    parallel = dist.ModelParallel(mesh, layout_map, "batch", auto_shard_dataset=False)
    said = []
    with parallel.scope():
        for seed in (parallel.data_shard_id, comm.current().rank):
            model, data = make_model(), samples(seed)
            model.compile("sgd", "mse", run_eagerly=True)
            try:
                model.fit(data["x"], data["y"], batch_size=4, shuffle=False, verbose=0)
                said.append(None)
            except tf.errors.InvalidArgumentError as error:
                said.append(error.message)
    return said


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_ranks_may_read_their_own_samples(on_processes, shape):
    for of_shard, of_rank in on_processes(shape[0] * shape[1], own_shards, shape):
        assert of_shard is None
        if shape == (2, 1):  # each rank is a shard of its own
            assert of_rank is None
        else:
            assert "on rank 1 other values than on rank 0 in inputs." in of_rank


def nearly():
    """Floats that another processor has rounded differently, and values that are no numbers."""
    mesh, layout_map = layouts((1, 2), AXES)
    x = samples()["x"] * (1 + 1e-6 * comm.current().rank)
    with dist.ModelParallel(mesh, layout_map, "batch").scope():
        model = make_model()
        outputs = [model(tf.constant(x)).numpy()]
        x[0, 0] = np.nan
        return [*outputs, model(tf.constant(x)).numpy()]


def test_rounding_and_missing_values_do_not_raise(on_processes):
    for numbers, missing in on_processes(2, nearly):
        assert np.isfinite(numbers).all()
        assert np.isnan(missing[0]).all() and np.isfinite(missing[1:]).all()
