"""Training a hybrid model: replicated variables start equal, and their gradients are averaged.

The variable of each gradient says whether it is local. Nothing is registered beforehand, and
Horovod's own wrappers and state stay unchanged.
"""

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok_like.lookup import replicas
from sok_like.lookup.local_variables import is_local, mark_local, unique_in_graph
from sok_like.optimizers import families, stages
from sok_like.runtime.checks import require, unmet
from sok_like.runtime.framework.running_keras import optimizer_family
from sok_like.runtime.framework.scoped_attributes import view
from sok_like.runtime.ranks import comm, horovod
from sok_like.runtime.ranks.initialize import ensure_initialized


def broadcast_variables(model_vars: Iterable[Any], root_rank: int = 0) -> None:
    """Copies the values of variables from one rank to all ranks.

    Args:
        model_vars: Variables of TensorFlow or Keras, in the same order on all ranks. Variables that
            are local to a rank (`de_local`) are skipped, and so are their slot variables in a
            `DistributedOptimizer`.
        root_rank: The rank whose values are copied.

    Raises:
        ValueError: `root_rank` does not exist.
    """
    ensure_initialized()
    ranks = comm.current().world_size
    require(0 <= root_rank < ranks, "root_rank", f"in [0, {ranks})", root_rank)
    replicas.broadcast(model_vars, root_rank, "dmp_broadcast")


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """A callback that makes replicated variables equal after the first batch of `fit`.

    It also copies the optimizer's variables, so the optimizer must be a `DistributedOptimizer`,
    which marks those of local variables.

    Args:
        root_rank: The rank whose values are copied.
        device: Ignored.

    Raises:
        ValueError: `root_rank` does not exist; raised after the first batch.
    """

    def __init__(self, root_rank: int = 0, device: str = ""):
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False

    def on_train_batch_end(self, batch, logs=None):
        # Not earlier: only now do all variables exist.
        if self.broadcast_done:
            return
        variables = replicas.with_optimizer(self.model.variables, self.model.optimizer)
        broadcast_variables(variables, self.root_rank)
        self.broadcast_done = True


def averaged(gradients: list, variables: list, sparse_as_dense: bool, name: str) -> list:
    """Averages over ranks the gradients of variables that are not local; None stays None."""
    # Sparse ones have each index once then, so parts of several lookups act as a dense gradient.
    communicator = comm.current()
    gradients = list(map(comm.distinct, gradients))
    if communicator.world_size == 1:
        return gradients
    shared = [i for i, variable in enumerate(variables) if not is_local(variable)]
    for i in shared:
        if sparse_as_dense and isinstance(gradients[i], tf.IndexedSlices):
            gradients[i] = tf.convert_to_tensor(gradients[i])
    of_shared = [gradients[i] for i in shared], [variables[i] for i in shared]
    means = stages.average_with_statistics(*of_shared, communicator, unique_in_graph(name))
    for i, gradient in zip(shared, means, strict=True):
        gradients[i] = gradient
    return gradients


class _AveragingTape:
    """A `tf.GradientTape` whose `gradient` averages."""

    def __init__(self, tape, sparse_as_dense):
        self._tape, self._sparse_as_dense = tape, sparse_as_dense

    def __enter__(self):
        self._tape.__enter__()
        return self

    def __exit__(self, *exception):
        return self._tape.__exit__(*exception)

    def __getattr__(self, name):
        world_size = comm.current().world_size
        if name in ("jacobian", "batch_jacobian") and world_size > 1:
            raise NotImplementedError(
                f"A DistributedGradientTape averages gradients, not what `{name}` returns. Call "
                "it on a tf.GradientTape, for the derivatives of this rank's samples. "
                f"Received: `{name}` on {world_size} ranks"
            )
        return getattr(self._tape, name)

    def gradient(self, target, sources, *args, **kwargs):
        """`tf.GradientTape.gradient`, averaged over ranks unless the source is local."""
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        means = averaged(*flat, self._sparse_as_dense, "dmp_gradients")
        return tf.nest.pack_sequence_as(gradients, means)


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
    horovod.check_arguments("DistributedGradientTape", horovod_arguments)
    ensure_initialized()
    return _AveragingTape(gradtape, sparse_as_dense)


