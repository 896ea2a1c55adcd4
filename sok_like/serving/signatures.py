"""Which functions of a model are exported, by name, and their inputs.

A ragged or sparse value becomes its parts, and an output without a name is named by its position:

    {"user": ragged, "item": dense}   ->   user_values, user_row_splits, item
    [rows, rows]                      ->   output_0, output_1

A value that is ragged in more than one dimension has `x_row_splits`, `x_row_splits_1`, and so on,
from the outermost dimension to the innermost.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.framework.graphs import checked

DEFAULT = "serving_default"

_RAGGED = (tf.RaggedTensor, tf.RaggedTensorSpec)
_SPARSE = (tf.SparseTensor, tf.SparseTensorSpec)
_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
_FUNCTIONS = (tf.types.experimental.PolymorphicFunction, tf.types.experimental.ConcreteFunction)


class Signature(NamedTuple):
    """A function of a model."""

    call: Callable  # takes `arguments` and returns any structure of tensors
    arguments: list[Any]  # each a structure of specs
    names: list[str] | None = None  # of inputs that the structure does not name, in its order


def find(model: Any, signatures: Any) -> dict[str, Signature]:
    """The functions to export, by name."""
    if isinstance(signatures, Mapping) and any(
        isinstance(value, _FUNCTIONS) for value in signatures.values()
    ):
        return {name: _of_function(name, value) for name, value in signatures.items()}
    functions: dict[str, Signature] = {}
    if signatures is not None:
        structure = tf.nest.map_structure(_as_spec, signatures)
        if all(isinstance(spec, _SPECS) for spec in tf.nest.flatten(structure)):
            functions[DEFAULT] = Signature(_inference(model), [structure])
    elif isinstance(model, tf.keras.Model):
        structure, names = _of_keras(model)
        if structure is not None:
            functions[DEFAULT] = Signature(_inference(model), [structure], names)
    else:
        for name in dir(type(model)):
            is_function = isinstance(getattr(type(model), name, None), _FUNCTIONS[0])
            function = getattr(model, name) if is_function else None
            if function is not None and function.input_signature is not None:
                functions[DEFAULT if name == "__call__" else name] = _of_function(name, function)
    if not functions:
        raise _not_known(model, signatures)
    return functions


def _not_known(model, signatures=None):
    name = getattr(model, "name", None)
    what = f"{type(model).__name__} '{name}'" if name else type(model).__name__
    return ValueError(
        f"`signatures` must say what {what} takes: a tf.TensorSpec, tf.RaggedTensorSpec or "
        "tf.SparseTensorSpec for each input in the structure that it is called with, such as "
        "signatures={'user': tf.TensorSpec([None], tf.string)}; or a dictionary from names of "
        "signatures to tf.functions with an `input_signature`. Received: "
        f"signatures={signatures!r}"
    )


def flat_function(signature: Signature) -> tuple[Callable, list[tf.TensorSpec]]:
    """A function of tensors by name, and their specs."""
    specs: list[tf.TensorSpec] = []
    inputs = []
    for number, (path, spec) in enumerate(_leaves(signature.arguments)):
        name = getattr(spec, "name", None) or _of_path(path)
        names = _part_names(signature.names[number] if signature.names else name, spec)
        parts = tf.nest.flatten(spec, expand_composites=True)
        inputs.append((names, spec))
        specs += [
            tf.TensorSpec(part.shape, part.dtype, name)
            for name, part in zip(names, parts, strict=True)
        ]
    _check_different("Inputs", [spec.name for spec in specs])

    def call(**tensors):
        values = [_whole(spec, [tensors[name] for name in names]) for names, spec in inputs]
        arguments = tf.nest.pack_sequence_as(signature.arguments, values)
        return _outputs(signature.call(*arguments))

    return call, specs


def _of_function(name, function):
    if not isinstance(function, _FUNCTIONS[0]) or function.input_signature is None:
        required = "be a tf.function with an `input_signature`"
        raise unmet(f"Signature '{name}'", required, f"{function!r}")
    arguments = list(function.input_signature)
    if isinstance(function.input_signature, Mapping):
        required, received = "be a list", f"{function.input_signature!r}"
        raise unmet(f"The `input_signature` of signature '{name}'", required, received)
    names = list(function.function_spec.arg_names)[: len(arguments)]
    if len(names) < len(arguments) or not all(isinstance(item, _SPECS) for item in arguments):
        return Signature(function, arguments)
    named = zip(arguments, names, strict=True)
    return Signature(function, arguments, [getattr(s, "name", None) or name for s, name in named])


def _of_keras(model):
    """Structure of specs, and names, of a Keras model's inputs; None if they are not known."""
    inputs = getattr(model, "inputs", None)
    if inputs:
        structure = inputs[0] if len(inputs) == 1 else list(inputs)  # of a Sequential model
        for attribute in ("_inputs_struct", "_nested_inputs"):  # of Keras 3 and of tf_keras
            if getattr(model, attribute, None) is not None:
                structure = getattr(model, attribute)
        leaves = tf.nest.flatten(structure)
        names = [re.sub(r":\d+$", "", leaf.name) for leaf in leaves]
        return tf.nest.map_structure(_as_spec, structure), names
    if hasattr(model, "save_spec") and model.save_spec() is not None:  # tf_keras, after a call
        arguments, _ = model.save_spec()
        return (arguments[0] if arguments else None), None
    return None, None


