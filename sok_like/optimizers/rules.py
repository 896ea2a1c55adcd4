"""Translates a stock optimizer into the core's update rule.

A rule is the name of an update formula with its fixed numbers. Either the rule has exactly that
optimizer's meaning on a dense variable, or the translation raises:

    Keras 3, tf_keras          SGD, Adagrad, Adam, AdamW, Ftrl, with schedules, weight decay and
                               clipvalue
    tf_keras' legacy ones      SGD and Adam, with clipvalue (also those of tf.compat.v1.keras)
    tf.compat.v1.train         GradientDescent, Momentum, Adagrad, Adam, Ftrl

Two points to note. Adam and Keras' momentum move rows that are not in the batch, and so does the
core (it brings such a row up to date when it is next read). FTRL is TensorFlow's sparse FTRL, which
leaves them unchanged; Keras 3's dense formula would set every row to zero at the first step.
"""

from __future__ import annotations

import dataclasses
import numbers
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import require, unmet
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.table.keys import as_keys, as_rows
from sok_like.table.variable import EmbeddingVariable


@dataclasses.dataclass(frozen=True)
class OptimizerRule:
    """Attributes of the op `SokApplyGradients`; see cpp/core/optimizer.h for the formulas."""

    rule: str
    options: tuple[tuple[str, Any], ...] = ()

    def replace(self, rule: str | None = None, **options: Any) -> OptimizerRule:
        """This rule with another name or other options."""
        return OptimizerRule(rule or self.rule, tuple({**dict(self.options), **options}.items()))

    def check(self) -> None:
        """Raises ValueError unless its numbers are legal, as the first step would."""
        # Takes a step without keys on a temporary table.
        nothing: Any = np.zeros(0, np.int64), np.zeros((0, 1), np.float32)
        core, options = libraries.core(), dict(self.options)
        core.apply_gradients(core.Table("check", 1), self.rule, 1e-6, 1, *nothing, **options)

    def apply(
        self,
        pairs: Sequence[tuple[tf.IndexedSlices, EmbeddingVariable]],
        learning_rate: Any,
        step: Any,
    ) -> Any:
        """Updates the rows in the gradients of tables, each there once; the op in a graph."""
        for gradient, variable in pairs:
            if not isinstance(gradient, tf.IndexedSlices):
                raise TypeError(
                    "The gradient of an EmbeddingVariable must be tf.IndexedSlices of keys. "
                    f"Received: {gradient!r} (table '{variable.table_name}')"
                )
        return libraries.ops().sok_apply_gradients(
            handles=[variable.handle for _, variable in pairs],
            keys=[as_keys(g.indices, f"indices of '{v.table_name}'") for g, v in pairs],
            grads=[as_rows(g.values, "values", v.table_name) for g, v in pairs],
            learning_rate=tf.cast(learning_rate, tf.float32),
            step=tf.cast(step, tf.int64),
            # TensorFlow concatenates gradients of several lookups, to a new tensor of keys.
            keys_are_unique=all(getattr(g.indices, comm.UNIQUE, False) for g, _ in pairs),
            rule=self.rule,
            **dict(self.options),
        )


