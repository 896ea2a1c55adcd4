"""Moving statistics of batch normalization, averaged over ranks together with the gradients.

    BatchNormalization.call in training   moves its statistics towards those of the rank's own batch
    the step's gradients are averaged     and so are, in the same message, the layer's statistics

Statistics move by a linear rule, so their mean over ranks moves towards the mean over ranks. All
ranks predict with the same statistics, and a file has those of all samples.

A step is known by the variables that it trains, because a `tf.function` within it calls no layer
again. A layer that has none, without scale and center, belongs to the step that follows its call.
"""

import inspect
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import replicas
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.comm import Communicator

# By `id`; those with variables of their own to train, which have run in training.
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# `layers`: those without, which this thread has run since gradients were averaged.
_called = threading.local()


def average(
    gradients: Sequence[Any], variables: Sequence[Any], communicator: Communicator, name: str
) -> list:
    """`Communicator.average`, also of the statistics of layers in the step of these variables."""
    place = {id(as_tf_table(variable)): i for i, variable in enumerate(variables, 1)}
    in_step = {}
    for layer in list(_layers.values()):
        if trained := [i for v in layer.trainable_weights if (i := place.get(id(as_tf_table(v))))]:
            in_step[min(trained)] = layer
    layers = [in_step[i] for i in sorted(in_step)] + list(vars(_called).pop("layers", {}).values())
    moved = [as_tf_table(weight) for layer in layers for weight in layer.non_trainable_weights]
    values = [tf.identity(variable) for variable in moved]
    means = exchange_order.collective_in_turn(communicator, "average", [*gradients, *values], name)
    for variable, mean in zip(moved, means[len(gradients) :], strict=True):
        variable.assign(mean)
    return means[: len(gradients)]


def have_moved() -> bool:
    """Whether statistics have moved of layers that no gradient is known by."""
    return bool(vars(_called))


def _call(own, self, inputs, *args, **kwargs):
    arguments = inspect.signature(own).bind(self, inputs, *args, **kwargs).arguments
    training = arguments.get("training")
    in_training = self.trainable and (tf.is_tensor(training) or bool(training))
    # In a `tf.compat.v1` graph the program runs the updates; a distribution has rules of its own.
    is_in_v1_graph = not (tf.executing_eagerly() or tf.inside_function())
    is_ours = in_training and not is_in_v1_graph and not hasattr(self, "_sok_distribution")
    if is_ours and comm.current_or_single().world_size > 1:
        if getattr(self, "synchronized", False):
            raise NotImplementedError(
                "Statistics of the whole batch need `sok.distribution.DataParallel`. Elsewhere a "
                "rank normalizes by its own batch, and moving statistics are averaged over ranks. "
                f"Received: synchronized=True on layer '{self.name}'"
            )
        object.__setattr__(self, replicas.AVERAGED, True)  # bypasses Keras' tracking of attributes
        if self.trainable_weights:
            _layers[id(self)] = self
        else:
            vars(_called).setdefault("layers", {})[id(self)] = self
    return own(self, inputs, *args, **kwargs)


@hooks.behind(hooks.RANKS)
def _install():
    lineage = tf.keras.layers.BatchNormalization.__mro__
    owner = next(cls for cls in lineage if "call" in vars(cls))
    why = "moving statistics are averaged over ranks with the step's gradients"
    hooks.wrap(owner, "call", _call, why)
