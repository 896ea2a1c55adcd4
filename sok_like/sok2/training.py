"""Training with SOK 2.x: `init`, `filter_variables`, and optimizers that update rows of a gradient.

    optimizer                                     rows of a DynamicVariable are updated by
    SGD, Adagrad, Adam, AdamW, Ftrl of Keras;     a fused rule (`sok_like.optimizers.rules`), Adam
    SGD, Adam of tf_keras' legacy ones;           and momentum in their lazy form
    those of tf.compat.v1.train
    other legacy ones: Adamax, your own, ...      the optimizer itself (`slots.RowOptimizer`)

A `Variable` is updated by the optimizer itself; the optimizer may also be used without a wrapper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok_like.lookup import by_key as by_key  # makes its tables readable by key
from sok_like.optimizers import wrapper
from sok_like.optimizers.rules import (
    OptimizerRule,
    UpdateOfItsOwn,
    keras_settings,
    legacy_name,
)
from sok_like.runtime.checks import require
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import check_replicas, ensure_initialized
from sok_like.sok2.distributed_variable import is_static, own_variable
from sok_like.sok2.slots import RowOptimizer, SlotRows
from sok_like.table.variable import is_embedding_variable

# TensorFlow's version in the form that SOK 2.x's scripts use.
tf_version = [int(part) for part in tf.__version__.split(".")[:2]]

_switched: list[hooks.Hook] = []


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    """Initializes the package in this process.

    Several processes exchange by MPI, or by Horovod if the program has imported it. This call
    initialises either, unless the program has done so. A second call with the same tool has no
    effect.

    Args:
        comm_tool: "horovod", also for MPI; with one process also "single".
        use_legacy_optimizer: True puts the classes of `tf.keras.optimizers.legacy` in the place of
            those of `tf.keras.optimizers`, as SOK 2.x does: momentum, for one, has other numbers
            there. False puts Keras' own back. Keras 3 has no legacy optimizers: no effect.

    Raises:
        ValueError: `comm_tool` is another tool, or "single" in a job of several processes.
        RuntimeError: within a `tf.distribute` strategy of several replicas.
    """
    tools = ("horovod", "single")
    require(comm_tool in tools, "comm_tool", f"one of {tools}", comm_tool)
    check_replicas()
    ensure_initialized()
    fits = comm_tool != "single" or comm.current().world_size == 1
    require(fits, "comm_tool", "'horovod' in a job of several processes", comm_tool)
    while _switched and not use_legacy_optimizer:
        _switched.pop().undo()
    if use_legacy_optimizer and not _switched and not is_keras_3():
        optimizers = tf.keras.optimizers
        for name, cls in vars(optimizers.legacy).items():
            if isinstance(cls, type):
                why = "sok2.init: scripts of SOK 2.x train with legacy optimizers"
                _switched.append(hooks.put(optimizers, name, cls, why))


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits variables into those of this package and the others: `(sok_vars, other_vars)`.

    Args:
        vars: Variables of both kinds, including those inside a variable of Keras 3.
    """
    variables = [(v, is_embedding_variable(v) or is_static(v)) for v in vars]
    return [v for v, is_ours in variables if is_ours], [v for v, ours in variables if not ours]


# For each rule, the slots by Keras' names, and their names in the core.
_SLOTS = {
    "sgd": {},
    "momentum": {"momentum": "momentum"},
    "adagrad": {"accumulator": "accumulator"},
    "lazy_adam": {"m": "momentum", "v": "velocity"},
    "ftrl": {"accumulator": "accumulator", "linear": "linear"},
}


