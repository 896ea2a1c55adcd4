"""Ranks of a distribution that are given other batches than each other, or the same."""

import numpy as np
import tensorflow as tf

from tests.checks.distribution_use import layouts

AXES = {"wide/kernel": (None, "model")}
# Of each: the mesh, what differs over ranks, and how it is used.
CASES = {
    "inputs": ((2, 1), "x", "fit"),
    "inputs_of_shards": ((1, 2), "x", "fit"),
    "labels": ((2, 1), "y", "own_step"),
    "float_labels": ((2, 1), "targets", "eager"),
    "weights": ((1, 2), "weights", "eager"),
    "one_sample": ((1, 2), "one", "eager"),
    "several_steps": ((2, 1), "y", "several"),
    "own_step": ((1, 2), "x", "own_step"),
    "validation": ((2, 1), "y", "evaluate"),
    "prediction": ((2, 1), "x", "predict"),
    "own_loop": ((1, 2), "x", "loop"),
    "ids": ((2, 1), "ids", "loop_of_ids"),
}
SAME = ("several_steps", "own_step", "ids")  # and every other test of a distribution


def checks(world_size):
    if world_size == 4:
        return {"own_2x2": lambda: own_shards((2, 2))}
    if world_size != 2:
        return {}
    found = {name: lambda c=case: differing(*c) for name, case in CASES.items()}
    for name in SAME:
        shape, _, how = CASES[name]
        found[f"same_{name}"] = lambda s=shape, h=how: differing(s, None, h)
    for shape in ((1, 2), (2, 1)):
        found[f"own_{shape[0]}x{shape[1]}"] = lambda s=shape: own_shards(s)
    return {**found, "nearly": nearly}


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

    def call(self, ids):
        return self.rows(tf.strings.to_hash_bucket_fast(ids, 7))


def use(model, how, data, dist):
    optimizer = tf.keras.optimizers.SGD(0.1)
    if how in ("fit", "eager", "several", "own_step", "evaluate"):
        more = {"eager": {"run_eagerly": True}, "several": {"steps_per_execution": 2}}
        model.compile(optimizer, "mse", **more.get(how, {}))
    if how == "evaluate":
        model.evaluate(data["x"], data["y"], batch_size=4, verbose=0)
    elif how == "predict":
        model.predict(data["x"], batch_size=4, verbose=0)
    elif how == "own_step":
        model.fit(data["x"], data["y"], batch_size=4, shuffle=False, verbose=0)
    elif how in ("fit", "eager", "several"):
        weights = data["weights"]
        batches = {"batch_size": 4, "shuffle": False}
        labels = data["y" if how == "several" else "targets"]
        model.fit(data["x"], labels, sample_weight=weights, verbose=0, **batches)
    else:
        optimizer = dist.distribution().optimizer(optimizer)
        keys = data["ids" if how == "loop_of_ids" else "x"]

        @tf.function
        def step(inputs):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(inputs) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step(tf.constant(keys))


def differing(shape, what, how):
    """What the user is told; the change of the largest weight, as this rank has it."""
    from sok_like import distribution as dist
    from sok_like.runtime.ranks import comm

    mesh, layout_map = layouts(dist, shape, {} if how == "loop_of_ids" else AXES)
    with dist.ModelParallel(mesh, layout_map, "batch").scope():
        model = OfTexts() if how == "loop_of_ids" else make_model()
        if how == "own_step":
            model = make_model(OwnStep)
        if how == "loop_of_ids":
            model(tf.constant(["a"] * 8))
        before = [v.numpy() for v in model.weights]
        try:
            use(model, how, samples_of(what, comm.current().rank), dist)
        except tf.errors.InvalidArgumentError as error:
            return error.message, _change(before, model)
        return None, _change(before, model)


def _change(before, model):
    after = [v.numpy() for v in model.weights]
    return max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True))


def own_shards(shape):
    """Ranks that read their own samples: only those of one index along the batch axis agree."""
    from sok_like import distribution as dist
    from sok_like.runtime.ranks import comm

    rank, found = comm.current().rank, {}
    mesh, layout_map = layouts(dist, shape, AXES)
    parallel = dist.ModelParallel(mesh, layout_map, "batch", auto_shard_dataset=False)
    with parallel.scope():
        for name, seed in (("of_shard", parallel.data_shard_id), ("of_rank", rank)):
            model = make_model()
            model.compile("sgd", "mse", run_eagerly=True)
            data = samples(seed)
            try:
                model.fit(data["x"], data["y"], batch_size=4, shuffle=False, verbose=0)
                found[name] = None
            except tf.errors.InvalidArgumentError as error:
                found[name] = error.message
    return found


def nearly():
    """Floats that another processor has rounded differently, and values that are no numbers."""
    from sok_like import distribution as dist
    from sok_like.runtime.ranks import comm

    mesh, layout_map = layouts(dist, (1, 2), AXES)
    x = samples()["x"] * (1 + 1e-6 * comm.current().rank)
    with dist.ModelParallel(mesh, layout_map, "batch").scope():
        model = make_model()
        outputs = [model(tf.constant(x)).numpy()]
        x[0, 0] = np.nan
        return [*outputs, model(tf.constant(x)).numpy()]
