"""Notes that Keras is in a training step, a test step or a step of `predict`."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.keras_version import is_keras_3

_withins: dict[str, hooks.Within] = {}  # not in `_Steps`, which programs copy
compiled = hooks.Within()  # a step that XLA is to compile is being traced, or is running


def note(kind: str, within: hooks.Within, why: str) -> None:
    """Enters `within` in Keras' steps of a kind: "train", "test" or "predict".

    Keras traces and runs steps, also those of an overridden `train_step`, within calls of
    `self.train_function`; a program may call `train_step` itself.
    """
    attribute = f"{kind}_function"
    _withins[kind] = within

    def making(own, self, force=False):
        returned = own(self, force)
        if not isinstance(getattr(self, attribute), _Steps):
            by_xla = bool(self.jit_compile and not self.run_eagerly)
            setattr(self, attribute, _Steps(getattr(self, attribute), kind, by_xla))
        # One of the two Kerases returns it.
        return None if returned is None else getattr(self, attribute)

    hooks.wrap(tf.keras.Model, f"make_{attribute}", making, why)
    hooks.wrap(tf.keras.Model, f"{kind}_step", within, why)


class _Steps:
    """A function of Keras that makes steps, and notes when it is running."""

    def __init__(self, own, kind, by_xla):
        self._own, self._kind, self._by_xla = own, kind, by_xla

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _withins[self._kind], compiled if self._by_xla else contextlib.nullcontext():
            return self._own(*args, **kwargs)

    def __getattr__(self, name):  # of a `tf.function`
        if name in ("_own", "_kind", "_by_xla"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self._own, name)


def _making(own, cls, *args, **kwargs):
    hooks.open_door(hooks.MODELS)
    return own(cls, *args, **kwargs)


@hooks.at_init
def _install():
    model = tf.keras.Model
    if is_keras_3():
        hooks.wrap(model, "__new__", _making, "the first model puts in what models need")
    # By `type`, because the class that a lazy module shows may load it.
    if not is_keras_3() or any(issubclass(type(known), model) for known in gc.get_objects()):
        hooks.open_door(hooks.MODELS)  # a model is older than `sok.Init`


@hooks.behind(hooks.RANKS)
def _install_on_ranks():
    hooks.open_door(hooks.MODELS)  # a model may be older than `sok.Init`
