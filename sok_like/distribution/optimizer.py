"""Stock optimizers on shards: gradients of whole batches, norms of whole gradients, local slots."""

import functools
from typing import Any

import tensorflow as tf

from sok_like.dist_model_parallel.training import slot_reference
from sok_like.distribution.sharded_gradient import (
    completed,
    distribution_of,
    local_part,
    sharded_gradient,
)
from sok_like.distribution.sharded_variable import (
    make_sharded,
    on_shards,
    path_of,
    shard_of,
    works_on_shards,
)
from sok_like.lookup.local_variables import clipped
from sok_like.optimizers import stages
from sok_like.optimizers.embedding_aware import embedding_aware
from sok_like.optimizers.families import LossScaling
from sok_like.planner.tables import whole_axes
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3, keras_optimizers
from sok_like.runtime.framework.scoped_attributes import view

# They update each element of a variable independently, so they can work on a shard.
_STOCK = ("keras.src", "tf_keras.src")
_ELEMENTWISE = "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Nadam Ftrl Lion".split()
# Methods that a subclass on shards must not replace.
_UPDATES = ("update_step", "apply", "apply_gradients", "_clip_gradients", "_apply_weight_decay")


class _WorksOnShards:
    """What both mixins share: Keras works on shards, and on parts of gradients."""

    _sok_distribution: Any = None

    def build(self, variables):
        with on_shards():
            super().build(variables)

    def finalize_variable_values(self, var_list):
        with on_shards():
            super().finalize_variable_values(var_list)


def take_parts(optimizer: Any, pairs: list, step: stages.Step) -> list:
    """A stage: this rank's parts of the gradients, averaged along the batch axis."""
    step.scopes.enter_context(on_shards())
    # A LossScaleOptimizer around it has taken them.
    return pairs if optimizer._sok_given_parts else _parts(optimizer, pairs)


def _parts(optimizer, pairs):
    gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
    gradients = completed(gradients, variables, optimizer._sok_distribution)
    return [(local_part(g, v), v) for g, v in zip(gradients, variables, strict=True)]


def note_updated(optimizer: Any, pairs: list, step: stages.Step) -> list:
    """A stage: notes what Keras updates, for `_clip_gradients`."""
    optimizer.__dict__["_sok_updated"] = tuple(variable for _, variable in pairs)
    return pairs


class _OnShards(_WorksOnShards):
    """Mixed into an embedding-aware optimizer of either Keras."""

    # Rows are not summed: Keras 3 squares the values of a repeated row one by one.
    _sok_stages = (take_parts, stages.report_missing, stages.train_tables, note_updated)
    _sok_updated: tuple = ()
    _sok_given_parts = False  # a LossScaleOptimizer around it gives parts
    _sok_steps_together = True

    def build(self, variables):
        check_variables(self, variables)
        super().build(variables)

    def add_variable_from_reference(self, *args, **kwargs):
        slot = super().add_variable_from_reference(*args, **kwargs)
        shard = shard_of(slot_reference(args, kwargs))
        if shard is not None and tuple(slot.shape) == shard.local_shape:
            make_sharded(slot, shard)
        return slot

    def update_step(self, gradient, variable, *args, **kwargs):
        # Keras 3 creates an empty matrix for a layer's bias where it adds two of them.
        if 0 in variable.shape:
            return None
        return super().update_step(gradient, variable, *args, **kwargs)

    def _clip_gradients(self, grads):
        """Clips as Keras does in one process: by norms of whole gradients, or each value."""
        if not any(map(shard_of, self._sok_updated)):
            return super()._clip_gradients(grads)
        # By value, a row that occurs several times is not summed first.
        whole = clipped(self, list(map(sharded_gradient, grads, self._sok_updated)))
        return list(map(local_part, whole, self._sok_updated))


class _ScalingOnShards(_WorksOnShards):
    """Mixed into a LossScaleOptimizer of either Keras: all ranks skip a step or none does."""

    if is_keras_3():

        def apply(self, grads, trainable_variables=None):
            listed = self._trainable_variables
            listed = listed if trainable_variables is None else trainable_variables
            parts = _parts(self, list(zip(grads, listed, strict=True)))
            with on_shards():
                super().apply([gradient for gradient, _ in parts], [v for _, v in parts])
    else:

        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            parts = _parts(self, list(grads_and_vars))
            with on_shards():
                return super().apply_gradients(parts, *args, **kwargs)


