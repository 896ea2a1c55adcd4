"""Optimizers on sharded variables, against the same optimizers of Keras alone in one process."""

import os

import tensorflow as tf

from sok_like.distribution.sharded_variable import path_of
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks import Alone
from tests.checks.distribution_steps import data
from tests.checks.distribution_use import under

LAYOUTS = {
    "wide/kernel": (None, "model"),
    "wide/bias": ("model",),
    "rows/embeddings": ("model", None),
    "columns/embeddings": (None, "model"),
}
SHAPES = {1: (1, 1), 2: (1, 2), 4: (2, 2)}
STEPS = 4
# On one rank nothing is sharded; on four, norms add up over one axis of two. On two, those that
# differ by more than the formula of an element.
FEW = {
    1: ("adam", "global_clipnorm", "use_ema", "accumulated, clipped"),
    2: (
        *("adam", "adamw", "ftrl", "clipnorm", "use_ema", "accumulated, clipped"),
        "ema overwrites",
    ),
    4: ("global_clipnorm", "accumulated, clipped"),
}
SHORT = ("sgd", "adam", "ftrl", "clipnorm", "accumulated, clipped", "accumulated")
_SMALL = {"epsilon": 1e-3}  # a smaller one makes steps of rounding


def optimizers():
    """Name: (class name, arguments)."""
    found = {
        "sgd": ("SGD", {"learning_rate": 0.1}),
        "sgd nesterov": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
        # Not centered: with repeated ids Keras' own variance of a gradient becomes negative.
        "rmsprop": ("RMSprop", {"momentum": 0.5, **_SMALL}),
        "adam": ("Adam", {"learning_rate": 0.01, "amsgrad": True, **_SMALL}),
        "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1, **_SMALL}),
        "adadelta": ("Adadelta", {"learning_rate": 1.0, **_SMALL}),
        "adagrad": ("Adagrad", {"learning_rate": 0.1}),
        "adamax": ("Adamax", {"learning_rate": 0.01, **_SMALL}),
        "nadam": ("Nadam", {"learning_rate": 0.01, **_SMALL}),
        "ftrl": ("Ftrl", {"learning_rate": 0.1}),
        "lion": ("Lion", {"learning_rate": 0.01}),
        "clipnorm": ("SGD", {"learning_rate": 0.1, "clipnorm": 0.05}),
        "global_clipnorm": ("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.05}),
        "clipvalue": ("SGD", {"learning_rate": 0.1, "clipvalue": 0.01}),
        "use_ema": ("SGD", {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.5}),
    }
    if is_keras_3():
        steps = {"learning_rate": 0.1, "gradient_accumulation_steps": 2}
        overwrite = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        found["accumulated"] = ("SGD", steps)
        found["accumulated, clipped"] = ("SGD", {**steps, "global_clipnorm": 0.05})
        found["ema overwrites"] = ("Adam", {**found["adam"][1], **overwrite})
    return found


def names(world_size):
    """Those that are checked on so many ranks. SLOW=1 checks each on all."""
    few = FEW.get(world_size)
    return [n for n in optimizers() if few is None or os.environ.get("SLOW") or n in few]


def checks(world_size):
    found = {}
    if world_size in SHAPES:
        found["each"] = lambda: each(world_size)
    if world_size == 2:
        found.update({f.__name__: f for f in (compiled, plain, short, mixed, unsharded, refused)})
    return found


def make(kind, options):
    return getattr(tf.keras.optimizers, kind)(**options)


def make_model(dtype=None):
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(3)
    numbers, ids = layers.Input([6]), layers.Input([3], dtype="int64")
    hidden = layers.Dense(5, "tanh", name="wide", dtype=dtype)(numbers)
    rows = layers.Flatten(dtype=dtype)(layers.Embedding(9, 3, name="rows", dtype=dtype)(ids))
    columns = layers.Embedding(9, 3, name="columns", dtype=dtype)(ids)
    hidden = layers.Concatenate(dtype=dtype)([hidden, rows, layers.Flatten(dtype=dtype)(columns)])
    hidden = layers.Dense(4, "tanh", name="narrow", dtype=dtype)(hidden)
    return tf.keras.Model([numbers, ids], layers.Dense(1, name="head", dtype="float32")(hidden))


def weights_of(model):
    return {path_of(v): v.numpy() for v in model.variables}


def steps(optimizer, model, built=False):
    """Eager steps, in which the ids of a batch repeat, and the weights after them."""
    inputs, target = data()
    if built:  # by the program
        optimizer.build(model.trainable_variables)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(list(inputs), training=True) - target) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    optimizer.finalize_variable_values(model.trainable_variables)
    return weights_of(model)


def _each(names, dist=None):
    """The steps of each optimizer from the same weights."""
    given = {**optimizers(), **{name: (name, {"learning_rate": 0.01}) for name in WHOLE}}
    of = dist.distribution().optimizer if dist else lambda optimizer: optimizer
    model, found = make_model(), {}
    start = model.get_weights()
    for name in names:
        model.set_weights(start)
        found[name] = steps(of(make(*given[name])), model)
    return found


