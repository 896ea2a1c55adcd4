"""`sparse_read_and_evict` and `incremental_model_dump` of SOK 2.x."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.native import libraries
from sok_like.sok2.lookup import all2all_dense_embedding
from sok_like.table.policy_methods import PolicyCounts
from sok_like.table.variable import unwrap

_DROPPED = PolicyCounts._fields.index("dropped")


def sparse_read_and_evict(
    var: Any, indices: Any, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows of keys, and the rows evicted from a full table for them; every rank must call it.

    Args:
        var: DynamicVariable of var_type "hybrid".
        indices: Keys, integers of any shape. Missing keys are inserted.
        name: Name scope of the ops.

    Returns:
        Rows, float32, the shape of the keys plus a last axis `dimension`, with a gradient. Evicted
        keys `[num_evicted]` int64 and rows `[num_evicted, dimension]` of this rank, since the last
        call, by this or other lookups, oldest first.

    Raises:
        TypeError: `var` is not such a table.
        tf.errors.InvalidArgumentError: this call evicted more rows than a rank keeps (65,536 or
            `max_capacity` if that is less); the oldest are lost.
    """
    table = unwrap(var)
    if getattr(table, "backend_type", None) != "hybrid":
        raise wrong_argument("var", "a DynamicVariable of var_type 'hybrid'", var, error=TypeError)
    with tf.name_scope(name or "sparse_read_and_evict"):
        before = _dropped(table)
        with tf.control_dependencies([before]):
            rows = all2all_dense_embedding(table, indices)
        with tf.control_dependencies([rows]):
            popped, after = table.pop_evicted(), _dropped(table)
        check = tf.debugging.Assert(
            tf.equal(before, after),
            ["Rows evicted from table", table.table_name, "were lost: pass fewer keys at a time"],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(rows), tf.identity(popped.keys), tf.identity(popped.rows)


def _dropped(table):
    return libraries.ops().sok_table_statistics(handle=table.handle)[_DROPPED]


def incremental_model_dump(sok_vars: Any, time_threshold: Any, sess: Any = None) -> Any:
    """Raises, and names another way: a table knows the step of a key's last lookup, not its time.

    Args:
        sok_vars, time_threshold, sess: As in SOK 2.x; unused.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "incremental_model_dump selects keys by time, but tables record steps. After `rows = "
        "variable.export()` of a DynamicVariable of var_type 'hybrid', the rows that training has "
        "looked up since step s are those with `rows.versions >= s`. "
        f"Received: time_threshold={time_threshold!r}"
    )
