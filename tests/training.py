"""Layers, a step of a training by hand, and what a table holds after it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def train_step(optimizer: Any, variables: Any, loss_of: Callable[[], Any]) -> Any:
    """Applies the gradients by one variable or a list of them; what `loss_of()` returned.

    That is a loss, or a tuple that begins with one.
    """
    variables = variables if isinstance(variables, (list, tuple)) else [variables]
    with tf.GradientTape() as tape:
        returned = loss_of()
        loss = returned[0] if isinstance(returned, tuple) else returned
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return returned


def apply_gradient(optimizer: Any, table: Any, keys: Any, gradient: Any = 1.0) -> None:
    """A step with this gradient, a number or numbers `[num_keys, 1 or dim]`, of the keys' rows."""
    keys = tf.constant(keys, tf.int64)
    values = tf.broadcast_to(tf.cast(gradient, tf.float32), [len(keys), table.dim])
    optimizer.apply_gradients([(tf.IndexedSlices(values, keys), table)])


def content(table: Any) -> dict[str, np.ndarray]:
    """All that a dump holds of this rank's shard, by name."""
    return {name: np.asarray(value) for name, value in table.snapshot().fields().items()}


def layer_of(name: str, rows: Any, dim: int = 2, capacity: int | None = None, **options) -> Any:
    """A layer for flat lists of keys; each row is a number, or what an initializer gives."""
    import sok_like as sok

    initializer = tf.keras.initializers.Constant(rows) if isinstance(rows, float) else rows
    options |= {"dynamic_input": True, "name": name, "embedding_initializer": initializer}
    return sok.All2AllDenseEmbedding(capacity, dim, 1, 1, **options)


def rows_by_key(table: Any) -> dict[int, list[float]]:
    """What this rank's shard of a table holds."""
    import sok_like as sok

    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))