def each(world_size):
    of = tuple(names(world_size))
    sharded = under(SHAPES[world_size], lambda dist: _each(of, dist), LAYOUTS)
    return {"expected": Alone(_each, (of,)), "sharded": sharded}


def fitted(optimizer, dtype=None, overflow=False, eager=True):
    """Weights after two epochs; with `overflow` the first batch has no finite gradient."""
    model = make_model(dtype)
    # Eager steps, but of one model: tracing takes most of the time.
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False, run_eagerly=eager)
    inputs, target = data()
    if overflow:
        inputs[0][1, 0] = float("inf")  # in the part of the batch of one rank
    model.fit(list(inputs), target, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return weights_of(model)


def _compiled(dist=None):
    clipped = make("Adam", {"clipnorm": 0.01})
    return {"default": fitted("rmsprop"), "clipped": fitted(clipped, eager=False)}


def compiled():
    """`compile` and `fit` with Keras' default, by name, and with a norm."""
    return {"expected": Alone(_compiled), "sharded": under((1, 2), _compiled, LAYOUTS)}


def _plain(dist=None):
    found = {}
    for name in ("adam", "global_clipnorm", "adamw"):
        optimizer, model = make(*optimizers()[name]), make_model()
        if name == "adamw":
            optimizer.exclude_from_weight_decay(var_list=[model.get_layer("wide").kernel])
        found[name] = steps(optimizer, model, built=name == "adam")
        found[name]["iterations"] = optimizer.iterations.numpy()
    return found


def plain():
    """Optimizers that the program's own loop uses as they are, and the state that they show."""
    sharded = {str(shape): under(shape, _plain, LAYOUTS) for shape in ((1, 2), (2, 1))}
    return {"expected": Alone(_plain), **sharded}


def without_average():
    """Keras 3 itself cannot average empty matrices over steps. SLOW=1 checks every other kind."""
    names = [name for name, (_, given) in optimizers().items() if "use_ema" not in given]
    return [name for name in names if os.environ.get("SLOW") or name in SHORT]


def short():
    """Each optimizer where rank 1 has no element: a row, cut along the axis of two ranks."""
    layouts = {"row/kernel": ("model", None)}
    return {"expected": Alone(_short), "sharded": under((1, 2), _short, layouts)}


def _short(dist=None):
    inputs, target = data()
    found = {}
    for name in without_average():
        tf.keras.utils.set_random_seed(3)
        layers = [tf.keras.layers.Dense(4, name="row"), tf.keras.layers.Dense(1, name="head")]
        # Named: Keras numbers nameless models by what the process made before.
        model = tf.keras.Sequential([tf.keras.layers.Input([1]), *layers], name="short")
        model.compile(make(*optimizers()[name]), "mse", run_eagerly=True)
        model.fit(inputs[0][:, :1], target, batch_size=4, shuffle=False, verbose=0)
        found[name] = weights_of(model)
    return found


def mixed():
    """Mixed precision, with and without a batch that overflows mixed_float16.

    The batch overflows whatever the scale: near a scale's limit one process, which sees the mean
    of a whole batch, and two, which see a mean of one half each, may decide otherwise.
    """

    sharded = {
        str(shape): under(shape, lambda dist, of=overflows: _mixed(of), LAYOUTS)
        for shape, overflows in {(1, 2): (False,), (2, 1): (True,)}.items()
    }
    return {"expected": Alone(_mixed, ((False, True),)), **sharded}


def _mixed(overflows):
    found = {"mixed_bfloat16": fitted(make("SGD", {"learning_rate": 0.1}), "mixed_bfloat16")}
    scaling = tf.keras.optimizers if is_keras_3() else tf.keras.mixed_precision
    for overflow in overflows:
        optimizer = scaling.LossScaleOptimizer(
            make("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.5}), initial_scale=2.0**8
        )
        name = f"mixed_float16, overflow={overflow}"
        found[name] = fitted(optimizer, "mixed_float16", overflow)
    return found


WHOLE = ("Adafactor", "Lamb", "Muon")


def whole_ones():
    return [name for name in WHOLE if hasattr(tf.keras.optimizers, name)]


def unsharded():
    """Optimizers that need whole variables, where all are whole."""

    of = tuple(whole_ones())
    sharded = under((2, 1), lambda dist: _each(of, dist), {"wide/kernel": (None, "model")})
    return {"expected": Alone(_each, (of,)), "sharded": sharded}


def refused():
    """What `compile` says of optimizers that need whole variables."""

    class Own(tf.keras.optimizers.Adam):
        def update_step(self, *args, **kwargs):
            return super().update_step(*args, **kwargs)

    def said(optimizer):
        try:
            make_model().compile(optimizer=optimizer, loss="mse")
        except ValueError as error:
            return str(error)
        return "nothing"

    def body(dist):
        found = {name: said(make(name, {})) for name in whole_ones()}
        return {**found, "Own": said(Own(0.1))}

    return under((1, 2), body, LAYOUTS)
