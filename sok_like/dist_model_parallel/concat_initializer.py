"""Initial rows of tables that were joined along their rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import as_integer, require


@tf.keras.utils.register_keras_serializable(package="sok_like")
class ConcatInitializer(tf.keras.initializers.Initializer):
    """Initializes the rows of each joined table as if it were the only one.

    An initializer may depend on the shape (Glorot's does), so it is called with the shape of each
    table, not of the joined one.

    Args:
        initializer: Keras initializer or its name, for all tables; or a list with one per table.
        sizes: Number of rows of each table, in order.

    Raises:
        ValueError: the lists differ in length, or a size is not a positive integer.
    """

    def __init__(self, initializer: Any, sizes: Sequence[int]):
        self.sizes = [as_integer(size) or 0 for size in sizes]
        require(min(self.sizes, default=0) >= 1, "sizes", "positive integers", sizes)
        one_each = isinstance(initializer, (list, tuple))
        identifiers = list(initializer) if one_each else [initializer] * len(self.sizes)
        if len(identifiers) != len(self.sizes):
            raise ValueError(
                "`initializer` must be one initializer or one per item of `sizes`. "
                f"Received: {len(identifiers)} initializers for {len(self.sizes)} sizes"
            )
        self.initializers = [tf.keras.initializers.get(each) for each in identifiers]

    def __call__(self, shape, dtype=None, **kwargs):
        """Initial rows `[sum(sizes), ...]`; ValueError if `shape` has another number of rows."""
        rows, *rest = shape
        if rows != sum(self.sizes):
            raise ValueError(
                f"`shape` must start with sum(sizes)={sum(self.sizes)}. Received: shape={shape}"
            )
        parts = [
            initializer([size, *rest], dtype=dtype, **kwargs)
            for initializer, size in zip(self.initializers, self.sizes, strict=True)
        ]
        return tf.concat(parts, axis=0)

    def get_config(self):
        serialize = tf.keras.initializers.serialize
        return {"initializer": [serialize(each) for each in self.initializers], "sizes": self.sizes}


def varied(initializer: Any, number: int) -> Any:
    """A copy of a random initializer with another seed for each `number` above 0."""
    if number == 0:
        return initializer
    random_one = tf.keras.initializers.get(initializer)
    config = random_one.get_config() if hasattr(random_one, "get_config") else {}
    seed = config.get("seed", 0)
    if "seed" not in config or not (seed is None or isinstance(seed, int)):
        return initializer  # draws no random numbers
    if seed is None:  # as Keras draws: the same on all ranks after set_random_seed
        seed = random.randint(1, 10**9)
    return type(random_one).from_config({**config, "seed": (seed + number * 1_000_003) % 2**31})
