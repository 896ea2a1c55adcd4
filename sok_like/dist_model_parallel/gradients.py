"""Gradients of a hybrid model: all are averaged over ranks, except those of local variables.

The variable of each gradient says whether it is local. Nothing is registered beforehand, and
Horovod's own wrappers and state stay unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from sok_like.lookup.local_variables import is_local, mark_local, unique_in_graph
from sok_like.runtime.framework.keras_version import optimizer_family
from sok_like.runtime.framework.scoped_attributes import view
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.finite_gradients import all_finite, with_decision, without_decision
from sok_like.runtime.ranks.initialize import ensure_initialized

# Arguments of Horovod's wrappers: some have no effect here; the others must mean an average over
# all ranks, or gradients of replicated and local variables would have different scales.
_WITHOUT_EFFECT = ("name", "device_dense", "device_sparse", "num_groups", "groups", "compression")
_ONLY_WITH = {
    "gradient_predivide_factor": 1.0,
    "backward_passes_per_step": 1,
    "average_aggregated_gradients": False,
    "scale_local_gradients": True,
}


def check_horovod_arguments(wrapper: str, arguments: dict[str, Any]) -> None:
    """Refuses arguments that would change the result."""
    for name, value in arguments.items():
        if name in _WITHOUT_EFFECT:
            fine = True
        elif name in _ONLY_WITH:
            fine = value == _ONLY_WITH[name]
        elif name == "op":
            fine = value is None or value == _horovod().Average
        elif name == "process_set":
            fine = value is None or getattr(value, "process_set_id", None) == 0
        else:
            raise TypeError(f"{wrapper} got an unexpected argument. Received: {name}={value!r}")
        if not fine:
            raise ValueError(
                f"{wrapper} averages over all ranks, so `{name}` must be left out. "
                f"Received: {name}={value!r}"
            )


def _horovod():
    import horovod.tensorflow as hvd

    return hvd


def averaged(gradients: list, variables: list, sparse_as_dense: bool, name: str) -> list:
    """Averages over ranks the gradients of variables that are not local; None stays None.

    All sparse gradients are returned with each index once. So a variable that is looked up
    several times in a step is trained as with a dense gradient.
    """
    communicator = comm.current()
    gradients = list(map(comm.distinct, gradients))
    if communicator.world_size == 1:
        return gradients
    shared = [i for i, variable in enumerate(variables) if not is_local(variable)]
    mine = [gradients[i] for i in shared]
    if sparse_as_dense:
        mine = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in mine]
    means = exchange_order.collective_in_turn(communicator, "average", mine, unique_in_graph(name))
    for i, gradient in zip(shared, means, strict=True):
        gradients[i] = gradient
    return gradients


class _AveragingTape:
    """A `tf.GradientTape` whose `gradient` averages."""

    def __init__(self, tape, sparse_as_dense):
        self._tape = tape
        self._sparse_as_dense = sparse_as_dense

    def __enter__(self):
        self._tape.__enter__()
        return self

    def __exit__(self, *exception):
        return self._tape.__exit__(*exception)

    def __getattr__(self, name):
        return getattr(self._tape, name)

    def gradient(self, target, sources, *args, **kwargs):
        """`tf.GradientTape.gradient`, averaged over ranks unless the source is local."""
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        flat = averaged(
            tf.nest.flatten(gradients),
            tf.nest.flatten(sources),
            self._sparse_as_dense,
            "dmp_gradients",
        )
        return tf.nest.pack_sequence_as(gradients, flat)

    def jacobian(self, *args, **kwargs):
        """`tf.GradientTape.jacobian`, on one rank."""
        return self._on_one_rank("jacobian")(*args, **kwargs)

    def batch_jacobian(self, *args, **kwargs):
        """`tf.GradientTape.batch_jacobian`, on one rank."""
        return self._on_one_rank("batch_jacobian")(*args, **kwargs)

    def _on_one_rank(self, method):
        if (world_size := comm.current().world_size) > 1:
            raise NotImplementedError(
                f"A DistributedGradientTape averages gradients, not what `{method}` returns. Call "
                "it on a tf.GradientTape, for the derivatives of this rank's samples. "
                f"Received: `{method}` on {world_size} ranks"
            )
        return getattr(self._tape, method)


def DistributedGradientTape(
    gradtape: tf.GradientTape, *, sparse_as_dense: bool = False, **horovod_arguments: Any
) -> Any:
    """A tape for models with replicated and local variables; it replaces Horovod's.

    Args:
        gradtape: The tape that computes the gradients.
        sparse_as_dense: True averages sparse gradients of replicated variables as dense ones.
        **horovod_arguments: Other arguments of Horovod's wrapper. Names, devices, groups and
            compression have no effect; values that mean anything but an average are refused.

    Returns:
        A tape whose `gradient` averages all gradients over ranks, except those of local variables
        (`de_local`), which have that scale already. All ranks must call it with the same sources,
        apart from local ones. Its `jacobian` and `batch_jacobian` raise NotImplementedError on
        several ranks.

    Raises:
        TypeError: Horovod's wrapper does not have an argument.
        ValueError: a value is not supported.
    """
    check_horovod_arguments("DistributedGradientTape", horovod_arguments)
    with tf.init_scope():
        ensure_initialized()
    return _AveragingTape(gradtape, sparse_as_dense)


def slot_reference(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The variable for which `add_variable_from_reference` is called, in either Keras."""
    names = ("reference_variable", "model_variable")
    return args[0] if args else next(kwargs[name] for name in names if name in kwargs)