def check_variables(optimizer: Any, variables: Any) -> None:
    """Refuses to train sharded variables by a rule that needs whole variables."""
    shards = [variable for variable in variables if shard_of(variable) is not None]
    lineage = type(getattr(optimizer, "inner_optimizer", optimizer)).__mro__
    stock = [base.__name__ for base in lineage if base.__module__.startswith(_STOCK)]
    reason = None if {*stock} & {*_ELEMENTWISE} else "whose rule needs whole variables"
    for base in lineage:
        replaced = [name for name in _UPDATES if name in vars(base)]
        if replaced and not base.__module__.startswith((*_STOCK, "sok_like")):
            reason = reason or f"whose subclass {base.__name__} has its own {replaced[0]}"
    if reason and shards:
        raise ValueError(
            "The optimizer of sharded variables must update each element independently "
            f"({', '.join(_ELEMENTWISE)}). Received: {stock[0]}, {reason}, with the sharded "
            f"variables {[path_of(variable) for variable in shards]}"
        )
    for variable in shards:
        constraint = getattr(variable, "constraint", None)
        if whole_axes(constraint):
            raise ValueError(
                "A constraint other than NonNeg needs the whole variable, which no rank has. "
                f"Received: {type(constraint).__name__} on the sharded '{path_of(variable)}'"
            )


@functools.cache
def _class_on_shards(cls, scales):
    if scales:
        stock, bases = cls, (_ScalingOnShards, *([LossScaling] if is_keras_3() else []), cls)
    else:
        aware = embedding_aware(cls)
        stock = next(base for base in aware.__mro__ if base.__module__.startswith(_STOCK))
        bases = _OnShards, aware
    # The stock name, so that files and `get_config` are those of the stock optimizer.
    return type(stock.__name__, bases, {"__module__": stock.__module__})


def distributed_optimizer(optimizer: Any, distribution: Any) -> Any:
    """A view of a stock optimizer that trains sharded variables; both share all state."""
    if isinstance(optimizer, _WorksOnShards):
        return optimizer
    if not isinstance(optimizer, keras_optimizers().Optimizer):
        raise TypeError(f"A Keras optimizer is required. Received: {optimizer!r}")
    inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
    on_shards_view = view(_class_on_shards(type(optimizer), inner is not None), optimizer)  # type: ignore[arg-type]
    on_shards_view.__dict__["_sok_distribution"] = distribution
    if inner is not None:
        inner = distributed_optimizer(inner, distribution)
        inner.__dict__["_sok_given_parts"] = True
        on_shards_view.__dict__["inner_optimizer" if is_keras_3() else "_optimizer"] = inner
    return on_shards_view


def _method(own, optimizer, variables):
    """A method of a stock optimizer; that of its view if it works on shards from outside."""
    shards = [variable for variable in variables if shard_of(variable) is not None]
    if not shards or isinstance(optimizer, _WorksOnShards) or works_on_shards():
        return functools.partial(own, optimizer)
    return getattr(distributed_optimizer(optimizer, distribution_of(shards[0])), own.__name__)


@hooks.at_init
def _install():
    """Makes stock optimizers train shards in a custom loop without `distribution.optimizer`."""

    def apply(own, self, grads, trainable_variables=None):
        listed = self._trainable_variables if trainable_variables is None else trainable_variables
        return _method(own, self, listed)(grads, trainable_variables)

    def apply_gradients(own, self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        return _method(own, self, [variable for _, variable in pairs])(pairs, *args, **kwargs)

    def build(own, self, *args, **kwargs):
        # The argument is named `variables` or `var_list`, depending on the class.
        variables = list(next(iter((*args, *kwargs.values()))))
        return _method(own, self, variables)(variables)

    optimizers, why = keras_optimizers(), "optimizers train shards of variables"
    if is_keras_3():
        scaling, method, wrapper = optimizers.LossScaleOptimizer, "apply", apply
    else:
        scaling = type(tf.keras.mixed_precision.LossScaleOptimizer(optimizers.SGD()))
        method, wrapper = "apply_gradients", apply_gradients
    classes = (optimizers.Optimizer, scaling)
    for cls in classes:
        hooks.wrap(cls, method, wrapper, why)
    # Subclasses make their slot variables in their own `build`.
    listed = [cls for cls in vars(optimizers).values() if isinstance(cls, type)]
    for base in {base for cls in (*listed, *classes) for base in cls.__mro__}:
        if issubclass(base, optimizers.Optimizer) and "build" in vars(base):
            hooks.wrap(base, "build", build, why)
