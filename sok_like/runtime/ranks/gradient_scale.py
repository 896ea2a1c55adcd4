"""The factor by which the gradient of a row, summed over ranks, is multiplied.

A program's loss is either a mean over the rank's own batch ("mean": divide by the number of ranks),
or it was divided by the batch of all ranks ("sum": leave it). Keras' `fit` does the former; a loop
of the program's own may do either. "auto" decides when a gradient is taken: hooks in Keras tell
whether `fit` takes it.
"""

from __future__ import annotations

import warnings

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.framework import hooks, trainer_phase

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


@hooks.behind(hooks.MODELS)
def _install():
    why = "a step of fit has a mean over the rank's own batch as its loss"
    trainer_phase.note("train", losses_are_means, why)