def _registered(cls: type) -> type:
    """Registers a class under the one name that Keras' files use for all of them."""
    register = tf.keras.utils.register_keras_serializable
    return register("sok_like.dist_model_parallel", "DistributedOptimizer")(cls)


@_registered
class Serialized:
    """Mixin: saves an optimizer of `DistributedOptimizer`, for clones and files.

    A configuration is that of the inner optimizer, plus the name of its class. A subclass sets the
    inner class as `_dmp_class`.
    """

    _dmp_class: Any
    _dmp_sparse_as_dense: bool

    def get_config(self):
        """The configuration of the inner optimizer, its class, and this class's own argument."""
        described = tf.keras.utils.serialize_keras_object(_within(self))
        return {
            **described.pop("config"),
            "dmp_class": described,
            "dmp_sparse_as_dense": self._dmp_sparse_as_dense,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        sparse_as_dense = config.pop("dmp_sparse_as_dense")
        described = {**config.pop("dmp_class"), "config": config}
        optimizer = tf.keras.utils.deserialize_keras_object(described, custom_objects)
        return DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)


def _within(optimizer: Any) -> Any:
    """A view of an optimizer of `DistributedOptimizer` whose class is the inner one."""
    return view(optimizer._dmp_class, optimizer)


class _Averaging(Serialized):
    """The common part of optimizers of both Kerases."""

    _dmp_sparse_as_dense = False
    dmp_averages = True
    _sok_steps_together = True

    def add_variable_from_reference(self, *args, **kwargs):
        slot = super().add_variable_from_reference(*args, **kwargs)
        return mark_local(slot) if is_local(slot_reference(args, kwargs)) else slot

    def _dmp_averaged(self, gradients, variables):
        return averaged(gradients, variables, self._dmp_sparse_as_dense, "dmp_optimizer")

    def _dmp_averaged_pairs(self, pairs):
        variables = [v for _, v in pairs]
        gradients = self._dmp_averaged([g for g, _ in pairs], variables)
        return list(zip(gradients, variables, strict=True))


class _Keras3(_Averaging):
    def __setattr__(self, name, value):
        # Keras' LossScaleOptimizer switches off the scaling of the optimizer that it wraps.
        taken_over = name == "loss_scale_factor" and value is None and name in self.__dict__
        if taken_over and comm.current().world_size > 1:
            raise ValueError(
                "Keras' LossScaleOptimizer, which `compile` puts around an optimizer under "
                "`mixed_float16`, decides on each rank separately whether to take a step. Use "
                "`DistributedOptimizer(tf.keras.optimizers.LossScaleOptimizer(optimizer))`, where "
                "the ranks decide together. Received: a DistributedOptimizer inside of it"
            )
        super().__setattr__(name, value)

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        variables = trainable_variables
        if variables is None:  # those of `build`, including tables
            variables = getattr(self, "_sok_trainable", self._trainable_variables)
        variables = list(variables)
        if len(variables) == len(grads):  # otherwise Keras raises
            grads = self._dmp_averaged(grads, variables)
        return super().apply(grads, trainable_variables)


class _OfTfKeras(_Averaging):
    """The common part of tf_keras' optimizers and its legacy ones."""

    def _dmp_apply(self, own, grads_and_vars, average):
        """`own(pairs)`, the stock step, with averaged gradients."""
        pairs = without_decision(grads_and_vars)
        if average:
            pairs = self._dmp_averaged_pairs(pairs)
        self.__dict__["_dmp_has_averaged"] = average  # Keras itself calls `aggregate_gradients`
        try:
            return own(pairs)
        finally:
            self.__dict__["_dmp_has_averaged"] = False

    def _dmp_aggregate(self, own, grads_and_vars):
        """tf_keras' LossScaleOptimizer calls this, and then decides whether to take the step."""
        if self.__dict__.get("_dmp_has_averaged"):
            return own(grads_and_vars)
        pairs = own(self._dmp_averaged_pairs(list(grads_and_vars)))
        return with_decision(list(pairs), comm.current())