def rule_of(optimizer: Any) -> OptimizerRule:
    """The rule that a stock optimizer stands for."""
    if hasattr(optimizer, "own_rule"):  # those in `sok_like.optimizers.deeprec`
        return optimizer.own_rule()
    legacy = legacy_name(optimizer)
    if legacy not in (None, *_LEGACY):
        keras_settings(optimizer)  # raises for a setting that rows cannot follow
        raise ValueError(
            "Embedding variables support SGD and Adam of tf_keras' legacy optimizers (those of "
            "tf.compat.v1.keras), and of tf.compat.v1.train also Adagrad and Ftrl. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    subclasses: list[type] = []  # of the stock class, before it was made aware of tables
    for cls in type(optimizer).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in ("keras", "tf_keras") and cls.__name__ in _KERAS:
            _check_same_update(subclasses, cls)
            settings = keras_settings(optimizer)
            of_class = (_KERAS if legacy is None else _LEGACY)[cls.__name__]
            return _read(optimizer, _keras_number, *of_class).replace(**settings)
        if cls.__module__.startswith("tensorflow.python.training") and cls.__name__ in _V1:
            _check_same_update(subclasses, cls)
            return _read(optimizer, number_of, *_V1[cls.__name__])
        subclasses = [] if package == __name__.partition(".")[0] else [*subclasses, cls]
    raise ValueError(
        f"sok.OptimizerWrapper supports Keras' {', '.join(_KERAS)} and tf.compat.v1.train's "
        f"{', '.join(_V1)}. Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    )


class UpdateOfItsOwn(ValueError):
    """A subclass of a stock optimizer trains by another formula."""


def _check_same_update(subclasses, stock):
    """Raises UpdateOfItsOwn if a subclass overrides more than constructor and configuration."""
    kinds = (types.FunctionType, property, classmethod, staticmethod)
    for cls in subclasses:
        functions = {name for name, value in vars(cls).items() if isinstance(value, kinds)}
        overridden = functions & set(dir(stock)) - {"get_config", "from_config"}
        overridden = sorted(name for name in overridden if not name.startswith("__"))
        if overridden:
            raise UpdateOfItsOwn(
                f"Tables are trained by the formula of {stock.__name__}, not by that of a "
                "subclass. Give tables a stock optimizer (sok.OptimizerWrapper({'table': ...}, "
                "default=...)), without Horovod's wrapper: sok.OptimizerWrapper averages over "
                f"ranks itself. Received: {cls.__module__}.{cls.__qualname__}, which overrides "
                f"{', '.join(overridden)}"
            )


def keras_settings(optimizer: Any) -> dict[str, float]:
    """Options of any rule for Keras; ValueError for a setting that a single row cannot follow."""
    refused = {
        "clipnorm": "the norm of a gradient that is spread over ranks",
        "global_clipnorm": "a norm over the whole model",
        "use_ema": "a moving average of every row",
        "gradient_accumulation_steps": "gradients of several steps held back",
        "adaptive_epsilon": "an epsilon of its own for every step",
    }
    name = getattr(optimizer, "_name", None) or optimizer.name
    for setting, why in refused.items():
        if getattr(optimizer, setting, None):
            raise ValueError(
                f"An embedding variable cannot honour `{setting}`, {why}. "
                f"Received: {setting}={getattr(optimizer, setting)!r} on {name}; leave "
                "it out, or give tables an optimizer of their own "
                "(sok.OptimizerWrapper({'table': ...}, default=...)). In a train_step, "
                "tf.clip_by_global_norm takes norms over all ranks."
            )
    weight_decay = getattr(optimizer, "weight_decay", None)  # legacy ones have none
    return {"weight_decay": weight_decay or 0.0, "clip_value": optimizer.clipvalue or 0.0}


def legacy_name(optimizer: Any) -> str | None:
    """The tf_keras legacy class of an optimizer; None for other optimizers."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("tf_keras.src.optimizers.legacy."):
            return cls.__name__
    return None


def _keras_number(optimizer, name):
    """A number; legacy optimizers keep it as given, and as a variable from the first step on."""
    value = getattr(optimizer, "_hyper", {}).get(name)
    if value is None:
        return float(getattr(optimizer, name))
    as_given = optimizer.__dict__.setdefault("_sok_numbers", {})
    if not isinstance(value, tf.Variable):
        as_given[name] = _fixed(value, name)
        return as_given[name]
    with tf.init_scope():
        if tf.executing_eagerly():
            return float(value.numpy())
    if name not in as_given:
        required = "be wrapped, or used with embedding variables, before its first step in a graph"
        raise unmet("A legacy optimizer of Keras", required, f"{optimizer._name} after it")
    return as_given[name]


def _read(optimizer, number, rule, attributes, fixed=()):
    """The rule with numbers that `number` reads; `attributes` are their names, by option."""
    options = {
        option: bool(getattr(optimizer, name)) if option in _FLAGS else number(optimizer, name)
        for option, name in attributes.items()
    }
    # Keras' SGD has a slot only with momentum, TensorFlow's Momentum always.
    if options.get("momentum") == 0 and "momentum_before_rate" not in fixed:
        return OptimizerRule("sgd")
    return OptimizerRule(rule).replace(**options, **dict(fixed))


def number_of(optimizer: Any, attribute: str) -> float:
    """A setting that a rule keeps for the whole training; raises ValueError for a tensor."""
    return _fixed(getattr(optimizer, attribute), attribute.lstrip("_"))


def _fixed(value, setting):
    value = value() if callable(value) else value
    fits = isinstance(value, numbers.Real)
    require(fits, setting, "a number, fixed for the whole training", value)
    return float(value)


_FLAGS = ("amsgrad", "nesterov")  # may be given as 0 or 1
_FTRL = {
    "learning_rate_power": "learning_rate_power",
    "initial_accumulator": "initial_accumulator_value",
    "l1": "l1_regularization_strength",
    "l2": "l2_regularization_strength",
    "l2_shrinkage": "l2_shrinkage_regularization_strength",
    "beta": "beta",
}
_ADAGRAD = {"initial_accumulator": "initial_accumulator_value", "epsilon": "epsilon"}
_ADAM = {name: name for name in ("beta_1", "beta_2", "epsilon", "amsgrad")}
_MOMENTUM = {name: name for name in ("momentum", "nesterov")}
# By class: a rule, the attributes with its numbers, and numbers that are always the same. With
# `lazy` other rows do not change, because the stock sparse kernel does not change them.
_KERAS: dict[str, tuple] = {
    "SGD": ("momentum", _MOMENTUM),
    "Adagrad": ("adagrad", _ADAGRAD),
    "Adam": ("adam", _ADAM),
    "AdamW": ("adam", _ADAM),
    "Ftrl": ("ftrl", _FTRL),
}
_LEGACY: dict[str, tuple] = {
    "SGD": ("momentum", _MOMENTUM, {"lazy": True}),
    "Adam": ("adam", _ADAM),
}
_V1: dict[str, tuple] = {
    "GradientDescentOptimizer": ("sgd", {}),
    "MomentumOptimizer": (
        "momentum",
        {"momentum": "_momentum", "nesterov": "_use_nesterov"},
        {"lazy": True, "momentum_before_rate": True},
    ),
    "AdagradOptimizer": (
        "adagrad",
        {"initial_accumulator": "_initial_accumulator_value"},
        {"epsilon": 0.0},
    ),
    "AdamOptimizer": ("adam", {"beta_1": "_beta1", "beta_2": "_beta2", "epsilon": "_epsilon"}),
    "FtrlOptimizer": ("ftrl", {option: f"_{name}" for option, name in _FTRL.items()}),
}
