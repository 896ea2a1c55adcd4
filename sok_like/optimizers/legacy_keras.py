"""tf_keras' legacy optimizers (also those of `tf.compat.v1.keras`) for embedding variables.

Supported are SGD, with or without momentum, and Adam. The core has no rule with exactly the meaning
of Adagrad, RMSprop and others.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.optimizers.aware import EmbeddingAware
from sok_like.optimizers.rules import OptimizerRule, check_keras_settings
from sok_like.runtime.ranks.finite_gradients import without_decision
from sok_like.table.variable import is_embedding_variable


class LegacyKeras(EmbeddingAware):
    """Mixin over a subclass of `tf.keras.optimizers.legacy.Optimizer`."""

    def _sok_rule(self):
        return legacy_rule(self)

    def apply_gradients(self, grads_and_vars, name=None, experimental_aggregate_gradients=True):
        pairs = without_decision(grads_and_vars)
        others = self._sok_take([variable for _, variable in pairs])
        if not any(gradient is not None for gradient, _ in pairs):
            return super().apply_gradients(pairs, name)  # raises Keras' own error
        self._sok_tell_missing(pairs)
        self._sok_rule()  # before Keras turns its numbers into variables
        with tf.init_scope():
            self._create_all_weights(others)
        step = self.iterations.read_value() + 1
        rate = self._decayed_lr(tf.float32)
        updates, other = self._sok_step(pairs, rate, step, experimental_aggregate_gradients)
        if experimental_aggregate_gradients and other:  # over the replicas of a strategy
            other = list(super()._aggregate_gradients(other))
        with tf.control_dependencies([*updates, step] if not tf.executing_eagerly() else []):
            if not other:
                return tf.group(self.iterations.assign_add(1), name=name)
            return super().apply_gradients(other, name, experimental_aggregate_gradients=False)

    def _aggregate_gradients(self, grads_and_vars):
        pairs = list(grads_and_vars)
        with tf.init_scope():
            self._create_all_weights([v for _, v in pairs if not is_embedding_variable(v)])
        rate, step = self._decayed_lr(tf.float32), self.iterations.read_value() + 1
        return self._sok_aggregate(pairs, super()._aggregate_gradients, rate, step)


def legacy_rule(optimizer: Any) -> OptimizerRule:
    """The core's rule of a legacy optimizer."""
    check_keras_settings(optimizer)
    kind = legacy_name(optimizer)
    if kind == "SGD":
        momentum = _number(optimizer, "momentum")
        options: dict[str, Any] = {"momentum": momentum, "nesterov": bool(optimizer.nesterov)}
        # The sparse kernel does not change other rows.
        rule = ("momentum", {**options, "lazy": True}) if momentum else ("sgd", {})
    elif kind == "Adam":
        rule = (
            "adam",
            {
                "beta_1": _number(optimizer, "beta_1"),
                "beta_2": _number(optimizer, "beta_2"),
                "epsilon": float(optimizer.epsilon),
                "amsgrad": bool(optimizer.amsgrad),
            },
        )
    else:
        raise ValueError(
            "Embedding variables support SGD and Adam of tf_keras' legacy optimizers (those of "
            "tf.compat.v1.keras), and of tf.compat.v1.train also Adagrad and Ftrl. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    clip = {"clip_value": optimizer.clipvalue or 0.0}
    return OptimizerRule(rule[0], tuple({**rule[1], **clip}.items()))


def legacy_name(optimizer: Any) -> str | None:
    """The tf_keras legacy class of an optimizer; None for other optimizers."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("tf_keras.src.optimizers.legacy."):
            return cls.__name__
    return None


def _number(optimizer, hyper):
    """A number that Keras keeps as given at first, and as a variable from the first step on."""
    value = optimizer._hyper[hyper]
    numbers = optimizer.__dict__.setdefault("_sok_numbers", {})
    if isinstance(value, tf.Variable):
        with tf.init_scope():
            if tf.executing_eagerly():
                return float(value.numpy())
        if hyper not in numbers:
            raise ValueError(
                "A legacy optimizer of Keras must be wrapped, or used with embedding variables, "
                f"before its first step in a graph. Received: {optimizer._name} after it"
            )
        return numbers[hyper]
    value = value() if callable(value) else value
    if tf.is_tensor(value):
        raise ValueError(
            f"`{hyper}` must be a number, fixed for the whole training. Received: {value!r}"
        )
    numbers[hyper] = float(value)
    return numbers[hyper]