class _TfKeras(_OfTfKeras):
    def apply_gradients(
        self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs
    ):
        average = kwargs.pop("experimental_aggregate_gradients", True)
        skip, own = skip_gradients_aggregation, super().apply_gradients
        average = average and not skip
        return self._dmp_apply(lambda p: own(p, name, skip, **kwargs), grads_and_vars, average)

    def aggregate_gradients(self, grads_and_vars):
        return self._dmp_aggregate(super().aggregate_gradients, grads_and_vars)


class _LossScaling(Serialized):
    """Mixin over Keras 3's `LossScaleOptimizer`: all ranks decide together."""

    def get_config(self):
        # From its own configuration an averaging optimizer would be inside Keras' loss scaling.
        inner = tf.keras.utils.serialize_keras_object(_within(self.inner_optimizer))
        return {**super().get_config(), "inner_optimizer": inner}

    @property
    def _dmp_sparse_as_dense(self):
        return self.inner_optimizer._dmp_sparse_as_dense

    def check_finite(self, grads):
        return all_finite(grads, comm.current())


def _loss_scaling(optimizer, inner, sparse_as_dense):
    """A view of Keras' LossScaleOptimizer, around an averaging view of its inner optimizer."""
    cls = type(optimizer)
    if optimizer_family(cls) != "keras":
        raise TypeError(
            "tf_keras' LossScaleOptimizer must be around the DistributedOptimizer: "
            "`LossScaleOptimizer(DistributedOptimizer(optimizer))`. "
            f"Received: DistributedOptimizer({cls.__name__}(...))"
        )
    made = view(_loss_scaling_class(cls), optimizer)
    made.inner_optimizer = DistributedOptimizer(inner, sparse_as_dense=sparse_as_dense)
    return made


@functools.cache
def _loss_scaling_class(cls):
    return _named(cls, _LossScaling)


def _named(cls, family):
    members = {"__module__": __name__, "_dmp_class": cls}
    return _registered(type(f"Distributed{cls.__name__}", (family, cls), members))


class _TfKerasLegacy(_OfTfKeras):
    def add_slot(self, var, *args, **kwargs):
        slot = super().add_slot(var, *args, **kwargs)
        return mark_local(slot) if is_local(var) else slot

    def apply_gradients(self, grads_and_vars, name=None, experimental_aggregate_gradients=True):
        average, own = experimental_aggregate_gradients, super().apply_gradients
        return self._dmp_apply(lambda p: own(p, name, average), grads_and_vars, average)

    def _aggregate_gradients(self, grads_and_vars):
        return self._dmp_aggregate(super()._aggregate_gradients, grads_and_vars)


@functools.cache
def _averaging_class(cls):
    families = {"keras": _Keras3, "tf_keras": _TfKeras, "legacy": _TfKerasLegacy}
    family = families.get(optimizer_family(cls) or "")
    if family is None:
        raise TypeError(
            "An optimizer of Keras 3 or tf_keras (also its legacy ones) is required. "
            f"Received: {cls.__module__}.{cls.__qualname__}"
        )
    return _named(cls, family)


def DistributedOptimizer(
    optimizer: Any, *, sparse_as_dense: bool = False, **horovod_arguments: Any
) -> Any:
    """An optimizer for models with replicated and local variables; it replaces Horovod's.

    Use it in `model.compile` or with a plain `tf.GradientTape`; not with `DistributedGradientTape`,
    which also averages.

    Args:
        optimizer: Any optimizer of Keras 3 or tf_keras, also a legacy one. For hash
            tables it must be a `sok.OptimizerWrapper`. Loss scaling: Keras 3's
            `LossScaleOptimizer` goes inside, that of tf_keras outside.
        sparse_as_dense: True averages sparse gradients of replicated variables as dense ones.
        **horovod_arguments: As in `DistributedGradientTape`.

    Returns:
        A view of `optimizer`, of a subclass of its class, that shares its state. Before it applies
        gradients it averages them over ranks, except those of local variables.

    Raises:
        TypeError: `optimizer` is not such an optimizer, or is a DistributedOptimizer already,
            this one or Horovod's; Horovod's wrapper does not have an argument.
        ValueError: a value is not supported.
    """
    check_horovod_arguments("DistributedOptimizer", horovod_arguments)
    is_horovods = type(optimizer).__module__.startswith("horovod")
    if is_horovods or getattr(optimizer, "dmp_averages", False):
        raise TypeError(
            "A DistributedOptimizer must not be wrapped again: it averages already. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:  # Keras' LossScaleOptimizer
        return _loss_scaling(optimizer, inner, sparse_as_dense)
    cls = _averaging_class(type(optimizer))  # type: ignore[arg-type]
    with tf.init_scope():
        ensure_initialized()
    made = view(cls, optimizer)
    made.__dict__["_dmp_sparse_as_dense"] = sparse_as_dense
    return made
