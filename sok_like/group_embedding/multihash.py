"""`get_multihash_variable`: two small dense tables in place of one row per id, as in DeepRec.

    id -> (id // rows of the first table, id % rows of the second) -> rows -> added, multiplied or
    concatenated

(H.-J. M. Shi et al., "Compositional embeddings using complementary partitions", 2020. There both
divisions use the same number. No two ids share both rows if the second table has at least as many
rows as the first.)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup.by_key import OnTypeError
from sok_like.runtime.checks import as_integer, require

v1 = tf.compat.v1
OPERATIONS = ("add", "mul", "mult", "concat")


class MultiHashVariable:
    """See `get_multihash_variable`; `tf.nn.embedding_lookup` takes it.

    Attributes:
        name: Its name.
        variables: The two tf.Variables, `[rows, width]`.
        operation: "add", "mul" or "concat".
    """

    def __init__(self, name: str, variables: list, operation: str):
        self.name, self.variables, self.operation = name, variables, operation

    def lookup(self, ids: Any) -> tf.Tensor:
        """Rows of ids of any shape, in `[0, rows of the first table ** 2)`, with a last axis."""
        ids = tf.cast(tf.convert_to_tensor(ids), tf.int64)
        first, second = [int(variable.shape[0]) for variable in self.variables]
        problem = f"Ids must be in [0, {first * first}), the ids that table '{self.name}' can take"
        check = tf.debugging.Assert(tf.reduce_all((ids >= 0) & (ids < first * first)), [problem])
        with tf.control_dependencies([check] if check is not None else []):
            ids = tf.identity(ids)
        rows = [
            tf.nn.embedding_lookup(variable, part)
            for variable, part in zip(self.variables, (ids // first, ids % second), strict=True)
        ]
        if self.operation == "concat":
            return tf.concat(rows, -1)
        return rows[0] + rows[1] if self.operation == "add" else rows[0] * rows[1]


def get_multihash_variable(
    name: str,
    dims: Any,
    num_of_partitions: int = 2,
    complementary_strategy: str = "Q-R",
    operation: str = "add",
    dtype: Any = tf.float32,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool | None = None,
    collections: Any = None,
    caching_device: Any = None,
    partitioner: Any = None,
    validate_shape: bool = True,
    use_resource: bool | None = None,
    custom_getter: Any = None,
    constraint: Any = None,
    synchronization: Any = tf.VariableSynchronization.AUTO,
    aggregation: Any = tf.VariableAggregation.NONE,
) -> MultiHashVariable:
    """Two tf.Variables, `name_0` and `name_1`, that together give the rows of `rows[0]**2` ids.

    The row of an id is made of row `id // dims[0][0]` of the first table and `id % dims[1][0]` of
    the second.

    Args:
        name: Name of the pair.
        dims: `[[rows, width], [rows, width]]`. The widths must be equal, except for "concat".
        num_of_partitions: Must be 2.
        complementary_strategy: Must be "Q-R", quotient and remainder.
        operation: "add", "mul" (also "mult") or "concat".
        partitioner: Ignored: the tables are small, and every rank holds all of them.

    The other arguments are those of `tf.compat.v1.get_variable`.

    Raises:
        ValueError: an argument is not one of these values.
    """
    of, strategy = f"table '{name}'", complementary_strategy
    require(num_of_partitions == 2, "num_of_partitions", "2", num_of_partitions, of)
    require(strategy == "Q-R", "complementary_strategy", "'Q-R'", strategy, of)
    require(operation in OPERATIONS, "operation", f"one of {OPERATIONS}", operation, of)
    pairs = [list(pair) if isinstance(pair, (list, tuple)) else [] for pair in dims]
    numbers = [as_integer(number) or 0 for pair in pairs for number in pair]
    fits = [len(pair) for pair in pairs] == [2, 2] and min(numbers, default=0) >= 1
    require(fits, "dims", "two pairs [rows, width] of positive integers", dims, of)
    same = operation == "concat" or pairs[0][1] == pairs[1][1]
    require(same, "dims", f"of the same width if operation='{operation}'", dims, of)
    variables = [
        v1.get_variable(
            f"{name}_{number}",
            shape,
            dtype,
            initializer,
            regularizer=regularizer,
            trainable=trainable,
            collections=collections,
            caching_device=caching_device,
            validate_shape=validate_shape,
            use_resource=use_resource,
            custom_getter=custom_getter,
            constraint=constraint,
            synchronization=synchronization,
            aggregation=aggregation,
        )
        for number, shape in enumerate(pairs)
    ]
    return MultiHashVariable(name, variables, "mul" if operation == "mult" else operation)


def _look_up(function, arguments):
    """Of a MultiHashVariable, which TensorFlow cannot convert."""
    table, norm = arguments.get("params"), arguments.get("max_norm")
    if not isinstance(table, MultiHashVariable):
        return None
    if norm is not None:
        raise ValueError(
            "`max_norm` must be None for a multihash variable, whose rows are made of two. "
            f"Received: max_norm={norm!r} (table '{table.name}')"
        )
    return table.lookup(arguments["ids"])


for _nn in (tf.nn, v1.nn):
    OnTypeError(_nn.embedding_lookup, _look_up)
