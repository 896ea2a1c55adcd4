"""The Keras that runs: which one it is, and whether it is in a training, test or predict step."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import threading
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework import hooks

_withins: dict[str, hooks.Within] = {}  # not in `_Steps`, which programs copy
compiled = hooks.Within()  # a step that XLA is to compile is being traced, or is running
_running = threading.local()


def model() -> tf.keras.Model | None:
    """The model of which Keras is tracing or running a step in this thread."""
    return getattr(_running, "model", None)


@functools.cache
def is_keras_3() -> bool:
    """Whether `tf.keras` is Keras 3; False under `TF_USE_LEGACY_KERAS=1`, where it is tf_keras."""
    return not hasattr(tf.keras, "__internal__")


def keras_optimizers() -> Any:
    """The running Keras' module of optimizers; `sok2.init` changes `tf.keras.optimizers`."""
    return importlib.import_module("keras.optimizers" if is_keras_3() else "tf_keras.optimizers")


def optimizer_family(cls: type) -> str | None:
    """ "tf.compat.v1", "keras", "tf_keras", "legacy" (of tf_keras), or None: none of these."""
    if issubclass(cls, tf.compat.v1.train.Optimizer):
        return "tf.compat.v1"
    for base in cls.__mro__:
        if base.__module__.startswith("keras.src.optimizers"):
            return "keras"
        if base.__module__ == "tf_keras.src.optimizers.optimizer":
            return "tf_keras"
        if base.__module__ == "tf_keras.src.optimizers.legacy.optimizer_v2":
            return "legacy"
    return None


def note_steps(kind: str, within: hooks.Within, why: str) -> None:
    """Enters `within` in Keras' steps of a kind: "train", "test" or "predict"."""
    # Keras traces and runs steps, also those of an overridden `train_step`, within calls of
    # `self.train_function`; a program may call `train_step` itself.
    attribute = f"{kind}_function"
    _withins[kind] = within

    def making(own, self, force=False):
        returned = own(self, force)
        if not isinstance(getattr(self, attribute), _Steps):
            by_xla = bool(self.jit_compile and not self.run_eagerly)
            setattr(self, attribute, _Steps(getattr(self, attribute), kind, by_xla, self))
        # One of the two Kerases returns it.
        return None if returned is None else getattr(self, attribute)

    hooks.wrap(tf.keras.Model, f"make_{attribute}", making, why)
    hooks.wrap(tf.keras.Model, f"{kind}_step", within, why)


class _Steps:
    """A function of Keras that makes steps, and notes when it is running."""

    def __init__(self, own, kind, by_xla, model):
        self._own, self._kind, self._by_xla, self._model = own, kind, by_xla, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, _running.model = model(), self._model
        try:
            with _withins[self._kind], compiled if self._by_xla else contextlib.nullcontext():
                return self._own(*args, **kwargs)
        finally:
            _running.model = outer

    def __getattr__(self, name):  # of a `tf.function`
        if name in ("_own", "_kind", "_by_xla", "_model"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self._own, name)


@hooks.at_init
def _install():
    def making(own, cls, *args, **kwargs):
        hooks.open_door(hooks.MODELS)
        return own(cls, *args, **kwargs)

    model = tf.keras.Model
    if is_keras_3():
        hooks.wrap(model, "__new__", making, "the first model puts in what models need")
    # By `type`, because the class that a lazy module shows may load it.
    if not is_keras_3() or any(issubclass(type(o), model) for o in gc.get_objects()):
        hooks.open_door(hooks.MODELS)  # a model is older than `sok.Init`


@hooks.behind(hooks.RANKS)
def _install_on_ranks():
    hooks.open_door(hooks.MODELS)  # a model may be older than `sok.Init`
