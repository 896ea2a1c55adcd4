"""A model under a distribution: whole batches in, whole outputs out, on every rank.

    batch [n, ...]  --own samples-->  [n/b, ...] --the model-->  [n/b, ...] --gathered-->  [n, ...]

Every rank gets the same batches, computes the samples of its index along the batch axis, and
receives the outputs for all samples. So everything that Keras does around the model (losses,
metrics, sample weights, batches of another size, `predict`) is the same computation as in one
process, on every rank.

Digests of the batches are compared over the ranks that must get the same batch:

    step's data --digests--.
                            >-- one exchange --> equal on all ranks, or all of them raise
    model's inputs --digests-'

Other programs on ranks give each rank data of its own. Under a distribution this would train
on outputs and labels that do not belong together, or let the ranks' replicated weights drift apart,
and nothing else would detect it.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend import distribution_lib as backend_distribution

from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.distribution.collectives import gather, own_shard, split_batch, summed
from sok_like.distribution.optimizer import check_variables, distributed_optimizer
from sok_like.distribution.rules import install, of_call
from sok_like.distribution.sharded_variable import (
    cut_existing,
    path_of,
    raise_for_saved_model,
    shard_of,
)
from sok_like.lookup import exporting, replicas
from sok_like.lookup.ids import num_samples
from sok_like.planner.tables import ADDITIVE
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.saving.containers import keras_files
from sok_like.table.variable import is_embedding_variable

_of_step = threading.local()  # `data`: of the step that has begun, until it is compared
# Of digests, relative to the norm: far above rounding differences of processors, far below those of
# batches.
_TOLERANCE = 1e-3


def bind(model: Any, distribution: Any) -> None:
    """Puts a model under a distribution permanently."""
    if "_sok_distribution" in vars(model):
        return
    for variable in model.variables if model.built else ():
        cut_existing(variable, distribution)
    own_children, received = model._trackable_children, f"model '{model.name}'"
    why = "would write a graph with exchanges between ranks, and the shards of one rank"

    @functools.wraps(own_children)
    def children(save_type="checkpoint", **kwargs):  # for `tf.saved_model.save` and checkpoints
        if save_type == "savedmodel":
            raise_for_saved_model(f"`tf.saved_model.save` {why}", received)
        return own_children(save_type, **kwargs)

    replaced = {
        "_sok_distribution": distribution,
        "supports_jit": False,  # XLA cannot compile collectives of ranks
        "call": _splitting(model, model.call, distribution),
        "save_weights": _by_rank_0(model.save_weights),
        "save": _by_rank_0(model.save),
    }
    if comm.current().world_size > 1:
        for step in ("train_step", "test_step"):
            replaced[step] = _comparing(model, getattr(model, step), distribution)
        replaced["export"] = functools.partial(
            raise_for_saved_model, f"`model.export` {why}", received
        )
        replaced["_trackable_children"] = children
    model.__dict__.update(replaced)  # bypasses Keras' tracking of attributes


def bind_models(distribution: Any, scope: contextlib.ExitStack) -> None:
    """Lets models be bound when they are compiled or first called, until the scope ends."""
    # L1 and L2 penalties are summed over ranks part by part. Others gather whole values.

    def compile(own, self, *args, **kwargs):
        bind(self, distribution)
        own(self, *args, **kwargs)
        if self.optimizer is not None:
            self.optimizer = distributed_optimizer(self.optimizer, distribution)
            check_variables(self.optimizer, self.trainable_variables if self.built else ())

    def call(own, self, *args, **kwargs):
        if not getattr(of_call, "inside", False) and "_sok_distribution" not in vars(self):
            bind(self, distribution)
            optimizer = getattr(self, "optimizer", None)
            if optimizer is not None:  # compiled before the distribution was set
                if getattr(optimizer, "built", getattr(optimizer, "_built", False)):
                    raise ValueError(
                        f"Model '{self.name}' must be compiled under the distribution in which it "
                        "trains. Received: an optimizer that was used without a distribution"
                    )
                self.optimizer = distributed_optimizer(optimizer, distribution)
        return own(self, *args, **kwargs)

    def penalty(own, self, x):
        shard = shard_of(x)
        if shard is None:
            return own(self, x)
        total = tf.convert_to_tensor(own(self, x.local))
        for axis in shard.axes:
            total = summed(total, shard.mesh.along(axis), f"{path_of(x)}_penalty_{axis}")
        return tf.ensure_shape(total, [])

    cls = tf.keras.Model
    # The class where Keras looks for a `compile` that the program has overridden.
    compiles = next(base for base in cls.__mro__ if "compile" in vars(base))
    why = "models are bound to the distribution"
    put_in = [hooks.wrap(compiles, "compile", compile, why), hooks.wrap(cls, "__call__", call, why)]
    why = "penalties of sharded variables are sums over ranks"
    penalties = (getattr(tf.keras.regularizers, name) for name in ADDITIVE)
    put_in += [hooks.wrap(regularizer, "__call__", penalty, why) for regularizer in penalties]
    if is_keras_3():  # whose TensorFlow backend has no such function
        why = "outputs that the layout map names are whole on every rank"
        name, unchanged = "distribute_tensor", lambda tensor, layout: tensor
        put_in.append(hooks.put(backend_distribution, name, unchanged, why, added=True))
    for hook in put_in:
        scope.callback(hook.undo)


def _splitting(model, own_call, distribution) -> Callable:
    @functools.wraps(own_call)
    def call(*args, **kwargs):
        for layer in list(model._flatten_layers(include_self=False)):
            install(layer, distribution)
        _put_under(model, distribution)
        if getattr(of_call, "inside", False):
            return own_call(*args, **kwargs)
        kinds = [type(leaf).__name__ for leaf in tf.nest.flatten((args, kwargs))]
        is_symbolic = any(kind.endswith("KerasTensor") for kind in kinds)  # of either Keras
        is_real = not is_symbolic and not exporting.current()
        line = distribution.mesh.along(distribution.batch_dim_name)
        split = is_real and line.world_size > 1 and distribution.auto_shard_dataset
        with _compared((args, kwargs), distribution) if is_real else contextlib.nullcontext():
            if split:
                args, kwargs = tf.nest.map_structure(
                    lambda v: tf.convert_to_tensor(v) if isinstance(v, np.ndarray) else v,
                    (args, kwargs),
                )
                batch, names = _batch_of(args, kwargs), itertools.count()
                args, kwargs = tf.nest.map_structure(
                    lambda t: _own_samples(t, line, f"model_input_{next(names)}"), (args, kwargs)
                )
            with attributes(of_call, {"inside": True, "split": split}):
                outputs = own_call(*args, **kwargs)
            distribution.check_patterns(model)  # now every model has its variables
            _put_under(model, distribution)
            return _of_all(outputs, batch, model, line) if split else outputs

    return tf.autograph.experimental.do_not_convert(call)


def _put_under(model, distribution):
    """Stores the distribution of variables, and that gradients of an Embedding have rows once."""
    tables = [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]
    distinct = {id(variable) for layer in tables for variable in layer.variables}
    for variable in model.variables:
        for face in (variable, getattr(variable, "_value", None)):
            if face is not None and not is_embedding_variable(face):
                object.__setattr__(face, "_sok_distribution", distribution)
                if id(variable) in distinct:
                    object.__setattr__(face, "_sok_distinct", True)


def _batch_of(args, kwargs):
    """The number of samples in inputs of any kind, a scalar tensor."""
    for value in tf.nest.flatten((args, kwargs)):
        if tf.is_tensor(value) and value.shape.rank != 0:
            return num_samples(value)
    raise ValueError("A model under a distribution must be called with a tensor of samples.")


def _of_all(outputs, batch, model, line):
    """Gathers the outputs for this rank's samples, any structure of tensors, from all ranks."""
    names = itertools.count()

    def gathered(tensor):
        if not isinstance(tensor, tf.Tensor) or tensor.shape.rank == 0:
            raise NotImplementedError(
                "Outputs of a model whose batches are split must be dense tensors [batch, ...]. "
                f"Received: {tensor!r} from model '{model.name}'"
            )
        whole = gather(tensor, 0, line, f"model_output_{next(names)}", gradient=line.world_size)
        rows = tf.shape(whole, tf.int64)[0]
        text = (
            f"Model '{model.name}' must output one row per sample. Received: output rows over all "
            "ranks, and samples:"
        )
        return checked(whole, tf.equal(rows, batch), text, rows, batch)

    return tf.nest.map_structure(gathered, outputs)


