"""Dynamic loss scaling (`mixed_float16`) with embedding variables, on several ranks.

Keras checks the gradients of its own process only. A rank whose gradients overflow would skip a
step that the others take. Their collectives would wait for it, and the loss scales would differ. So
either all ranks take a step, or none does. tf_keras' loss scaling checks what an optimizer's
`aggregate_gradients` returns, which carries the decision (`with_decision`).

Keras 3's own `LossScaleOptimizer` cannot handle a gradient whose indices are keys, either. The
mixin `LossScaling` checks the values.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.optimizers.stages import unscaled
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.comm import Communicator, summed_values
from sok_like.table.variable import is_embedding_variable, unwrap

_DECISION = object()  # stands in the place of a variable


def all_finite(gradients: Iterable[Any], communicator: Communicator) -> tf.Tensor:
    """Whether all gradients of all ranks are finite: bool scalar, the same on every rank."""
    # Parts of several lookups may be finite, and their sum not.
    values = [summed_values(gradient) for gradient in gradients if gradient is not None]
    are_finite = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
    finite = tf.reduce_all(tf.stack(are_finite)) if are_finite else tf.constant(True)
    if communicator.world_size == 1:
        return finite
    own = [tf.cast(finite, tf.float32)]
    (share,) = exchange_order.collective_in_turn(communicator, "average", own, "sok_finite")
    return tf.equal(share, 1.0)


def with_decision(pairs: Sequence[tuple], communicator: Communicator) -> list[tuple]:
    """The pairs for tf_keras' loss scaling, and NaN unless all ranks' gradients are finite."""
    if communicator.world_size == 1 or len(without_decision(pairs)) < len(pairs):
        return list(pairs)
    finite = all_finite([gradient for gradient, _ in pairs], communicator)
    return [*pairs, (tf.where(finite, 0.0, float("nan")), _DECISION)]


def without_decision(pairs: Iterable[tuple]) -> list[tuple]:
    """The pairs without the one that `with_decision` added."""
    return [(gradient, variable) for gradient, variable in pairs if variable is not _DECISION]


class LossScaling:
    """Mixin over Keras 3's `LossScaleOptimizer`, whose inner optimizer is embedding-aware."""

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        inner = config.pop("inner_optimizer")
        inner = tf.keras.utils.deserialize_keras_object(inner, custom_objects)
        inner.__dict__["_sok_scaling_allowed"] = True  # only for this class
        scaling = cls(inner, **config)
        inner.__dict__["_sok_scaling_allowed"] = False
        return scaling

    def build(self, var_list):
        with contextlib.ExitStack() as stack:
            for variable in filter(is_embedding_variable, var_list):
                stack.enter_context(unwrap(variable).asked_by_known_optimizer())
            super().build(var_list)

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def check_finite(self, grads: Any) -> tf.Tensor:
        """Whether all gradients of all ranks are finite, bool scalar, the same on every rank."""
        return all_finite(grads, comm.current_or_single())

    def _stateful_handle_finite_grads(self, grads, trainable_variables):
        # Keras divides by the scale, too, but gradients by key would not stay sparse there.
        scale = tf.convert_to_tensor(self.dynamic_scale)
        variables = trainable_variables or self._trainable_variables
        grads = [
            unscaled(g, scale) if is_embedding_variable(v) else g
            for g, v in zip(grads, variables, strict=True)
        ]
        super()._stateful_handle_finite_grads(grads, trainable_variables)

    def _overwrite_variable_with_gradient(self, variable):
        # Keras asks whether to leave a gradient unscaled: yes, as it already is.
        return is_embedding_variable(variable) or super()._overwrite_variable_with_gradient(
            variable
        )