def _inference(model):
    if isinstance(model, tf.keras.layers.Layer):
        return lambda *arguments: model(*arguments, training=False)
    if not callable(model):
        raise _not_known(model)
    return model


def _as_spec(value):
    """The spec of a KerasTensor, tensor or spec, with a variable batch."""
    if isinstance(value, _SPECS) or not hasattr(value, "shape"):
        return value
    shape, dtype = [None, *tuple(value.shape)[1:]], tf.as_dtype(value.dtype)
    inner = getattr(value, "type_spec", value)  # of a KerasTensor of tf_keras
    if isinstance(inner, _RAGGED) or getattr(value, "ragged", False):
        rank = getattr(inner, "ragged_rank", None) or 1  # Keras 3.15 has it, and None by default
        return tf.RaggedTensorSpec(shape, dtype, rank)
    if isinstance(inner, _SPARSE) or getattr(value, "sparse", False):
        return tf.SparseTensorSpec(shape, dtype)
    return tf.TensorSpec(shape, dtype)


def _part_names(name, value):
    """The names of the tensors that a value consists of, or that its spec describes."""
    if isinstance(value, _SPARSE):
        return [f"{name}_indices", f"{name}_values", f"{name}_dense_shape"]
    if isinstance(value, _RAGGED) and value.ragged_rank:
        inner = [f"{name}_row_splits_{number}" for number in range(1, value.ragged_rank)]
        return [f"{name}_values", f"{name}_row_splits", *inner]
    return [name]


def _check_different(what, names):
    if len(set(names)) < len(names):
        raise ValueError(f"{what} of a signature must have different names. Received: {names}")


def _whole(spec, tensors):
    """The value of the tensors that a client sends; they are checked when the server runs."""
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank:
        ragged = tf.RaggedTensor.from_nested_row_splits(tensors[0], tensors[1:], validate=True)
        tensors = tf.nest.flatten(ragged, expand_composites=True)
    if isinstance(spec, tf.SparseTensorSpec) and spec.shape.rank is not None:
        text = f"`{tensors[2].op.name}` must fit {spec.shape}. Received:"
        sizes = tf.constant([-1 if size is None else size for size in spec.shape], tf.int64)
        fits = tf.reduce_all((sizes == -1) | (sizes == tensors[2]))
        tensors[2] = checked(tensors[2], fits, text, tensors[2])
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)


def _outputs(structure):
    """The outputs as tensors by name."""
    names, tensors = [], []
    for number, (path, value) in enumerate(_leaves(structure)):
        name = _of_path(path) if isinstance(structure, Mapping) else f"output_{number}"
        parts = _part_names(name, value)
        is_dense = len(parts) == 1
        names += parts
        tensors += [value] if is_dense else tf.nest.flatten(value, expand_composites=True)
    _check_different("Outputs", names)
    return dict(zip(names, map(tf.convert_to_tensor, tensors), strict=True))


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