class OptimizerWrapper:
    """A stock optimizer that also trains DynamicVariables.

    Args:
        optimizer: SGD, Adagrad, Adam, AdamW or Ftrl of Keras 3 or tf_keras; any of
            `tf_keras.optimizers.legacy`; GradientDescent, Momentum, Adagrad, Adam or Ftrl of
            `tf.compat.v1.train`.

    Raises:
        TypeError: the optimizer is of another kind.
        ValueError: rows cannot follow the optimizer or one of its settings.
    """

    # Setting any other attribute of the optimizer here raises, instead of being ignored.
    __slots__ = ("__weakref__", "_iterations", "_optimizer", "_rows", "_view")

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer = wrapper.named(optimizer)
        self._rows: RowOptimizer | None = None
        self._view: Any = None
        self._iterations: Any = None  # those of tf.compat.v1.train have their own counter
        if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
            with tf.init_scope():
                self._iterations = tf.Variable(
                    0, dtype=tf.int64, trainable=False, name="sok2_iterations"
                )
        legacy = legacy_name(optimizer)
        if legacy in (None, "SGD", "Adam"):  # these have a fused rule
            try:
                self._view = wrapper.OptimizerWrapper(optimizer, lazy=True)
                return
            except ValueError as error:
                if legacy is None or not isinstance(error, UpdateOfItsOwn):
                    raise ValueError(
                        f"{error} (sok2.OptimizerWrapper also takes the optimizers of "
                        "tf_keras.optimizers.legacy.)"
                    ) from error
        keras_settings(optimizer)  # raises for a setting that rows cannot follow
        self._rows = RowOptimizer(optimizer)

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._optimizer

    @property
    def learning_rate(self) -> Any:
        """The optimizer's learning rate; setting it here sets it there."""
        for name in ("learning_rate", "_lr", "_learning_rate"):
            if hasattr(self._optimizer, name):
                return getattr(self._optimizer, name)
        raise AttributeError("learning_rate")

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if not hasattr(self._optimizer, "learning_rate"):
            raise AttributeError(
                f"The learning rate of a {type(self._optimizer).__name__} of tf.compat.v1.train "
                "must be given when it is made; a variable as the rate can be assigned. "
                f"Received: learning_rate={value!r}"
            )
        self._optimizer.learning_rate = value

    lr = learning_rate

    @property
    def iterations(self) -> Any:
        """Steps of this wrapper, a variable; None for optimizers of tf.compat.v1.train."""
        return self._iterations

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None
    ) -> Any:
        """Takes one step.

        Args:
            grads_and_vars: (gradient, variable) pairs; pairs without a gradient are skipped.
                Gradients of variables that are not of this package are averaged over ranks.
            global_step: A variable to increase by 1.
            name: Name of the op in a graph.

        Returns:
            The op in a graph.

        Raises:
            ValueError: no variable has a gradient.
        """
        grads_and_vars = list(grads_and_vars)
        pairs = [(g, variable) for g, variable in grads_and_vars if g is not None]
        if not pairs:
            names = [getattr(variable, "name", variable) for _, variable in grads_and_vars]
            raise ValueError(f"No gradients provided for any variable. Received: {names}")
        if isinstance(self._optimizer, tf.compat.v1.train.Optimizer):
            return self._view.apply_gradients(pairs, global_step, name)
        inner = getattr(self._optimizer, "inner_optimizer", None)
        # Steps are counted separately: the optimizer may train other variables by itself. Bypasses
        # Keras' __setattr__, which would save the counter with the optimizer.
        state = (self._optimizer if inner is None else inner).__dict__
        before, state["_iterations"] = state.get("_iterations"), self._iterations
        try:
            update = (self._view if self._rows is None else self._rows).apply_gradients(pairs)
        finally:
            state["_iterations"] = before
        if global_step is None:
            return update
        with tf.control_dependencies([] if tf.executing_eagerly() or update is None else [update]):
            return global_step.assign_add(tf.ones([], global_step.dtype))

    def get_slot_names(self) -> list[str]:
        """Names of the optimizer's slots of each row."""
        return list(self.core_slots if self._rows is None else self._rows.initial)

    def get_slot(self, var: Any, name: str) -> Any:
        """A slot of the rows of a variable, for `export` and `assign`.

        Args:
            var: A variable of this package.
            name: One of `get_slot_names()`.

        Raises:
            ValueError: `name` is not one of these.
            TypeError: `var` is not a variable of this package.
            NotImplementedError: for a `Variable`, if the optimizer has no slots by name.
        """
        variable, names = own_variable(var, "`var` must be of sok2"), self.get_slot_names()
        require(name in names, "name", f"one of {names}", name)
        if is_static(variable):
            return static_slot(self._optimizer, variable, name)
        if self._rows is not None:
            return self._rows.with_slots(variable)[name][0]
        initial = 0.0
        if name == "accumulator":
            initial = dict(self._view.embedding_rule.options).get("initial_accumulator", 0.0)
        return SlotRows(variable, self.core_slots[name], list(self.core_slots.values()), initial)

    @property
    def core_slots(self) -> dict[str, str]:
        """For a fused rule, the core's names of the slots."""
        rule = self._view.embedding_rule
        slots, options = dict(_SLOTS[rule.rule]), dict(rule.options)
        if options.get("amsgrad"):
            slots["vhat"] = "velocity_hat"
        if options.get("momentum_before_rate"):
            slots["momentum"] = "accumulation"
        return slots


class SGD:
    """Gradient descent on the rows of a gradient.

    Args:
        lr: The learning rate.
    """

    __slots__ = ("__weakref__", "_lr")

    def __init__(self, lr: float):
        self._lr = tf.Variable(lr, dtype=tf.float32, trainable=False, name="sok2_sgd_lr")

    @property
    def learning_rate(self) -> tf.Variable:
        """The learning rate, a variable."""
        return self._lr

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if not (tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function):
            raise RuntimeError(
                "In a graph of a session a learning rate must be set by running "
                f"`optimizer.lr.assign(value)`. Received: learning_rate={value!r}"
            )
        self._lr.assign(value)

    lr = learning_rate

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None
    ) -> Any:
        """Takes one step; arguments as in `OptimizerWrapper.apply_gradients`.

        Raises:
            TypeError: a variable is not of this package; ranks would drift apart.
            ValueError: no variable has a gradient.
        """
        updates = []
        for gradient, variable in grads_and_vars:
            if gradient is None:
                continue
            rule = "sok2.SGD trains variables of sok2 (see filter_variables)"
            variable = own_variable(variable, rule)
            if is_static(variable):
                rate = tf.cast(self._lr, variable.dtype)
                step = tf.IndexedSlices(gradient.values * rate, gradient.indices)
                updates.append(variable.scatter_sub(step))
            else:
                updates.append(OptimizerRule("sgd").apply([(gradient, variable)], self._lr, 1))
        if not updates:
            raise ValueError("No gradients provided for any variable.")
        if global_step is not None:
            updates.append(global_step.assign_add(tf.ones([], global_step.dtype)))
        return tf.group(*[op for op in updates if op is not None], name=name)


def static_slot(optimizer: Any, variable: Any, name: str) -> tf.Variable:
    """The variable with a stock optimizer's slot of a `Variable`."""
    if legacy_name(optimizer) is None:
        raise NotImplementedError(
            "Slots of a sok2.Variable are available only for tf_keras.optimizers.legacy. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    with tf.init_scope():
        optimizer._create_all_weights([variable])
    return optimizer.get_slot(variable, name)
