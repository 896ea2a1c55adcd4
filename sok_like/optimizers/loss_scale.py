"""Dynamic loss scaling (`mixed_float16`) with embedding variables, under Keras 3.

Keras' own `LossScaleOptimizer` cannot handle a gradient whose indices are keys. It also decides on
each rank separately whether to skip a step, so ranks that disagree would wait for each other
forever. This subclass checks the values, and decides once for all ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from sok_like.optimizers.stages import unscaled
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.finite_gradients import all_finite
from sok_like.table.variable import is_embedding_variable, unwrap


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
