"""A model under a distribution: whole batches in, whole outputs out, on every rank.

    batch [n, ...]  --own samples-->  [n/b, ...] --the model-->  [n/b, ...] --gathered-->  [n, ...]

Every rank gets the same batches, computes the samples of its index along the batch axis, and
receives the outputs for all samples. So everything that Keras does around the model (losses,
metrics, sample weights, batches of another size, `predict`) is the same computation as in one
process, on every rank.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend import distribution_lib as backend_distribution

from sok_like.distribution import regularizers, same_batches, tape
from sok_like.distribution.collectives import gather, own_shard, samples_split, split_batch
from sok_like.distribution.creation import cut_existing
from sok_like.distribution.optimizer import check_variables, distributed_optimizer
from sok_like.distribution.rules import install, sums_repeated_ids
from sok_like.lookup import exporting
from sok_like.runtime import comm, hooks
from sok_like.runtime.attributes import attributes
from sok_like.runtime.keras_version import is_keras_3
from sok_like.runtime.tensor_checks import checked
from sok_like.saving import keras_files

# `inside`: within a model's call; the models inside it get batches that are already split.
_state = threading.local()


def bind(model: Any, distribution: Any) -> None:
    """Puts a model under a distribution permanently."""
    if "_sok_distribution" in vars(model):
        return
    for variable in model.variables if model.built else ():
        cut_existing(variable, distribution)
    own = {name: getattr(model, name) for name in ("call", "save_weights", "save")}
    children, world_size = model._trackable_children, comm.current().world_size
    replaced = {
        "_sok_distribution": distribution,
        "supports_jit": False,  # XLA cannot compile Horovod's collectives
        "call": _splitting(model, own["call"], distribution),
        "save_weights": _by_rank_0(own["save_weights"]),
        "save": _by_rank_0(own["save"]),
    }
    if world_size > 1:
        for step in ("train_step", "test_step"):
            replaced[step] = same_batches.in_step(getattr(model, step), distribution)
        replaced["export"] = functools.partial(_refuse_saved_model, "model.export", model.name)
        replaced["_trackable_children"] = _not_in_saved_model(children, model.name)
    for name, value in replaced.items():  # bypasses Keras' tracking of attributes
        object.__setattr__(model, name, value)


def _refuse_saved_model(what, name, *args, **kwargs):
    raise ValueError(
        f"`{what}` would write a graph with exchanges between ranks, and the shards of one rank; "
        "use `sok.export_saved_model(model, path)`, or save the weights and export a model that "
        f"was made without a distribution. Received: model '{name}'"
    )


def _not_in_saved_model(own_children, name):
    """Wraps `_trackable_children`, which `tf.saved_model.save` and checkpoints call."""

    @functools.wraps(own_children)
    def children(save_type="checkpoint", **kwargs):
        if save_type == "savedmodel":
            _refuse_saved_model("tf.saved_model.save", name)
        return own_children(save_type, **kwargs)

    return children


def binding(distribution: Any) -> contextlib.ExitStack:
    """A scope in which models are bound when they are compiled or first called."""

    def compile(own, self, *args, **kwargs):
        bind(self, distribution)
        own(self, *args, **kwargs)
        if self.optimizer is not None:
            self.optimizer = distributed_optimizer(self.optimizer, distribution)
            check_variables(self.optimizer, self.trainable_variables if self.built else ())

    def call(own, self, *args, **kwargs):
        if not getattr(_state, "inside", False) and "_sok_distribution" not in vars(self):
            bind(self, distribution)
            _adopt_optimizer(self, distribution)
        return own(self, *args, **kwargs)

    cls = tf.keras.Model
    # The class where Keras looks for a `compile` that the program has overridden.
    compiles = next(base for base in cls.__mro__ if "compile" in vars(base))
    why = "models are bound to the distribution"
    wrapped = [(compiles, "compile", compile, why), (cls, "__call__", call, why)]
    stack = regularizers.penalties_of_shards()
    for owner, name, wrapper, why in wrapped:
        stack.callback(hooks.wrap(owner, name, wrapper, why).undo)
    if is_keras_3():
        why = "outputs that the layout map names are whole on every rank"
        hook = hooks.put(
            *(backend_distribution, "distribute_tensor", lambda tensor, layout: tensor, why),
            added=True,  # Keras' TensorFlow backend has none
        )
        stack.callback(hook.undo)
    return stack


def _adopt_optimizer(model, distribution):
    """Replaces the optimizer of a model that was compiled before the distribution was set."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    if getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        raise ValueError(
            f"Model '{model.name}' must be compiled under the distribution in which it trains. "
            "Received: an optimizer that was used without a distribution"
        )
    model.optimizer = distributed_optimizer(optimizer, distribution)


def _splitting(model, own_call, distribution) -> Callable:
    @functools.wraps(own_call)
    def call(*args, **kwargs):
        for layer in list(model._flatten_layers(include_self=False)):
            install(layer, distribution)
        _put_under(model, distribution)
        if getattr(_state, "inside", False):
            return own_call(*args, **kwargs)
        line = distribution.mesh.along(distribution.batch_dim_name)
        split = line.world_size > 1 and distribution.auto_shard_dataset
        real = not _symbolic(args, kwargs) and not exporting.current()
        split = split and real
        if comm.current().world_size == 1 or not real:
            same = contextlib.nullcontext()
        else:
            same = same_batches.compared((args, kwargs), distribution)
        with same:
            return compute(args, kwargs, line, split)

    def compute(args, kwargs, line, split):
        if split:
            args, kwargs = tf.nest.map_structure(_as_tensor, (args, kwargs))
            batch = _batch_of(args, kwargs)
            names = itertools.count()
            args, kwargs = tf.nest.map_structure(
                lambda t: _own_samples(t, line, f"model_input_{next(names)}"), (args, kwargs)
            )
        inside = attributes(_state, {"inside": True})
        with inside, samples_split() if split else contextlib.nullcontext():
            outputs = own_call(*args, **kwargs)
        distribution.check_patterns(model)  # now every model has its variables
        _put_under(model, distribution)
        return _of_all(outputs, batch, model, line) if split else outputs

    return tf.autograph.experimental.do_not_convert(call)


def _put_under(model, distribution):
    tape.put_under(model.variables, distribution)
    for layer in filter(sums_repeated_ids, model._flatten_layers()):
        tape.put_under(layer.variables, distribution, distinct=True)


def _batch_of(args, kwargs):
    """The number of samples in inputs of any kind, a scalar tensor."""
    for value in tf.nest.flatten((args, kwargs)):
        if isinstance(value, tf.SparseTensor):
            return value.dense_shape[0]
        if isinstance(value, tf.RaggedTensor):
            return value.nrows(tf.int64)
        if tf.is_tensor(value) and value.shape.rank != 0:
            return tf.shape(value, tf.int64)[0]
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


def _as_tensor(value):
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _own_samples(value, line, name):
    if not tf.is_tensor(value) or value.shape.rank == 0:
        return value
    if isinstance(value, (tf.Tensor, tf.Variable)) and value.dtype.is_floating:
        # Its gradient must be that of all samples, as it may be another model's output.
        return own_shard(tf.convert_to_tensor(value), 0, line, name, scale=line.world_size)
    return split_batch(value, line.world_size, line.rank)


def _symbolic(args, kwargs):
    leaves = tf.nest.flatten((args, kwargs))
    return any(type(leaf).__name__.endswith("KerasTensor") for leaf in leaves)  # of either Keras


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