def slot_reference(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The variable for which `add_variable_from_reference` is called, in either Keras."""
    names = ("reference_variable", "model_variable")
    return args[0] if args else next(kwargs[name] for name in names if name in kwargs)


# Keras' files use one name for all classes.
_registered = tf.keras.utils.register_keras_serializable(
    "sok_like.dist_model_parallel", "DistributedOptimizer"
)


@_registered
class Serialized:
    """Mixin: the configuration is the inner optimizer's, with its class and `sparse_as_dense`."""

    _dmp_class: Any  # of the inner optimizer
    _dmp_sparse_as_dense: bool

    def get_config(self):
        described = self._dmp_serialized()
        config, own = described.pop("config"), {"dmp_class": described}
        return {**config, **own, "dmp_sparse_as_dense": self._dmp_sparse_as_dense}

    def _dmp_serialized(self):
        """The inner optimizer, by a view of this one whose class is the inner one."""
        return tf.keras.utils.serialize_keras_object(view(self._dmp_class, self))

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        sparse_as_dense = config.pop("dmp_sparse_as_dense")
        described = {**config.pop("dmp_class"), "config": config}
        optimizer = tf.keras.utils.deserialize_keras_object(described, custom_objects)
        return DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)


class _Averaging(Serialized):
    """Over an adapter of `sok_like.optimizers.families`."""

    _dmp_sparse_as_dense = False
    dmp_averages = True
    _sok_steps_together = True

    def _sok_check_scaling(self, factor):
        if factor is None and comm.current().world_size > 1:
            raise ValueError(
                "Keras' LossScaleOptimizer, which `compile` puts around an optimizer under "
                "`mixed_float16`, decides on each rank separately whether to take a step. Use "
                "`DistributedOptimizer(tf.keras.optimizers.LossScaleOptimizer(optimizer))`, where "
                "the ranks decide together. Received: a DistributedOptimizer inside of it"
            )
        super()._sok_check_scaling(factor)

    def add_variable_from_reference(self, *args, **kwargs):
        slot = super().add_variable_from_reference(*args, **kwargs)
        return mark_local(slot) if is_local(slot_reference(args, kwargs)) else slot

    def add_slot(self, var, *args, **kwargs):  # tf_keras' legacy optimizers call it
        slot = super().add_slot(var, *args, **kwargs)
        return mark_local(slot) if is_local(var) else slot


def average_all(optimizer: Any, pairs: list, step: stages.Step) -> list:
    """A stage: averages over ranks all gradients but those of local variables."""
    if not step.average:
        return pairs
    gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
    means = averaged(gradients, variables, optimizer._dmp_sparse_as_dense, "dmp_optimizer")
    return list(zip(means, variables, strict=True))


class _LossScaling(Serialized):
    """Mixin over Keras 3's `LossScaleOptimizer`: all ranks decide together."""

    def get_config(self):
        # From its own configuration an averaging optimizer would be inside Keras' loss scaling.
        return {**super().get_config(), "inner_optimizer": self.inner_optimizer._dmp_serialized()}

    def check_finite(self, grads):
        return families.all_finite(grads, comm.current())


@functools.cache
def _averaging_class(cls, scales):
    family, members = optimizer_family(cls), {"__module__": __name__, "_dmp_class": cls}
    if family not in ("keras", "tf_keras", "legacy"):
        raise TypeError(
            "An optimizer of Keras 3 or tf_keras (also its legacy ones) is required. "
            f"Received: {cls.__module__}.{cls.__qualname__}"
        )
    if scales:
        bases = (_LossScaling, cls)
    else:
        adapter = () if issubclass(cls, families.Adapter) else (families.ADAPTERS[family],)
        bases = (_Averaging, *adapter, cls)
        members["_sok_stages"] = (average_all, *getattr(cls, "_sok_stages", ())[1:])
    return _registered(type(f"Distributed{cls.__name__}", bases, members))


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
    horovod.check_arguments("DistributedOptimizer", horovod_arguments)
    is_horovods = type(optimizer).__module__.startswith("horovod")
    if is_horovods or getattr(optimizer, "dmp_averages", False):
        required = "not be wrapped again: it averages already"
        received = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise unmet("A DistributedOptimizer", required, received, error=TypeError)
    inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
    if inner is not None and optimizer_family(type(optimizer)) != "keras":
        raise TypeError(
            "tf_keras' LossScaleOptimizer must be around the DistributedOptimizer: "
            "`LossScaleOptimizer(DistributedOptimizer(optimizer))`. "
            f"Received: DistributedOptimizer({type(optimizer).__name__}(...))"
        )
    cls = _averaging_class(type(optimizer), inner is not None)  # type: ignore[arg-type]
    ensure_initialized()
    averaging = view(cls, optimizer)
    averaging.__dict__["_dmp_sparse_as_dense"] = sparse_as_dense
    if inner is not None:
        averaging.inner_optimizer = DistributedOptimizer(inner, sparse_as_dense=sparse_as_dense)
    return averaging
