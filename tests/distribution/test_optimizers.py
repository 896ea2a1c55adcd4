"""Optimizers and mixed precision on sharded variables are those of Keras alone in one process."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3
from tests.distribution.meshes import (
    LAYOUTS,
    check_as_alone,
    data,
    make_model,
    of_loop,
    under,
    weights_of,
)
from tests.training import train_step

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
for_keras_3 = pytest.mark.keras(slow=True)
STEPS = 2  # after which sums of two steps are applied
SMALL = {"epsilon": 1e-3}  # a smaller one makes steps of rounding
ADAM = {"learning_rate": 0.01, "amsgrad": True, **SMALL}
# Those of Keras that differ by more than the formula of an element.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "adam": ("Adam", ADAM),
    "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1, **SMALL}),
    "ftrl": ("Ftrl", {"learning_rate": 0.1}),
    "clipnorm": ("SGD", {"learning_rate": 0.1, "clipnorm": 0.05}),
    "clipvalue": ("SGD", {"learning_rate": 0.1, "clipvalue": 0.01}),
    "global_clipnorm": ("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.05}),
    "use_ema": ("SGD", {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.5}),
}
FEW = ["adam", "adamw", "ftrl", "clipnorm", "clipvalue", "use_ema"]
SHORT = ["sgd", "adam", "ftrl", "clipnorm"]
# On four ranks norms add up over one axis of two.
CLIPPED = ["global_clipnorm"]
if is_keras_3():
    ACCUMULATED = {"learning_rate": 0.1, "gradient_accumulation_steps": 2}
    EMA = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    OPTIMIZERS["accumulated"] = ("SGD", ACCUMULATED)
    OPTIMIZERS["accumulated, clipped"] = ("SGD", {**ACCUMULATED, "global_clipnorm": 0.05})
    OPTIMIZERS["ema overwrites"] = ("Adam", {**ADAM, **EMA})
    FEW += ["accumulated, clipped", "ema overwrites"]
    SHORT += ["accumulated", "accumulated, clipped"]
    CLIPPED += ["accumulated, clipped"]
WHOLE = [n for n in ("Adafactor", "Lamb", "Muon") if hasattr(tf.keras.optimizers, n)]


def make(name):
    kind, options = OPTIMIZERS.get(name, (name, {"learning_rate": 0.01}))
    return getattr(tf.keras.optimizers, kind)(**options)


def steps(optimizer, model, built=False):
    """Eager steps, in which the ids of a batch repeat, and the weights after them."""
    inputs, target = data()
    if built:  # by the program
        optimizer.build(model.trainable_variables)
    for _ in range(STEPS):
        train_step(
            optimizer,
            model.trainable_variables,
            lambda: tf.reduce_mean((model(list(inputs), training=True) - target) ** 2),
        )
    optimizer.finalize_variable_values(model.trainable_variables)
    return weights_of(model)


def each(names):
    """The steps of each optimizer from the same weights."""
    model, found = make_model(), {}
    start = model.get_weights()
    for name in names:
        model.set_weights(start)
        found[name] = steps(of_loop(make(name)), model)
    return found


def not_wrapped():
    """Optimizers that the program's own loop uses as they are, and the state that they show."""
    found = {}
    for name in ("adam", "global_clipnorm", "adamw"):
        optimizer, model = make(name), make_model()
        if name == "adamw":
            optimizer.exclude_from_weight_decay(var_list=[model.get_layer("wide").kernel])
        found[name] = steps(optimizer, model, built=name == "adam")
        assert optimizer.iterations.numpy() == STEPS
    return found


def fitted(optimizer, dtype=None, overflow=False, eager=True):
    """Weights after three steps; with `overflow` the first batch has no finite gradient."""
    model = make_model(dtype)
    # Mostly eager: tracing takes most of the time.
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False, run_eagerly=eager)
    inputs, target = data()
    if overflow:
        inputs[0][1, 0] = float("inf")  # in the part of the batch of one rank
    model.fit(list(inputs), target, batch_size=4, shuffle=False, verbose=0)
    return weights_of(model)


