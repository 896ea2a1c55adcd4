"""Which functions of a model are exported, by name, and their inputs.

A SavedModel's signatures take and return tensors by name. So a ragged or sparse value becomes its
parts, and an output without a name is named by its position in the model's structure:

    {"user": ragged, "item": dense}   ->   user_values, user_row_splits, item
    [rows, rows]                      ->   output_0, output_1
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

DEFAULT = "serving_default"

_WANTED = (
    "`signatures` must say what {what} takes: a tf.TensorSpec, tf.RaggedTensorSpec or "
    "tf.SparseTensorSpec for each input in the structure that it is called with, such as "
    "signatures={{'user': tf.TensorSpec([None], tf.string)}}; or a dictionary from names of "
    "signatures to tf.functions with an `input_signature`. Received: signatures={received!r}"
)
_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


class Signature(NamedTuple):
    """A function of a model.

    Attributes:
        call: Takes `arguments` and returns any structure of tensors.
        arguments: A list, each item a structure of specs.
        names: Names of inputs that the structure does not name, in its order; or None.
    """

    call: Callable
    arguments: list[Any]
    names: list[str] | None = None


def find(model: Any, signatures: Any) -> dict[str, Signature]:
    """The functions to export, by name.

    Raises:
        ValueError: `signatures` is of another kind, or is missing but needed.
    """
    if signatures is not None and not _is_by_name(signatures):
        structure = tf.nest.map_structure(_as_spec, signatures)
        if not all(isinstance(spec, _SPECS) for spec in tf.nest.flatten(structure)):
            raise ValueError(_WANTED.format(what=_name(model), received=signatures))
        return {DEFAULT: Signature(_inference(model), [structure])}
    if signatures is not None:
        return {name: _of_function(name, value) for name, value in signatures.items()}
    if isinstance(model, tf.keras.Model):
        structure, names = _of_keras(model)
        if structure is not None:
            return {DEFAULT: Signature(_inference(model), [structure], names)}
    else:
        found = {}
        for name in dir(type(model)):
            value = getattr(model, name) if _is_function(getattr(type(model), name, None)) else None
            if value is not None and value.input_signature is not None:
                found[DEFAULT if name == "__call__" else name] = _of_function(name, value)
        if found:
            return found
    raise ValueError(_WANTED.format(what=_name(model), received=None))


def flat_function(signature: Signature) -> tuple[Callable, list[tf.TensorSpec]]:
    """A function of tensors by name, and their specs."""
    leaves = _leaves(signature.arguments)
    specs: list[tf.TensorSpec] = []
    parts = []
    for number, (path, spec) in enumerate(leaves):
        name = signature.names[number] if signature.names else spec.name or _of_path(path)
        flat = _parts(name, spec)
        parts.append((spec, len(flat)))
        specs += flat
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"Inputs of a signature must have different names. Received: {names}")

    def call(**tensors):
        values = iter([tensors[name] for name in names])
        inputs = [_whole(spec, [next(values) for _ in range(n)]) for spec, n in parts]
        arguments = tf.nest.pack_sequence_as(signature.arguments, inputs)
        return _outputs(signature.call(*arguments))

    return call, specs


def _is_function(value):
    return isinstance(value, tf.types.experimental.PolymorphicFunction)


def _is_by_name(signatures):
    if not isinstance(signatures, Mapping):
        return False
    return any(
        _is_function(value) or isinstance(value, tf.types.experimental.ConcreteFunction)
        for value in signatures.values()
    )


def _of_function(name, function):
    if not _is_function(function) or function.input_signature is None:
        raise ValueError(
            f"Signature '{name}' must be a tf.function with an `input_signature`. "
            f"Received: {function!r}"
        )
    arguments = list(function.input_signature)
    if isinstance(function.input_signature, Mapping):
        raise ValueError(
            f"The `input_signature` of signature '{name}' must be a list. "
            f"Received: {function.input_signature!r}"
        )
    names = list(function.function_spec.arg_names)[-len(arguments) :] if arguments else []
    if all(isinstance(item, _SPECS) for item in arguments) and len(names) == len(arguments):
        given = [spec.name if getattr(spec, "name", None) else name
                 for spec, name in zip(arguments, names, strict=True)]  # fmt: skip
        return Signature(function, arguments, given)
    return Signature(function, arguments)


def _of_keras(model):
    """Structure of specs, and names, of a Keras model's inputs; None if they are not known."""
    inputs = getattr(model, "inputs", None)
    if inputs:
        structure = getattr(model, "_inputs_struct", None)
        if structure is None:
            structure = getattr(model, "_nested_inputs", None)
        if structure is None:  # a Sequential model
            structure = inputs[0] if len(inputs) == 1 else list(inputs)
        leaves = tf.nest.flatten(structure)
        names = [re.sub(r":\d+$", "", leaf.name) for leaf in leaves]
        return tf.nest.map_structure(_as_spec, structure), names
    if hasattr(model, "save_spec") and model.save_spec() is not None:  # tf_keras, after a call
        arguments, _ = model.save_spec()
        return (arguments[0] if arguments else None), None
    return None, None


