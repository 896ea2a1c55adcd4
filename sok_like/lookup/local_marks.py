"""Marks variables of which each rank has its own part, and their gradients, for `norms`.

    mark_local(variable) --tape--> gradient of this rank's part, marked --> norms over all ranks

Only a program with such variables, or on several ranks, imports this module. In others
`tf.GradientTape` and Keras' optimizers stay as they are: gradients of hash tables need no mark.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup.local_variables import faces, has_norm, is_local
from sok_like.lookup.norms import PART, SHAPE_OF_PART, has_parts
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3, keras_optimizers


def mark_local(variable: Any, has_norm: bool = True) -> Any:
    """Marks a variable as this rank's own with `de_local = True`; returns it.

    `has_norm` tells whether it holds rows of one table, of which each rank has others.
    """
    for face in faces(variable):
        try:
            face.de_local, face._sok_has_norm = True, has_norm
        except AttributeError:  # a symbolic handle takes no attributes
            pass
    return variable


def marked(gradient: Any, variable: Any) -> Any:
    """The gradient of a variable, marked as a part if each rank has its own one of the variable."""
    if not is_local(variable):
        return gradient
    return marked_part(gradient, "" if has_norm(variable) else variable.name)


def marked_part(gradient: Any, without_norm: str = "") -> Any:
    """Marks the gradient of a variable of which each rank has its own part; None stays None.

    Slices are marked by the dtype of their dense shape, which survives the end of a function;
    TensorFlow uses int32. On tensors the mark lasts within the function only.

    Args:
        without_norm: The variable's name if it is not some rows of one table. Then
            `tf.clip_by_norm` raises within the function.
    """
    if isinstance(gradient, tf.IndexedSlices):
        shape = gradient.dense_shape
        if shape is not None:
            shape = tf.cast(shape, SHAPE_OF_PART)
            setattr(shape, PART, without_norm)
        return tf.IndexedSlices(gradient.values, gradient.indices, shape)
    if isinstance(gradient, tf.Tensor):
        gradient = tf.identity(gradient)  # another variable may have the same tensor
        setattr(gradient, PART, without_norm)
    return gradient


def _gradient(own, self, target, sources, *args, **kwargs):
    gradients = own(self, target, sources, *args, **kwargs)
    parts = map(marked, tf.nest.flatten(gradients), tf.nest.flatten(sources))
    return tf.nest.pack_sequence_as(gradients, list(parts))


def _apply_pairs(own, self, grads_and_vars, *args, **kwargs):
    """The step of an optimizer of tf_keras, which may have got new tensors since the tape."""
    return own(self, [(marked(g, v), v) for g, v in grads_and_vars], *args, **kwargs)


def _apply(own, self, grads, trainable_variables):
    """The step of an optimizer of Keras 3, which also makes tensors while it accumulates."""
    self.__dict__["_sok_applied"] = trainable_variables
    return own(self, grads, trainable_variables)


def _clip_gradients(own, self, grads):
    """As in tf_keras; Keras 3 computes norms by functions of its own."""
    if variables := self.__dict__.pop("_sok_applied", None):
        grads = list(map(marked, grads, variables))
    if not has_parts(grads):
        return own(self, grads)
    if self.clipnorm:
        return [tf.clip_by_norm(gradient, self.clipnorm) for gradient in grads]
    if self.global_clipnorm:
        return tf.clip_by_global_norm(grads, self.global_clipnorm)[0]
    if self.clipvalue:
        return [tf.clip_by_value(g, -self.clipvalue, self.clipvalue) for g in grads]
    return grads


@hooks.at_init
def _install():
    why = "gradients of variables of which each rank has a part are marked"
    hooks.wrap(tf.GradientTape, "gradient", _gradient, why)
    if is_keras_3():
        stock = keras_optimizers().Optimizer
        hooks.wrap(stock, "_backend_apply_gradients", _apply, why)
        why = "optimizers clip gradients of tables by norms over all ranks"
        hooks.wrap(stock, "_clip_gradients", _clip_gradients, why)
        return
    hooks.wrap(keras_optimizers().Optimizer.__base__, "apply_gradients", _apply_pairs, why)
    hooks.wrap(keras_optimizers().legacy.Optimizer, "_transform_gradients", _apply_pairs, why)
