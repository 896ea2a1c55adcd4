"""Rows of a dense table, and their combination within a sample.

    ids, flat --unique--> distinct ids --gather--> distinct rows --by inverse--> rows of the ids
                                                                 \\--or combined by sample

A table here is an ordinary `tf.Variable` or tensor `[input_dim, output_dim]`; its keys are row
numbers, and all ops are TensorFlow's own. Each distinct row is read once. In the backward pass its
gradients are summed before they reach the table, so the table's gradient is an IndexedSlices
without repeated indices.

Arithmetic uses the table's dtype. Ids outside the table raise on every device; TensorFlow's own
gather would return zeros for them on a GPU.
"""

from typing import Any

import tensorflow as tf

from sok_like.lookup.ids import FlatIds, flat_values
from sok_like.runtime.checks import check_combiner, unmet
from sok_like.runtime.framework.graphs import checked

DENSE_COMBINERS = (None, "sum", "mean")


def embedding_lookup(param: Any, ids: Any, combiner: str | None = None, *, weights: Any = None):
    """Looks ids up in a dense table.

    Args:
        param: The table: a float tensor or variable `[input_dim, output_dim]`.
        ids: Integers in `[0, input_dim)`: a dense tensor `[batch, hotness]`, a `tf.RaggedTensor`
            `[batch, None]`, or a `tf.SparseTensor` `[batch, max_hotness]` in any order.
        combiner: Reduces the rows of a sample to one: "sum" or "mean"; None keeps all rows.
        weights: Floats of the shape and kind of `ids`; each row is multiplied by its weight, and a
            mean is divided by their sum. None: ones. Weights have a gradient, too.

    Returns:
        With a combiner `[batch, output_dim]`; a sample without ids gives zeros, and so does a mean
        whose weights add up to 0. Without one `[batch, hotness, output_dim]`, or a
        `tf.RaggedTensor` `[batch, None, output_dim]` for ragged and sparse ids. In the dtype of
        `param`.

    Raises:
        TypeError: `param` is not a tensor, ids are not integers, or `weights` are not floats.
        ValueError: `ids` is not 2-D, `weights` do not fit them, or the combiner is unknown.
        tf.errors.InvalidArgumentError: an id is outside `[0, input_dim)`; names the id.
    """
    if not tf.is_tensor(param) or isinstance(param, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(f"`param` must be a dense tensor or a variable. Received: {param!r}")
    if not tf.is_tensor(ids):
        ids = tf.convert_to_tensor(ids)
    if ids.shape.rank != 2:
        raise ValueError(f"`ids` must be 2-D. Received: ids of shape {ids.shape}")
    name = getattr(param, "name", "param") if isinstance(param, tf.Variable) else "param"
    return lookup_rows(
        as_tf_table(param), ids, check_combiner(combiner, DENSE_COMBINERS), weights, name
    )


def lookup_rows(table, ids, combiner: str | None, weights, table_name: str):
    """`embedding_lookup` with dense ids of any rank; their last axis is combined."""
    check_ids(ids, combiner, table_name)
    if combiner is None and weights is not None:
        raise ValueError(f"`weights` need a combiner. Received: combiner=None ({table_name})")
    if weights is not None:
        check_weights(ids, weights)
        weights = flat_weights(ids, weights)
    flat = FlatIds(ids, combiner, dtype=None)
    num_rows = tf.shape(table, tf.int64)[0]
    unique, inverse = tf.unique(require_in_range(flat.ids, num_rows, table_name))
    rows = tf.gather(table, unique)
    return flat.restore(combined(rows, inverse, flat.combiner, flat.row_splits, weights))


def combined(rows, inverse, combiner: str, row_splits, weights=None):
    """Combines by sample the distinct rows at positions `inverse`; "none": one row per position."""
    if combiner == "none":
        return tf.gather(rows, inverse)
    sample = tf.ragged.row_splits_to_segment_ids(row_splits)
    batch = tf.size(row_splits, tf.int64) - 1
    if weights is None:
        name = {"sum": "segment_sum", "mean": "segment_mean", "sqrtn": "segment_sqrt_n"}[combiner]
        return getattr(tf.sparse, name)(rows, inverse, sample, num_segments=batch)
    weights = tf.cast(weights, rows.dtype)
    weighted = tf.gather(rows, inverse) * weights[:, tf.newaxis]
    total = tf.math.unsorted_segment_sum(weighted, sample, batch)
    if combiner == "sum":
        return total
    terms = weights if combiner == "mean" else weights * weights
    divisor = tf.math.unsorted_segment_sum(terms, sample, batch)
    if combiner == "sqrtn":  # the gradient of the root at 0 would be NaN
        divisor = tf.sqrt(tf.where(divisor > 0, divisor, tf.ones_like(divisor)))
    return tf.math.divide_no_nan(total, divisor[:, tf.newaxis])


def _range_check(ids, num_rows, table_name):
    """Whether all ids are in range, an id that is not, and the text of the rule."""
    # Without ids these are the dtype's largest and smallest values, which pass.
    least = tf.cast(tf.reduce_min(ids), tf.int64)
    largest = tf.cast(tf.reduce_max(ids), tf.int64)
    in_range = (least >= 0) & (largest < num_rows)
    wrong = tf.where(least < 0, least, largest)
    return in_range, wrong, f"Ids of table '{table_name}' must be in [0, input_dim)."


def legal_ids(ids, num_rows, table_name):
    """The ids, with 0 in place of wrong ones, and what is wrong: a text, empty if none is."""
    in_range, wrong, rule = _range_check(ids, num_rows, table_name)
    text = tf.strings.join(
        [f"{rule} Received: id ", tf.strings.as_string(wrong), f" with input_dim {num_rows}"]
    )
    inside = (ids >= 0) & (ids < num_rows)
    return tf.where(inside, ids, tf.zeros_like(ids)), tf.where(in_range, "", text)


def require_in_range(ids, num_rows, table_name):
    """The ids; raises InvalidArgumentError unless all are in `[0, num_rows)`."""
    num_rows = tf.cast(num_rows, tf.int64)
    in_range, wrong, rule = _range_check(ids, num_rows, table_name)
    return checked(ids, in_range, f"{rule} Received: id", wrong, "with input_dim", num_rows)


def flat_weights(ids, weights, prefix: str = "", of: str = ""):
    """Weights `[num_keys]`, in the order of the flat ids; arguments as of `check_weights`."""
    if isinstance(ids, tf.RaggedTensor):
        places = ids.row_splits, weights.row_splits
    elif isinstance(ids, tf.SparseTensor):
        places = ids.indices, weights.indices
        weights = tf.sparse.reorder(weights)
        if places[0] is not places[1]:
            places = tf.sparse.reorder(ids).indices, weights.indices
    elif ids.shape == weights.shape:
        places = None, None
    else:
        places = tf.shape(ids), tf.shape(weights)
    return at_same_places(flat_values(weights), *places, prefix, of)


def at_same_places(weights, places, places_of_weights, prefix: str, of: str):
    """Flat weights, once the tensors of places have been found equal."""
    if places is places_of_weights:
        return weights
    left, right = tf.cast(places, tf.int64), tf.cast(places_of_weights, tf.int64)
    alike = tf.raw_ops.Equal(x=left, y=right, incompatible_shape_error=False)  # may broadcast
    alike = tf.reduce_all(alike) & tf.reduce_all(tf.equal(tf.shape(left), tf.shape(right)))
    return checked(weights, alike, f"`{prefix}weights` must have exactly one weight per id{of}")


def check_weights(ids, weights, prefix: str = "", of: str = "") -> None:
    """Checks the kind, shape and dtype of weights; `prefix` is that of the arguments' names."""
    kinds = (tf.RaggedTensor, tf.SparseTensor)
    same_kind = all(isinstance(ids, kind) == isinstance(weights, kind) for kind in kinds)
    if not same_kind or not ids.shape.is_compatible_with(weights.shape):
        required = f"have the same kind and shape as `{prefix}ids`"
        received = f"{prefix}ids={ids!r}, {prefix}weights={weights!r}{of}"
        raise unmet(f"`{prefix}weights`", required, received)
    if not weights.dtype.is_floating:
        raise TypeError(f"`{prefix}weights` must be floats. Received: {weights.dtype.name}{of}")


def check_ids(ids, combiner: str | None, table_name: str) -> None:
    """Checks that ids of this kind can be looked up."""
    if not ids.dtype.is_integer:
        raise TypeError(
            f"Ids of table '{table_name}' must be integers, because floats cannot represent all of "
            "them (float32: no odd integer above 2**24). Give the Keras input an integer dtype: "
            f"`Input(shape, dtype='int64')`. Received: {ids.dtype.name}"
        )
    rank, wrong = ids.shape.rank, None
    if isinstance(ids, tf.RaggedTensor):
        if rank != 2 or ids.ragged_rank != 1:
            wrong = (
                "A RaggedTensor of ids must be 2-D, [batch, None]; nested ones are not supported"
            )
    elif isinstance(ids, tf.SparseTensor):
        if rank not in (None, 2):
            wrong = "A SparseTensor of ids must be 2-D, [batch, max_hotness]"
    elif combiner is not None and rank is not None and rank < 2:
        wrong = "1-D ids with a combiner are ambiguous: one sample, or one id each? Use "
        wrong += "[1, hotness] or [batch, 1]"
    if wrong:
        raise ValueError(f"{wrong}. Received: shape {ids.shape} (table '{table_name}')")


def as_tf_table(param):
    """The tensor or `tf.Variable` inside a variable of Keras 3; other objects unchanged."""
    if isinstance(param, (tf.Tensor, tf.Variable)):
        return param
    value = getattr(param, "value", None)
    return param if value is None or callable(value) else value
