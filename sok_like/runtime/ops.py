"""The gradients of the op library's ops.

The gradient of a table handle is `tf.IndexedSlices(gradients, keys)`: its indices are keys, not
positions, and may be any 64-bit integer.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from sok_like.runtime import comm, devices, gradient_scale, native, second_order


def keys_are_unique(gradient: tf.IndexedSlices) -> bool:
    """Whether the gradient is known to have each key once, because it came from one lookup.

    TensorFlow concatenates the gradients of several lookups, which makes a new tensor of keys.
    """
    return getattr(gradient.indices, comm.UNIQUE, False)


def finite_rows(gradient: tf.IndexedSlices) -> tuple[tf.IndexedSlices, tf.Tensor]:
    """The gradient with each key once, and bool `[num_keys]`: which rows are finite."""
    gradient = comm.distinct(gradient)
    return gradient, tf.reduce_all(tf.math.is_finite(gradient.values), axis=1)


def masked(gradient: tf.IndexedSlices, kept: tf.Tensor) -> tf.IndexedSlices:
    """The rows of a gradient where `kept`, bool `[num_keys]`, is true."""
    keys = tf.boolean_mask(gradient.indices, kept)
    if keys_are_unique(gradient):
        setattr(keys, comm.UNIQUE, True)
    values = tf.boolean_mask(gradient.values, kept)
    return tf.IndexedSlices(values, keys, gradient.dense_shape)


def _slices(grads, keys, *, unique=False):
    if unique:
        setattr(keys, comm.UNIQUE, True)
    # Keys are not positions: a dense gradient would fill the memory with zeros. Without a dense
    # shape, the conversion to one raises.
    return tf.IndexedSlices(grads, keys)


_NO_DENSE_GRADIENT = (
    "The gradient of a table has no dense form: its indices are keys. To change it, use "
    "`tf.IndexedSlices(change(gradient.values), gradient.indices)`. In a loop of a tf.function "
    "(also tf.map_fn, tf.scan, tf.vectorized_map) TensorFlow adds gradients up in dense form: look "
    "all keys up before the loop. Received: a conversion of {slices} to a tensor"
)


def _no_dense_gradient(slices, dtype=None, name=None, as_ref=False):
    del dtype, name, as_ref
    if slices.dense_shape is not None:
        return NotImplemented
    # Not a ValueError or TypeError: TensorFlow would replace their text.
    raise NotImplementedError(_NO_DENSE_GRADIENT.format(slices=slices))


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
    for i in used:
        weights = inputs[3 * n + i]
        if _may_be_learned(op, 3 * n + i) and _keeps_rows(op, i):
            row_splits, rows, combined = inputs[2 * n + i], outputs[3 * n + i], outputs[i]
            result[3 * n + i] = _weights_grad(
                grads[i], rows, combined, row_splits, weights, combiners[i]
            )
    if op.get_attr("insert"):
        unique_keys = [outputs[n + i] for i in used]
        inverse = [outputs[2 * n + i] for i in used]
    else:  # a lookup without inserts did not prepare its gradient
        with tf.device("CPU:0"):
            unique_keys, inverse = native.ops().sok_unique_keys(keys=[inputs[n + i] for i in used])
    with devices.device_scope(outputs[0].device):
        row_grads = native.ops().sok_lookup_grad(
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
    """For which tables an eager lookup keeps the row of each key, for the gradient of weights.

    In a graph it is none, until the gradient is built (`_keeps_rows`).
    """
    if not tf.executing_eagerly():
        return []
    kept = [w is not None and record.should_record_backprop([w]) for w in weights]
    return kept if any(kept) else []


def _keeps_rows(op, i):
    """Whether a lookup keeps the row of each key of table `i`. In a graph, makes it keep them."""
    if tf.executing_eagerly():
        return bool(op.get_attr("keep_rows")) and op.get_attr("keep_rows")[i]
    lookup = op.outputs[0].op
    kept = list(lookup.get_attr("keep_rows")) or [False] * lookup.get_attr("N")
    kept[i] = True
    values = tf.compat.v1.AttrValue.ListValue(b=kept)
    # As TensorFlow itself changes ops of branches and loops when it builds their gradients.
    lookup._set_attr("keep_rows", tf.compat.v1.AttrValue(list=values))
    return True


def _may_be_learned(op, i):
    """Whether someone may want the gradient of the weights that are input `i`."""
    if hasattr(op, "skip_input_indices"):  # by a tape, which knows what it watches
        return i not in (op.skip_input_indices or ())
    seen, left = set(), [op.inputs[i].op]
    while left:
        source = left.pop()
        if source.type.startswith(("Placeholder", "VarHandleOp", "Variable")):
            return True
        if source not in seen and source.type != "StopGradient":
            seen.add(source)
            left += [value.op for value in source.inputs if not value.dtype.is_integer]
    return False


def _weights_grad(grad, rows, output, row_splits, weights, combiner):
    """The gradient of the weights of keys `[num_keys]`.

    Args:
        grad: Gradient of `output`, float32 `[batch, dim]`, or `[num_keys, dim]` for "none".
        rows: float32 `[num_keys, dim]`, the row of each key when it was looked up.
    """

    combiner = tf.compat.as_str(combiner)  # an attribute holds bytes

    @tf.custom_gradient
    def of_weights(*floats):
        def refuse(*grads):
            return second_order.refused(grads, floats)

        grad, rows, output, weights = floats
        if combiner == "none":
            return tf.reduce_sum(rows * grad, 1), refuse
        sample = tf.ragged.row_splits_to_segment_ids(row_splits)
        dots = tf.reduce_sum(rows * tf.gather(grad, sample), 1)
        if combiner == "sum":
            return dots, refuse
        # output = sum / divisor, where the divisor depends on the weights, too.
        through_output = tf.reduce_sum(output * grad, 1)
        batch = tf.size(row_splits) - 1
        if combiner == "mean":
            divisor = tf.math.unsorted_segment_sum(weights, sample, batch)
            slope = tf.gather(through_output, sample)
        else:
            divisor = tf.sqrt(tf.math.unsorted_segment_sum(weights * weights, sample, batch))
            slope = weights * tf.gather(tf.math.divide_no_nan(through_output, divisor), sample)
        return tf.math.divide_no_nan(dots - slope, tf.gather(divisor, sample)), refuse

    return of_weights(tf.convert_to_tensor(grad), rows, output, weights)


tf.no_gradient("SokRoute")
tf.no_gradient("SokUniqueKeys")


@tf.RegisterGradient("SokSparseSamples")
def _sparse_samples_grad(op, *grads):
    n = op.get_attr("N")
    inputs = list(op.inputs)
    result = [None] * len(inputs)
    for i in range(n):
        grad, weights = grads[n + i], inputs[2 * n + i]
        if grad is None or not _may_be_learned(op, 2 * n + i):
            continue
        indices, dense_shape = inputs[i], inputs[3 * n + i]
        size = tf.size(weights, tf.int64)
        order = native.ops().sok_sparse_samples(
            indices=[indices],
            keys=[tf.range(size)],
            weights=[tf.zeros([0])],
            dense_shapes=[dense_shape],
        ).sorted_keys[0]
        result[2 * n + i] = tf.scatter_nd(order[:, tf.newaxis], grad, size[tf.newaxis])
    return result


@tf.RegisterGradient("SokGroupSamples")
def _group_samples_grad(op, *grads):
    n = op.get_attr("N")
    outputs = list(op.outputs)[n : 2 * n]
    grads = [
        tf.zeros_like(output) if grad is None else grad
        for grad, output in zip(grads[n : 2 * n], outputs, strict=True)
    ]
    return [None, tf.concat(grads, 0), None, None]


@tf.RegisterGradient("SokGatherRows")
def _gather_rows_grad(op, grad, *_):
    n = op.get_attr("N")
    dims = op.get_attr("dims")
    message, splits = op.inputs[n], op.inputs[n + 1]
    if grad is None:
        return [None] * len(op.inputs)
    with devices.device_scope(op.outputs[0].device):
        merged = native.ops().sok_merge_grads(
            grads=grad,
            grad_splits=op.outputs[1],  # gradients come back in the positions of the rows sent
            message=message,
            splits=splits,
            heads=op.outputs[2],
            row_keys=op.outputs[3 : 3 + n],
            inverse=op.outputs[3 + n :],
            world_size=op.get_attr("world_size"),
            dims=dims,
            scale=gradient_scale.factor(op.get_attr("gradient_scale"), op.get_attr("world_size")),
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
    rows = native.ops().sok_unpack_rows(
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
    """Combines the rows that came back into embeddings: the end of a lookup over ranks.

    Args:
        rows: float32, the row messages received; `splits`: int32 `[world_size]`, their lengths.
        call: int64 `[8]`, the call that they belong to.
        routed: The result of SokRoute for the batch.
        batch: The arguments of SokRoute; only `row_splits`, `weights`, `dims`, `combiners` count.

    Returns:
        `[batch, dim]` per table, or `[num_keys, dim]` if its combiner is "none".
    """
    return list(
        native.ops().sok_combine(
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
    of_weights = _weights_grads_of_combine(op, grads)
    # Every table sends its gradients back, even if all are zero: the other ranks wait for them.
    grads = [
        tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
        for grad, output in zip(grads, op.outputs, strict=True)
    ]
    with devices.device_scope(op.outputs[0].device):
        row_grads = native.ops().sok_combine_grad(
            grads=grads,
            counts=inputs[2],
            inverse=inverse,
            row_splits=row_splits,
            weights=weights,
            call=call,
            starts=starts,
            dims=op.get_attr("dims"),
            combiners=op.get_attr("combiners"),
        )
    return [row_grads, None, None] + [None] * (2 * n) + of_weights + [None, None]


def _weights_grads_of_combine(op, grads):
    """The gradient of each table's weights; None where nobody may want it."""
    n = op.get_attr("N")
    inputs = list(op.inputs)
    inverse, row_splits, weights = (inputs[3 + k * n : 3 + (k + 1) * n] for k in range(3))
    wanted = [grads[i] is not None and _may_be_learned(op, 3 + 2 * n + i) for i in range(n)]
    if not any(wanted):
        return [None] * n
    with devices.device_scope(op.outputs[0].device):
        rows = native.ops().sok_combine(
            rows=inputs[0],
            splits=inputs[1],
            counts=inputs[2],
            inverse=[i if w else i[:0] for i, w in zip(inverse, wanted, strict=True)],
            row_splits=row_splits,
            weights=[tf.zeros([0])] * n,
            call=inputs[-2],
            starts=inputs[-1],
            dims=op.get_attr("dims"),
            combiners=["none"] * n,
        )
        combiners = op.get_attr("combiners")
        return [
            _weights_grad(
                grads[i], rows[i], op.outputs[i], row_splits[i], weights[i], combiners[i]
            )
            if wanted[i]
            else None
            for i in range(n)
        ]


def _refuse_second_order(op, *grads):
    inputs = [i for i, value in enumerate(op.inputs) if value.dtype.is_floating]
    refused = second_order.refused(grads, [op.inputs[i] for i in inputs])
    result = [None] * len(op.inputs)
    for i, zeros in zip(inputs, refused, strict=True):
        result[i] = zeros
    return result


for _op in ("SokLookupGrad", "SokMergeGrads", "SokCombineGrad", "SokUnpackRows"):
    tf.RegisterGradient(_op)(_refuse_second_order)
