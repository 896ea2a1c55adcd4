"""`gradient_scale="auto"`: "mean" in each training step of Keras, "sum" and a warning elsewhere."""

import copy
import inspect
import sys
import types
import warnings

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import lookup_options
from tests import forks

pytestmark = pytest.mark.keras

KERAS_3 = not hasattr(tf.keras, "__internal__")
RANKS = 2
AUTO = lookup_options.scale_attribute("auto", RANKS)
DATA = np.ones([4, 1], np.float32), np.zeros([4], np.float32)


@pytest.fixture(autouse=True)
def quiet(sok):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@tf.custom_gradient
def asks(value):
    """Its input. Where its gradient is taken, it asks for the scale, as a lookup does."""
    return tf.identity(value), lambda gradient: gradient * lookup_options.scale_factor(AUTO, RANKS)


class Model(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def call(self, inputs):
        return asks(self.dense(inputs))


def one_step(model, data):
    inputs, targets = data[:2]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(inputs, training=True)[:, 0] - targets) ** 2)
    variables = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return {"loss": loss}


class CallsSuper(Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnStep(Model):
    def train_step(self, data):
        return one_step(self, data)


class OwnFunction(Model):
    """Keras allows both to be overridden."""

    def train_step(self, data):
        return super().train_step(data)

    def make_train_function(self, force=False):
        step = tf.function(lambda iterator: self.train_step(next(iterator)))
        self.train_function = step
        return step


def fit(model):
    model.fit(*DATA, batch_size=4, verbose=0)


def train_on_batch(model):
    model.train_on_batch(*DATA)


def keras_step(model):
    """Keras' step, called as in a loop."""
    model.build([None, 1])
    model.train_step(tuple(map(tf.constant, DATA)))


def scale_of(model):
    """The factor of the first step: the weight is 1, and its gradient is 2 in one process."""
    return (1.0 - float(model.trainable_variables[0].numpy()[0, 0])) / 2.0


@pytest.mark.parametrize(
    "cls, options, train",
    [
        (Model, {}, fit),
        (Model, {"jit_compile": True}, fit),
        (Model, {"run_eagerly": True}, keras_step),
        (CallsSuper, {}, fit),
        (OwnStep, {}, fit),
        (OwnStep, {"steps_per_execution": 2}, fit),
        (OwnFunction, {}, fit),
        (OwnStep, {"jit_compile": True}, fit),
        (OwnStep, {"run_eagerly": True}, fit),
        (OwnStep, {}, train_on_batch),
        (OwnStep, {"run_eagerly": True}, train_on_batch),
    ],
)
def test_a_step_of_keras_is_mean(cls, options, train):
    model = cls()
    model.compile(tf.keras.optimizers.SGD(1.0), "mse", **options)
    train(model)
    assert scale_of(model) == 1 / RANKS


class Loops(tf.keras.callbacks.Callback):
    """Trains another model by a loop of its own, during `fit`."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def on_train_batch_end(self, batch, logs=None):
        one_step(self.other, tuple(map(tf.constant, DATA)))


@pytest.mark.parametrize("within_fit", [False, True])
def test_a_loop_of_ones_own_is_sum_and_warns_once(monkeypatch, within_fit):
    monkeypatch.setattr(lookup_options, "_warned", False)
    model = Model()
    model.compile(tf.keras.optimizers.SGD(1.0), "mse")
    fitted = Model()
    fitted.compile(tf.keras.optimizers.SGD(1.0), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if within_fit:
            fitted.fit(*DATA, batch_size=4, verbose=0, callbacks=[Loops(model)])
        else:
            one_step(model, tuple(map(tf.constant, DATA)))
    assert scale_of(model) == 1.0
    told = [w for w in caught if "`gradient_scale` should be given" in str(w.message)]
    assert len(told) == 1
    one_step(model, tuple(map(tf.constant, DATA)))


def test_the_train_function_is_still_keras_own():
    model = Model()
    model.compile(tf.keras.optimizers.SGD(1.0), "mse")
    fit(model)
    function = model.train_function
    assert callable(function)
    if not KERAS_3:
        assert function.experimental_get_tracing_count() > 0
    assert copy.copy(function)._own is function._own
    assert model.make_train_function() in (None, function) and model.train_function is function
    model.make_train_function(force=True)
    assert model.train_function is not function
    with pytest.raises(AttributeError):
        _ = function.absent


def move_trainer():
    """Puts Keras' trainer where a release might, into another module; the class that has it."""
    trainer = inspect.getmodule(tf.keras.Model.train_step)
    cls = next(base for base in tf.keras.Model.__mro__ if "train_step" in vars(base))
    module = types.ModuleType(trainer.__name__ + "_of_another_release")
    module.__package__ = trainer.__package__
    sys.modules[module.__name__] = module
    exec(compile(inspect.getsource(trainer), trainer.__file__, "exec"), module.__dict__)
    for name in ("train_step", "make_train_function", *(["_make_function"] if KERAS_3 else [])):
        # Their cells for `super()` belong to the copied class; these functions use none.
        setattr(cls, name, vars(getattr(module, cls.__name__))[name])
    return cls


DEMONSTRATION = """
import tensorflow as tf
import sok_like as sok
from tests.runtime.ranks import test_gradient_scale as test
test.move_trainer()
sok.Init(global_batch_size=2)
for own in (test.Model, test.OwnStep):
    model = own()
    model.compile(tf.keras.optimizers.SGD(1.0), "mse")
    test.fit(model)
    print(test.scale_of(model))
"""


def test_a_trainer_in_another_module_is_right():
    done = forks.run("-c", DEMONSTRATION)
    assert done.stdout.split() == ["0.5", "0.5"], done.stderr


RENAMED = """
import tensorflow as tf
import sok_like as sok
from tests.runtime.ranks import test_gradient_scale as test
cls = test.move_trainer()
cls.make_training_function = cls.make_train_function
del cls.make_train_function
try:
    sok.Init(global_batch_size=2)
    tf.keras.Sequential()
except ImportError as error:
    print(error)
"""


def test_a_trainer_under_another_name_raises_when_a_model_is_made():
    done = forks.run("-c", RENAMED)
    assert "make_train_function" in done.stdout and hooks.KNOWN in done.stdout, done.stderr
