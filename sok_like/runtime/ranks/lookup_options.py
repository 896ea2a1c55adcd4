"""Options that all doors to lookups share: `gradient_scale`, and the dtypes of rows.

`gradient_scale` is the factor by which the gradient of a row, summed over ranks, is multiplied. A
program's loss is either a mean over the rank's own batch ("mean": divide by the number of ranks),
or it was divided by the batch of all ranks ("sum": leave it). Keras' `fit` does the former; a loop
of the program's own may do either. "auto" decides when a gradient is taken: hooks in Keras tell
whether `fit` takes it.

Rows have a dtype in a table, and another one between ranks, with their gradients (`wire_dtype`).
"""

import contextlib
import warnings
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.framework import hooks, running_keras

GRADIENT_SCALES = ("auto", "sum", "mean")
ROW_DTYPES = ("float32", "bfloat16", "float16")

# "auto" in the attribute `gradient_scale` of an op. No factor is 0.
_AUTO = 0.0
_warned = False
# Where it is entered, "auto" takes losses for means over the rank's own batch.
losses_are_means = hooks.Within()


def check_gradient_scale(gradient_scale: str) -> str:
    """`gradient_scale` itself; ValueError unless it is "auto", "sum" or "mean"."""
    if isinstance(gradient_scale, str) and gradient_scale in GRADIENT_SCALES:
        return gradient_scale
    raise wrong_argument("gradient_scale", f"one of {GRADIENT_SCALES}", gradient_scale)


def scale_attribute(gradient_scale: str, world_size: int) -> float:
    """`gradient_scale` encoded as an op's attribute."""
    return {"auto": _AUTO, "sum": 1.0, "mean": 1.0 / world_size}[gradient_scale]


def scale_factor(attribute: float, world_size: int) -> float:
    """The factor. Call it where the gradient is taken: "auto" depends on who takes it."""
    if attribute != _AUTO:
        return attribute
    if losses_are_means:
        return 1.0 / world_size
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"`gradient_scale` should be given on {world_size} ranks outside Keras' `fit`: 'mean' "
            "where the loss is a mean over the rank's own batch, 'sum' where it was divided by the "
            "batch of all ranks. Received: gradient_scale='auto', taken as 'sum'.",
            stacklevel=2,
        )
    return 1.0


def check_row_dtype(dtype: Any, where: str = "", argument: str = "wire_dtype") -> str | None:
    """The name of a dtype; None for None and float32. ValueError unless it is in `ROW_DTYPES`."""
    if dtype is None:
        return None
    name = None
    if not isinstance(dtype, int):  # TensorFlow would take it for the number of a dtype
        with contextlib.suppress(TypeError, ValueError):
            name = tf.as_dtype(dtype).name
    if name not in ROW_DTYPES:
        raise wrong_argument(argument, f"None or one of {ROW_DTYPES}", dtype, where)
    return None if name == "float32" else name


@hooks.behind(hooks.MODELS)
def _install():
    why = "a step of fit has a mean over the rank's own batch as its loss"
    running_keras.note_steps("train", losses_are_means, why)
