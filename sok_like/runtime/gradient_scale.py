"""The factor by which the gradient of a row, summed over ranks, is multiplied.

A program's loss is either a mean over the rank's own batch ("mean": divide by the number of ranks),
or it was divided by the batch of all ranks ("sum": leave it). Keras' `fit` does the former; a loop
of the program's own may do either. "auto" decides when a gradient is taken: hooks in Keras tell
whether `fit` takes it.
"""

from __future__ import annotations

import warnings

import tensorflow as tf

from sok_like.runtime import hooks
from sok_like.runtime.checks import wrong_argument

GRADIENT_SCALES = ("auto", "sum", "mean")

# "auto" in the attribute `gradient_scale` of an op. No factor is 0.
_AUTO = 0.0
_warned = False
# Where it is entered, "auto" takes losses for means over the rank's own batch.
losses_are_means = hooks.Within()


def check(gradient_scale: str) -> str:
    """`gradient_scale` itself; ValueError unless it is "auto", "sum" or "mean"."""
    if isinstance(gradient_scale, str) and gradient_scale in GRADIENT_SCALES:
        return gradient_scale
    raise wrong_argument("gradient_scale", f"one of {GRADIENT_SCALES}", gradient_scale)


def attribute(gradient_scale: str, world_size: int) -> float:
    """`gradient_scale` encoded as an op's attribute."""
    return {"auto": _AUTO, "sum": 1.0, "mean": 1.0 / world_size}[gradient_scale]


def factor(attribute: float, world_size: int) -> float:
    """The factor. Call it where the gradient is taken: "auto" depends on who takes it."""
    if attribute != _AUTO:
        return attribute
    if losses_are_means:
        return 1.0 / world_size
    _warn_once(world_size)
    return 1.0


def _making_steps(own, self, force=False):
    # Keras traces and runs training steps, also those of an overridden `train_step`, within calls
    # of `self.train_function`. One of the two Kerases returns it.
    returned = own(self, force)
    if not isinstance(self.train_function, _StepsOfFit):
        self.train_function = _StepsOfFit(self.train_function)
    return None if returned is None else self.train_function


class _StepsOfFit:
    """A `train_function` of Keras that notes when it is running."""

    def __init__(self, own):
        self._own = own

    def __call__(self, *args, **kwargs):
        with losses_are_means:
            return self._own(*args, **kwargs)

    def __getattr__(self, name):  # of a `tf.function`
        if name == "_own":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._own, name)


def _warn_once(world_size):
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"`gradient_scale` should be given on {world_size} ranks outside Keras' `fit`: 'mean' "
            "where the loss is a mean over the rank's own batch, 'sum' where it was divided by the "
            "batch of all ranks. Received: gradient_scale='auto', taken as 'sum'.",
            stacklevel=2,
        )


@hooks.at_init
def _install():
    why = "a step of fit has a mean over the rank's own batch as its loss"
    hooks.wrap(tf.keras.Model, "make_train_function", _making_steps, why)
    hooks.wrap(tf.keras.Model, "train_step", losses_are_means, why)