def _own_samples(value, line, name):
    if not tf.is_tensor(value) or value.shape.rank == 0:
        return value
    if isinstance(value, (tf.Tensor, tf.Variable)) and value.dtype.is_floating:
        # Its gradient must be that of all samples, as it may be another model's output.
        return own_shard(tf.convert_to_tensor(value), 0, line, name, scale=line.world_size)
    return split_batch(value, line.world_size, line.rank)


def _comparing(model, own_step, distribution):
    """Wraps `train_step` or `test_step`, so that labels and sample weights are compared, too."""

    @functools.wraps(own_step)
    def step(data, *args, **kwargs):
        values = data if isinstance(data, tuple) and len(data) <= 3 else (data,)
        named = list(itertools.zip_longest(("x", "y", "sample_weight"), values))
        # A layer may have assigned what it took from this rank's samples.
        compared = replicas.compare_at_times([], model, comm.current())
        with attributes(_of_step, {"data": named}), tf.control_dependencies(compared):
            result = own_step(data, *args, **kwargs)
            if _of_step.data is not None:  # the step has called no model under a distribution
                with _compared([], distribution):
                    pass
            return result

    return step


@contextlib.contextmanager
def _compared(inputs, distribution) -> Iterator[None]:
    """A scope whose ops run only if all ranks have the same `inputs` and data of the step."""
    # Without `auto_shard_dataset`, data may differ along the batch axis. Integers and texts are
    # compared by a hash. Floats may come from another processor: by sum and norm, with a tolerance.
    if comm.current().world_size == 1:
        yield
        return
    structures = [("inputs", inputs), *(getattr(_of_step, "data", None) or [])]
    _of_step.data = None
    names: list[str] = []
    batches: list[tf.Tensor] = []
    for name, structure in structures:
        flat = tf.nest.flatten(structure, expand_composites=True)
        tensors = [value for value in flat if tf.is_tensor(value) or hasattr(value, "__array__")]
        no_data = (tf.resource, tf.variant)
        tensors = [t for t in tensors if getattr(t, "dtype", None) not in no_data]
        names += [name if len(tensors) == 1 else f"{name}[{i}]" for i in range(len(tensors))]
        batches += map(tf.convert_to_tensor, tensors)
    ops = libraries.ops()
    shard = 0 if distribution.auto_shard_dataset else distribution.data_shard_id
    with tf.device("CPU:0"):  # the ops' device
        own = ops.sok_digest_batch(tensors=batches, shard=shard)
        name = "distribution_batch"
        digests, lengths = exchange_order.exchange_notes(own, comm.current(), name)
        same = ops.sok_compare_batches(
            digests=digests,
            lengths=lengths,
            names=names,
            floats=[t.dtype.is_floating for t in batches],
            tolerance=_TOLERANCE,
        )
    with tf.control_dependencies([same]):
        yield


def _by_rank_0(save) -> Callable:
    """Wraps `save`: only rank 0 writes; other ranks take part in gathering the values."""

    @functools.wraps(save)
    def run(filepath, *args, **kwargs):
        path = str(filepath)
        # Keras 3's kind of files and TensorFlow's checkpoints do the same at a lower level.
        if path.endswith((".keras", ".weights.h5")) or (
            save.__name__ == "save_weights" and not path.endswith((".h5", ".hdf5"))
        ):
            return save(filepath, *args, **kwargs)
        return keras_files.save_together(
            f"model.{save.__name__}", filepath, lambda place: save(place, *args, **kwargs)
        )

    return run
