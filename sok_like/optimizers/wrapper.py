"""`sok.OptimizerWrapper` and `sok.OptimizerScope`: stock optimizers that also train tables."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok_like.optimizers.embedding_aware import EmbeddingAware, embedding_aware, knows_tables
from sok_like.optimizers.families import LossScaling
from sok_like.optimizers.rules import rule_of
from sok_like.runtime.checks import unmet, wrong_argument
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3, keras_optimizers, optimizer_family
from sok_like.runtime.framework.scoped_attributes import view
from sok_like.table.variable import is_embedding_variable

_lock = threading.Lock()
_open_scopes = 0
_hooks: list[hooks.Hook] = []


def OptimizerWrapper(
    optimizer: Any,
    *,
    default: Any = None,
    lazy: bool = False,
    average_dense_gradients: bool = True,
    skip_nonfinite_gradients: bool = False,
) -> Any:
    """The same optimizer, able to train a model's embedding and ordinary variables together.

    Embedding variables are updated by the fused rule with exactly the optimizer's meaning (see
    `sok_like.optimizers.rules`). Ordinary variables are updated by the optimizer itself, with their
    gradients averaged over ranks. For `model.compile`, loops with a tape, and v1 graphs.

    Args:
        optimizer: SGD, Adagrad, Adam, AdamW or Ftrl of Keras 3 or tf_keras, also by name or
            configuration, as in `compile`; GradientDescent, Momentum, Adagrad, Adam or Ftrl of
            `tf.compat.v1.train`; or Keras' `LossScaleOptimizer` around one of them. Or a dictionary
            from names of tables to optimizers of Keras for them; `RowWiseAdagrad` and `LazyAdam`
            may be among these.
        default: With a dictionary: the optimizer of all other tables and variables, or a
            `LossScaleOptimizer` around it, which scales for all. The result is a view of it. Its
            `optimizer_of("users").learning_rate` (with loss scaling that of its `inner_optimizer`)
            is that of a table's optimizer; `model.save` keeps it, a tf.train.Checkpoint only the
            default's.
        lazy: Adam and momentum move only the rows of the batch, as LazyAdam does, instead of every
            row that still has momentum.
        average_dense_gradients: Set it to False if something else already averages them over ranks.
        skip_nonfinite_gradients: Skips keys whose gradient, summed over samples and ranks, has NaN
            or infinity in a step, as if the batch had not contained them. It counts them:
            `optimizer.skipped_gradients(variable)`. Otherwise such a gradient makes the row NaN
            or infinite forever. For embedding variables only; it costs a pass over their gradients.

    Returns:
        A view of `optimizer`, whose class is a subclass of the optimizer's. Both share all state: a
        change of the learning rate on one is seen by the other.

    Raises:
        TypeError: `optimizer` is not of these families, or already trains embedding variables.
        ValueError: embedding variables cannot follow the optimizer or one of its settings exactly;
            `optimizer` has been wrapped before, with other options.
    """
    options = {"lazy": lazy, "average": average_dense_gradients}
    options |= {"skip_nonfinite": skip_nonfinite_gradients}
    is_dictionary = isinstance(optimizer, Mapping) and "class_name" not in optimizer
    by_table = is_dictionary or default is not None
    main = default if by_table else named(optimizer)
    inner = getattr(main, "inner_optimizer", None)
    stock = main if inner is None else inner
    if by_table:
        aware = _per_table(optimizer, is_dictionary, stock, options)
    else:
        aware = _wrapped(stock, options)
    return aware if inner is None else _loss_scaling(main, aware)  # Keras' LossScaleOptimizer


def _wrapped(optimizer, options):
    if knows_tables(optimizer) or getattr(optimizer, "dmp_averages", False):
        raise TypeError(
            "sok.OptimizerWrapper needs a stock optimizer. One that already trains embedding "
            "variables must not be wrapped again, and DistributedOptimizer goes around the "
            "wrapper: `DistributedOptimizer(sok.OptimizerWrapper(optimizer))`. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    embedding_aware(type(optimizer))  # raises if there is none
    rule_of(optimizer).check()
    return _view(optimizer, options)


def _view(optimizer, options):
    # The wrappers of one optimizer share its attributes, so a second one would change the first.
    before = {name: vars(optimizer).get(f"_sok_{name}", value) for name, value in options.items()}
    if before != options:
        now, then = (", ".join(f"{k}={v}" for k, v in some.items()) for some in (options, before))
        raise ValueError(
            "An optimizer that is wrapped twice must be given the same options, because both "
            f"wrappers share its state. Received: {now} after {then} "
            f"(optimizer {type(optimizer).__name__})"
        )
    aware = view(embedding_aware(type(optimizer)), optimizer)
    aware.__dict__.update({f"_sok_{name}": value for name, value in options.items()})
    return aware


def _per_table(optimizers, is_dictionary, default, options):
    if not is_dictionary or default is None or not optimizers:
        raise ValueError(
            "`optimizer` must be a dictionary by names of tables if `default`, the optimizer of "
            "everything else, is given, and only then. "
            f"Received: optimizer={optimizers!r}, default={default!r}"
        )
    default = named(default)
    if vars(default).get("_sok_tables"):
        received = f"{type(default).__name__} with {sorted(default._sok_tables)}"
        raise unmet("`default`", "not have optimizers for tables already", received)
    # A table may be called "default".
    stock = {**{key: named(own) for key, own in optimizers.items()}, None: default}
    wrong = {
        key or "default": f"{type(own).__module__}.{type(own).__name__}"
        for key, own in stock.items()
        if optimizer_family(type(own)) not in ("keras", "tf_keras")
        or hasattr(own, "inner_optimizer")
    }
    if wrong:
        raise TypeError(
            "Optimizers of tables, and the default, must be those of Keras 3 or tf_keras. A "
            "LossScaleOptimizer goes around the default alone, and scales the loss for all: "
            "`sok.OptimizerWrapper({...}, default=LossScaleOptimizer(optimizer))`. "
            f"Received: {wrong}"
        )
    attributes = {f"_sok_{name}": value for name, value in options.items()}
    asked = {k: value for k, value in attributes.items() if value != getattr(EmbeddingAware, k)}
    for own in filter(knows_tables, stock.values()):
        own.__dict__.update(asked)  # what else it has stays, such as that LazyAdam is lazy
    aware = {key: own if knows_tables(own) else _view(own, options) for key, own in stock.items()}
    joint = aware.pop(None)
    # The default needs a rule for tables only if it meets one: it may clip by norms.
    for own in aware.values():
        rule_of(own).check()
    joint.__dict__["_sok_tables"] = aware
    return joint


def named(optimizer: Any) -> Any:
    """The optimizer that Keras means by a name or a configuration; any other object unchanged."""
    by_name = isinstance(optimizer, (str, dict))
    return keras_optimizers().get(optimizer) if by_name else optimizer


@functools.cache
def _loss_scaling_class(cls):
    if issubclass(cls, LossScaling):
        return cls
    members = {"__module__": __name__}
    aware = type(f"EmbeddingAware{cls.__name__}", (LossScaling, cls), members)
    return tf.keras.utils.register_keras_serializable("sok_like")(aware)


def __getattr__(name: str) -> type:
    """The class around Keras 3's `LossScaleOptimizer`, by its name in files."""
    if name == "EmbeddingAwareLossScaleOptimizer" and is_keras_3():
        return _loss_scaling_class(tf.keras.optimizers.LossScaleOptimizer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _loss_scaling(optimizer, wrapped):
    """A view of a LossScaleOptimizer around `wrapped`, a view of its inner optimizer."""
    scaling = view(_loss_scaling_class(type(optimizer)), optimizer) if is_keras_3() else optimizer
    setattr(scaling, "inner_optimizer" if is_keras_3() else "_optimizer", wrapped)
    if not is_keras_3() and hasattr(wrapped, "exclude_from_weight_decay"):
        # tf_keras' own would note it where no step looks.
        scaling.__dict__["exclude_from_weight_decay"] = wrapped.exclude_from_weight_decay
    return scaling


class OptimizerScope:
    """A scope in which a stock optimizer's `apply_gradients` accepts embedding variables.

    With embedding variables it does what that of `sok.OptimizerWrapper(optimizer)` does; without,
    it is unchanged. Outside the scope a stock optimizer raises and names the wrapper.

        with sok.OptimizerScope(embedding_variables):
            optimizer.apply_gradients(zip(gradients, embedding_variables))

    Args:
        trainable_variables: List or tuple of variables, as in SOK 1.x. Its content does not matter:
            the scope applies to every embedding variable.

    Raises:
        RuntimeError: `trainable_variables` is neither a list nor a tuple.
    """

    def __init__(self, trainable_variables: Sequence[Any]):
        if not isinstance(trainable_variables, (list, tuple)):
            required = "a list or a tuple of variables"
            raise wrong_argument(
                "trainable_variables", required, trainable_variables, error=RuntimeError
            )

    def __enter__(self) -> OptimizerScope:
        global _open_scopes
        with _lock:
            _open_scopes += 1
            if _open_scopes == 1:
                classes = [tf.compat.v1.train.Optimizer, keras_optimizers().Optimizer]
                if not is_keras_3():
                    # Looks at all variables before its inner optimizer does.
                    scaling = "tf_keras.src.mixed_precision.loss_scale_optimizer"
                    classes.append(importlib.import_module(scaling).LossScaleOptimizerV3)
                    classes.append(keras_optimizers().legacy.Optimizer)
                for cls in classes:
                    why = "sok.OptimizerScope: stock optimizers train tables"
                    _hooks.append(hooks.wrap(cls, "apply_gradients", train_tables, why))
        return self

    def __exit__(self, *error: Any) -> None:
        global _open_scopes
        with _lock:
            _open_scopes -= 1
            while _open_scopes == 0 and _hooks:
                _hooks.pop().undo()


def train_tables(own: Callable, self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps a stock optimizer's `apply_gradients`, so that it accepts embedding variables, too."""
    pairs = list(grads_and_vars)
    # An aware class handles the tables by itself, and calls this with the other variables.
    if not knows_tables(self) and any(is_embedding_variable(v) for _, v in pairs):
        return OptimizerWrapper(self).apply_gradients(pairs, *args, **kwargs)
    return own(self, pairs, *args, **kwargs)