def compiled():
    """`compile` and `fit` with Keras' default, by name, and with a norm."""
    clipped = tf.keras.optimizers.Adam(clipnorm=0.01)
    return {"default": fitted("rmsprop"), "clipped": fitted(clipped, eager=False)}


def of_a_row(names):
    """Each optimizer where rank 1 has no element: a row, cut along the axis of two ranks."""
    inputs, target = data()
    found = {}
    for name in names:
        tf.keras.utils.set_random_seed(3)
        layers = [tf.keras.layers.Dense(4, name="row"), tf.keras.layers.Dense(1, name="head")]
        # Named: Keras numbers nameless models by what the process made before.
        model = tf.keras.Sequential([tf.keras.layers.Input([1]), *layers], name="short")
        model.compile(make(name), "mse", run_eagerly=True)
        model.fit(inputs[0][:, :1], target, batch_size=4, shuffle=False, verbose=0)
        found[name] = weights_of(model)
    return found


@pytest.mark.parametrize(
    "shape, layouts, body, arguments",
    [
        ((1, 1), LAYOUTS, each, [[*CLIPPED, "adam", "use_ema"]]),
        ((1, 2), LAYOUTS, each, [FEW]),
        ((2, 2), LAYOUTS, each, [CLIPPED]),
        ((2, 1), {"wide/kernel": (None, "model")}, each, [WHOLE]),  # nothing is sharded
        ((1, 2), LAYOUTS, not_wrapped, []),
        pytest.param((2, 1), LAYOUTS, not_wrapped, [], marks=for_keras_3),
        pytest.param((1, 2), LAYOUTS, compiled, [], marks=for_keras_3),
        pytest.param((1, 2), {"row/kernel": ("model", None)}, of_a_row, [SHORT], marks=for_keras_3),
    ],
)
def test_optimizers_are_those_of_one_process(on_processes, shape, layouts, body, arguments):
    check_as_alone(on_processes, shape, layouts, body, *arguments)


def mixed(overflow):
    """Mixed precision, with and without a batch that overflows mixed_float16.

    The batch overflows whatever the scale: near a scale's limit one process, which sees the mean
    of a whole batch, and two, which see a mean of one half each, may decide otherwise.
    """
    found = {"mixed_bfloat16": fitted(tf.keras.optimizers.SGD(0.1), "mixed_bfloat16")}
    scaling = tf.keras.optimizers if is_keras_3() else tf.keras.mixed_precision
    clipped = tf.keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    optimizer = scaling.LossScaleOptimizer(clipped, initial_scale=2.0**8)
    return {**found, "mixed_float16": fitted(optimizer, "mixed_float16", overflow)}


@pytest.mark.parametrize(
    "shape, overflow", [pytest.param((1, 2), False, marks=for_keras_3), ((2, 1), True)]
)
def test_mixed_precision_is_that_of_one_process(on_processes, shape, overflow):
    expected = mixed(overflow)
    for result in on_processes(2, under, shape, LAYOUTS, mixed, overflow):
        for name, weights in result.items():
            for path, found in weights.items():
                # Terms of 8 (bfloat16) or 11 bits are added in another order.
                right = expected[name][path]
                assert np.isfinite(right).all()
                np.testing.assert_allclose(found, right, atol=1e-2, err_msg=f"{name} {path}")


class OwnUpdate(tf.keras.optimizers.Adam):
    def update_step(self, *args, **kwargs):
        return super().update_step(*args, **kwargs)


def refused():
    """Optimizers that need whole variables, and shards."""
    words = "(?s)must update each element independently.*wide/kernel"
    for name in WHOLE:
        with pytest.raises(ValueError, match=words):
            make_model().compile(optimizer=make(name), loss="mse")
    with pytest.raises(ValueError, match=words) as raised:
        make_model().compile(optimizer=OwnUpdate(0.1), loss="mse")
    assert "OwnUpdate has its own update_step" in str(raised.value)


def test_optimizers_of_whole_variables_refuse_shards(on_processes):
    on_processes(2, under, (1, 2), LAYOUTS, refused)
