"""Loss scaling on several ranks: either all of them take a step, or none does.

Keras checks the gradients of its own process only. A rank whose gradients overflow would skip a
step that the others take. Their collectives would wait for it, and the loss scales would differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime.ranks import exchange_order
from sok_like.runtime.ranks.comm import Communicator, summed_values

_DECISION = object()  # stands in the place of a variable


def all_finite(gradients: Iterable[Any], communicator: Communicator) -> tf.Tensor:
    """Whether all gradients of all ranks are finite: bool scalar, the same on every rank."""
    # Parts of several lookups may be finite, and their sum not.
    values = [summed_values(gradient) for gradient in gradients if gradient is not None]
    each = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
    finite = tf.reduce_all(tf.stack(each)) if each else tf.constant(True)
    if communicator.world_size == 1:
        return finite
    mine = [tf.cast(finite, tf.float32)]
    (share,) = exchange_order.collective_in_turn(communicator, "average", mine, "sok_finite")
    return tf.equal(share, 1.0)


def with_decision(pairs: Sequence[tuple], communicator: Communicator) -> list[tuple]:
    """The (gradient, variable) pairs and one more: NaN unless all ranks' gradients are finite.

    For tf_keras, whose loss scaling checks what an optimizer's `aggregate_gradients` returns.
    """
    if communicator.world_size == 1 or len(without_decision(pairs)) < len(pairs):
        return list(pairs)
    finite = all_finite([gradient for gradient, _ in pairs], communicator)
    return [*pairs, (tf.where(finite, 0.0, float("nan")), _DECISION)]


def without_decision(pairs: Iterable[tuple]) -> list[tuple]:
    """The pairs without the one that `with_decision` added."""
    return [(gradient, variable) for gradient, variable in pairs if variable is not _DECISION]
