"""The gradients of the op library's ops.

The gradient of a table handle is `tf.IndexedSlices(gradients, keys)`: its indices are keys, not
positions, and may be any 64-bit integer.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from sok_like.runtime.framework import graphs
from sok_like.runtime.native import devices, libraries
from sok_like.runtime.ranks import comm, lookup_options


def _slices(grads, keys, *, unique=False):
    if unique:
        setattr(keys, comm.UNIQUE, True)
    # Keys are not positions: a dense gradient would fill the memory with zeros. Without a dense
    # shape, the conversion to one raises.
    return tf.IndexedSlices(grads, keys)


def _no_dense_gradient(slices, dtype=None, name=None, as_ref=False):
    del dtype, name, as_ref
    if slices.dense_shape is not None:
        return NotImplemented
    # Not a ValueError or TypeError: TensorFlow would replace their text.
    raise NotImplementedError(
        "The gradient of a table has no dense form: its indices are keys. To change it, use "
        "`tf.IndexedSlices(change(gradient.values), gradient.indices)`. In a loop of a tf.function "
        "(also tf.map_fn, tf.scan, tf.vectorized_map) TensorFlow adds gradients up in dense form: "
        f"look all keys up before the loop. Received: a conversion of {slices} to a tensor"
    )


# Tried before TensorFlow's own conversion, which has priority 100.
tf.register_tensor_conversion_function(tf.IndexedSlices, _no_dense_gradient, priority=90)


@tf.RegisterGradient("SokLookup")
def _lookup_grad(op, *grads):
    n = op.get_attr("N")
    dims, combiners = op.get_attr("dims"), op.get_attr("combiners")
    inputs, outputs = list(op.inputs), list(op.outputs)
    used = [i for i in range(n) if grads[i] is not None]
    result = [None] * len(inputs)
    if not used:
        return result
    learned = [i for i in used if _may_be_learned(op, 3 * n + i) and _keeps_rows(op, i)]
    of_tables = {"key_rows": outputs[3 * n :], "row_splits": inputs[2 * n : 3 * n]}
    of_weights = _weights_grads(op, grads, learned, weights=inputs[3 * n :], **of_tables)
    result[3 * n :] = [of_weights.get(i) for i in range(n)]
    if op.get_attr("insert"):
        unique_keys = [outputs[n + i] for i in used]
        inverse = [outputs[2 * n + i] for i in used]
    else:  # a lookup without inserts did not prepare its gradient
        with tf.device("CPU:0"):
            unique_keys, inverse = libraries.ops().sok_unique_keys(
                keys=[inputs[n + i] for i in used]
            )
    with devices.device_scope(outputs[0].device):
        row_grads = libraries.ops().sok_lookup_grad(
            grads=[tf.convert_to_tensor(grads[i]) for i in used],
            unique_keys=unique_keys,
            inverse=inverse,
            row_splits=[inputs[2 * n + i] for i in used],
            weights=[inputs[3 * n + i] for i in used],
            dims=[dims[i] for i in used],
            combiners=[combiners[i] for i in used],
        )
    for i, row_grad, keys in zip(used, row_grads, unique_keys, strict=True):
        # For a function under two tapes, TensorFlow returns only tensors made within it.
        keys = keys if tf.executing_eagerly() else tf.identity(keys)
        result[i] = _slices(row_grad, keys, unique=True)
    return result


def rows_to_keep(weights: list[tf.Tensor | None]) -> list[bool]:
    """For which tables a lookup keeps the row of each key, which the gradient of weights needs."""
    eager = tf.executing_eagerly()  # in a graph `_keeps_rows` says so when it builds the gradient
    return [eager and w is not None and record.should_record_backprop([w]) for w in weights]


def _keeps_rows(op, i):
    """Whether a lookup keeps the row of each key of table `i`. In a graph, makes it keep them."""
    if tf.executing_eagerly():
        return op.get_attr("keep_rows")[i]
    lookup = op.outputs[0].op
    keep_rows = lookup.get_attr("keep_rows")
    keep_rows[i] = True
    values = tf.compat.v1.AttrValue.ListValue(b=keep_rows)
    # As TensorFlow itself changes ops of branches and loops when it builds their gradients.
    lookup._set_attr("keep_rows", tf.compat.v1.AttrValue(list=values))
    return True


def _may_be_learned(op, i):
    """Whether someone may want the gradient of the weights that are input `i`."""
    if hasattr(op, "skip_input_indices"):  # by a tape, which knows what it watches
        return i not in (op.skip_input_indices or ())
    return op.inputs[i].op.type != "Const"


def _weights_grads(op, grads, learned, **of_tables):
    """Gradients of the weights of tables `learned`; `of_tables`: other inputs, of all tables."""
    if not learned:
        return {}
    of_tables.update({name: op.get_attr(name) for name in ("dims", "combiners")})
    with tf.device("CPU:0"):  # the op's only device
        of_weights = libraries.ops().sok_weights_grad(
            grads=[tf.convert_to_tensor(grads[i]) for i in learned],
            **{name: [values[i] for i in learned] for name, values in of_tables.items()},
        )
    return dict(zip(learned, of_weights, strict=True))


tf.no_gradient("SokRoute")
tf.no_gradient("SokUniqueKeys")


@tf.RegisterGradient("SokSparseSamples")
def _sparse_samples_grad(op, *grads):
    n = op.get_attr("N")
    indices, _, weights, dense_shapes = (op.inputs[k * n : (k + 1) * n] for k in range(4))
    of_weights = [None] * n
    for i, grad in enumerate(grads[n : 2 * n]):
        if grad is None or not _may_be_learned(op, 2 * n + i):
            continue
        size = tf.size(weights[i], tf.int64)
        with tf.device("CPU:0"):  # sorted like the keys
            positions = libraries.ops().sok_sparse_samples(
                [indices[i]], [tf.range(size)], [tf.zeros([0])], [dense_shapes[i]]
            )
        order = positions.sorted_keys[0][:, tf.newaxis]
        of_weights[i] = tf.scatter_nd(order, grad, size[tf.newaxis])
    return [*[None] * (2 * n), *of_weights, *[None] * n]


@tf.RegisterGradient("SokGroupSamples")
def _group_samples_grad(op, *grads):
    n = op.get_attr("N")
    grads = _with_zeros(grads[n : 2 * n], op.outputs[n : 2 * n])
    return [None, tf.concat(grads, 0), None, None]


def _with_zeros(grads, outputs):
    """The gradients of outputs; zeros in the place of those that are None."""
    return [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, outputs, strict=True)
    ]


@tf.RegisterGradient("SokGatherRows")
def _gather_rows_grad(op, grad, *_):
    n, world_size = op.get_attr("N"), op.get_attr("world_size")
    if grad is None:
        return [None] * len(op.inputs)
    with devices.device_scope(op.outputs[0].device):
        merged = libraries.ops().sok_merge_grads(
            grads=grad,
            grad_splits=op.outputs[1],  # gradients come back in the positions of the rows sent
            message=op.inputs[n],
            splits=op.inputs[n + 1],
            heads=op.outputs[2],
            row_keys=op.outputs[3 : 3 + n],
            inverse=op.outputs[3 + n :],
            world_size=world_size,
            dims=op.get_attr("dims"),
            scale=lookup_options.scale_factor(op.get_attr("gradient_scale"), world_size),
        )
    slices = [
        _slices(row_grads, keys, unique=True)
        for row_grads, keys in zip(merged.row_grads, merged.unique_keys, strict=True)
    ]
    return [*slices, None, None]


@tf.RegisterGradient("SokFindRows")
def _find_rows_grad(op, grad, _):
    if grad is None:
        return [None, None]
    return [_slices(tf.convert_to_tensor(grad), op.inputs[1]), None]


tf.no_gradient("SokUnpackKeys")


@tf.RegisterGradient("SokPackRows")
def _pack_rows_grad(op, grad, _):
    n = op.get_attr("N")
    if grad is None:
        return [None] * len(op.inputs)
    rows = libraries.ops().sok_unpack_rows(
        row_message=grad,
        row_splits=op.outputs[1],  # gradients come back in the positions of the rows sent
        message=op.inputs[n],
        splits=op.inputs[n + 1],
        N=n,
        world_size=op.get_attr("world_size"),
        dims=op.get_attr("dims"),
        scale=op.get_attr("gradient_scale"),
    )
    return [*rows] + [None] * (len(op.inputs) - n)


def combine(
    rows: tf.Tensor, splits: tf.Tensor, call: tf.Tensor, routed: Any, batch: dict[str, Any]
) -> list[tf.Tensor]:
    """Combines the rows of `exchange_rows` into embeddings; `routed` is the result for `batch`."""
    return list(
        libraries.ops().sok_combine(
            rows=rows,
            splits=splits,
            counts=routed.counts,
            inverse=routed.inverse,
            call=call,
            starts=routed.starts,
            name="combine",
            **{name: batch[name] for name in ("row_splits", "weights", "dims", "combiners")},
        )
    )


@tf.RegisterGradient("SokCombine")
def _combine_grad(op, *grads):
    n = op.get_attr("N")
    inputs = list(op.inputs)
    inverse, row_splits, weights = (inputs[3 + k * n : 3 + (k + 1) * n] for k in range(3))
    # Passed on by the check of the rows: where the lookup failed, no gradient travels.
    call, starts = inputs[3 + 3 * n :]
    dims, combiners = op.get_attr("dims"), op.get_attr("combiners")
    of_lookup = {"counts": inputs[2], "row_splits": row_splits, "call": call, "starts": starts}
    # Every table sends its gradients back, even if all are zero: the other ranks wait for them.
    grads = _with_zeros(grads, op.outputs)
    with devices.device_scope(op.outputs[0].device):
        row_grads = libraries.ops().sok_combine_grad(
            grads=grads,
            inverse=inverse,
            weights=weights,
            dims=dims,
            combiners=combiners,
            **of_lookup,
        )
    result = [row_grads] + [None] * (len(inputs) - 1)
    learned = [i for i in range(n) if _may_be_learned(op, 3 + 2 * n + i)]
    if not learned:
        return result
    with devices.device_scope(op.outputs[0].device):
        key_rows = libraries.ops().sok_combine(
            rows=inputs[0],
            splits=inputs[1],
            inverse=[inverse[i] if i in learned else inverse[i][:0] for i in range(n)],
            weights=[tf.zeros([0])] * n,
            dims=dims,
            combiners=["none"] * n,
            **of_lookup,
        )
    of_tables = {"key_rows": key_rows, "row_splits": row_splits, "weights": weights}
    of_weights = _weights_grads(op, grads, learned, **of_tables)
    result[3 + 2 * n : 3 + 3 * n] = [of_weights.get(i) for i in range(n)]
    return result


def _no_second_order(op, *grads):
    floats = [value for value in op.inputs if value.dtype.is_floating]
    zeros = iter(graphs.refuse_second_order(grads, floats))
    return [next(zeros) if value.dtype.is_floating else None for value in op.inputs]


_GRADIENTS = ("SokLookupGrad", "SokMergeGrads", "SokCombineGrad", "SokUnpackRows")
for _op in (*_GRADIENTS, "SokWeightsGrad"):
    tf.RegisterGradient(_op)(_no_second_order)