def _inference(model):
    if not isinstance(model, tf.keras.Model | tf.keras.layers.Layer):
        if not callable(model):
            raise ValueError(_WANTED.format(what=_name(model), received=None))
        return model
    return lambda *arguments: model(*arguments, training=False)


def _as_spec(value):
    """The spec of a KerasTensor, tensor or spec, with a variable batch."""
    if isinstance(value, _SPECS) or not hasattr(value, "shape"):
        return value
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, *value.shape[1:]], value.dtype, value.ragged_rank)
    shape = [None, *tuple(value.shape)[1:]]
    inner = getattr(value, "type_spec", None)  # of a KerasTensor of tf_keras
    if isinstance(inner, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, inner.dtype, inner.ragged_rank)
    if isinstance(value, tf.SparseTensor) or getattr(value, "sparse", False) or isinstance(
        inner, tf.SparseTensorSpec
    ):  # fmt: skip
        return tf.SparseTensorSpec(shape, tf.as_dtype(value.dtype))
    if getattr(value, "ragged", False):
        return tf.RaggedTensorSpec(shape, tf.as_dtype(value.dtype), 1)
    return tf.TensorSpec(shape, tf.as_dtype(value.dtype))


def _parts(name, spec):
    """The specs of the tensors that a value consists of."""
    if isinstance(spec, tf.RaggedTensorSpec):
        if spec.ragged_rank != 1:
            raise ValueError(
                f"Input '{name}' must be dense, sparse or ragged in one dimension. Received: {spec}"
            )
        values = [None, *(spec.shape[2:] if spec.shape.rank else [])]
        return [
            tf.TensorSpec(values, spec.dtype, f"{name}_values"),
            tf.TensorSpec([None], spec.row_splits_dtype, f"{name}_row_splits"),
        ]
    if isinstance(spec, tf.SparseTensorSpec):
        rank = spec.shape.rank
        return [
            tf.TensorSpec([None, rank], tf.int64, f"{name}_indices"),
            tf.TensorSpec([None], spec.dtype, f"{name}_values"),
            tf.TensorSpec([rank], tf.int64, f"{name}_dense_shape"),
        ]
    return [tf.TensorSpec(spec.shape, spec.dtype, name)]


def _whole(spec, tensors):
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_row_splits(*tensors)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.ensure_shape(tf.SparseTensor(*tensors), spec.shape)
    return tensors[0]


def _outputs(structure):
    """The outputs as tensors by name."""
    leaves = _leaves(structure)
    named = isinstance(structure, Mapping)
    found = {}
    for number, (path, value) in enumerate(leaves):
        name = _of_path(path) if named else f"output_{number}"
        if isinstance(value, tf.RaggedTensor):
            found[f"{name}_values"] = value.flat_values
            found[f"{name}_row_splits"] = value.row_splits
        elif isinstance(value, tf.SparseTensor):
            found[f"{name}_indices"], found[f"{name}_values"] = value.indices, value.values
            found[f"{name}_dense_shape"] = value.dense_shape
        else:
            found[name] = tf.convert_to_tensor(value)
    return found


def _leaves(structure, path=()):
    """Paths and leaves of a structure, in the order of `tf.nest.flatten`."""
    if isinstance(structure, Mapping):
        items = [(key, structure[key]) for key in sorted(structure)]
    elif isinstance(structure, (list, tuple)):
        items = list(enumerate(structure))
    else:
        return [(path, structure)]
    return [leaf for key, value in items for leaf in _leaves(value, (*path, str(key)))]


def _of_path(path):
    """The name of a path: ("0", "user") -> "user", ("0", "1") -> "args_1"."""
    steps = path[1:] if len(path) > 1 and path[0].isdigit() else path
    text = re.sub(r"\W", "_", "_".join(steps))
    return f"args_{text}" if text[:1].isdigit() else text


def _name(model):
    name = getattr(model, "name", None)
    return f"{type(model).__name__} '{name}'" if name else type(model).__name__
