"""The factor by which the gradient of a row, summed over ranks, is multiplied.

A program's loss is either a mean over the rank's own batch ("mean": divide by the number of ranks),
or it was divided by the batch of all ranks ("sum": leave it). Keras' `fit` does the former; a loop
of the program's own may do either. "auto" decides when a gradient is taken.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from sok_like.runtime import callers
from sok_like.runtime.checks import wrong_argument

GRADIENT_SCALES = ("auto", "sum", "mean")

# "auto" in the attribute `gradient_scale` of an op. No factor is 0.
_AUTO = 0.0
# Functions of Keras' trainers that take one training step, also if the user overrides `train_step`.
_TRAINERS = {
    "keras.src.backend.tensorflow.trainer": {"one_step_on_data", "train_step"},
    "tf_keras.src.engine.training": {"run_step", "train_step"},
}
_warned = False
_scopes_of_means = 0


def check(gradient_scale: str) -> str:
    """`gradient_scale` itself; ValueError unless it is "auto", "sum" or "mean"."""
    if isinstance(gradient_scale, str) and gradient_scale in GRADIENT_SCALES:
        return gradient_scale
    raise wrong_argument("gradient_scale", f"one of {GRADIENT_SCALES}", gradient_scale)


def attribute(gradient_scale: str, world_size: int) -> float:
    """`gradient_scale` encoded as an op's attribute."""
    return {"auto": _AUTO, "sum": 1.0, "mean": 1.0 / world_size}[gradient_scale]


def factor(attribute: float, world_size: int) -> float:
    """The factor. Call it where the gradient is taken: "auto" looks at the call stack."""
    if attribute != _AUTO:
        return attribute
    if _scopes_of_means or within_fit():
        return 1.0 / world_size
    _warn_once(world_size)
    return 1.0


@contextlib.contextmanager
def losses_are_means() -> Iterator[None]:
    """A scope in which "auto" takes losses for means over the rank's own batch."""
    global _scopes_of_means
    _scopes_of_means += 1
    try:
        yield
    finally:
        _scopes_of_means -= 1


def within_fit() -> bool:
    """Whether Keras' trainer is taking or tracing a training step further up the stack."""
    return callers.within(_TRAINERS)


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
