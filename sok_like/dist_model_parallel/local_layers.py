"""The Keras layers that hold a rank's variables, made from the planner's configurations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding, HashEmbedding
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.runtime.checks import as_integer, require
from sok_like.table.variable import unwrap


def check_descriptions(embeddings: Sequence[Any], can_mask: bool) -> None:
    """Refuses properties of an embedding that the table made from its configuration lacks.

    `can_mask` says whether this process knows the ids of its outputs.
    """
    for i, each in enumerate(embeddings):
        received = f"embeddings[{i}]: {type(each).__name__} '{getattr(each, 'name', i)}'"
        known = isinstance(each, (tf.keras.layers.Embedding, Embedding, HashEmbedding))
        # tf_keras keeps weights given to the constructor until the layer is built.
        if (known and each.weights) or getattr(each, "_initial_weights", None) is not None:
            raise ValueError(
                "`embeddings` must hold layers that are not built: their configurations make the "
                "tables, and their weights would be lost. Give the weights to "
                f"`DistributedEmbedding.set_weights`. Received: weights of {received}"
            )
        if getattr(each, "activity_regularizer", None) is not None:
            raise ValueError(
                "`embeddings` must hold layers without an `activity_regularizer`, since their "
                "`call` is not used. Put a `tf.keras.layers.ActivityRegularization` after the "
                f"output. Received: {received} with one"
            )
        masks = getattr(each, "mask_zero", False)
        masks = masks or (isinstance(each, HashEmbedding) and each.supports_masking)
        if masks and not can_mask:
            raise ValueError(
                "With dp_input=False on more than one rank, `embeddings` must not make masks "
                "(`mask_zero=True`, or `pad_key` without a combiner): a rank does not know the ids "
                f"of its outputs. Received: {received} with one"
            )


def build_layer(config: dict[str, Any], sizes: Sequence[int] = (), vary: int = 0) -> Any:
    """Makes a layer of this configuration, with its variable.

    `sizes` are the numbers of rows of joined tables. `vary` changes the seeds of the initializers,
    so that not all shards of a table start with the same rows.
    """
    config = dict(config)
    layer_type = config.pop("layer_type", None)
    if len(sizes) > 1 and not any(config["embeddings_initializer"]):
        del config["embeddings_initializer"]  # a user's class may not accept one
    elif len(sizes) > 1:
        initializers = config["embeddings_initializer"]
        initializers = [varied(each or "uniform", vary) for each in initializers]
        config["embeddings_initializer"] = ConcatInitializer(initializers, sizes)
    elif config.get("embeddings_initializer") is not None:
        config["embeddings_initializer"] = varied(config["embeddings_initializer"], vary)
    if layer_type is None or layer_type is tf.keras.layers.Embedding:
        layer_type = HashEmbedding if config.get("hash_table") else Embedding
    layer = layer_type.from_config(config)
    with tf.name_scope(layer.name):
        if not layer.built:
            layer.build((None, None))
    layer_table(layer)  # raises unless it has exactly one weight
    return layer


def layer_table(layer: Any) -> Any:
    """The TensorFlow variable of an embedding layer, an EmbeddingVariable for a hash table."""
    if len(layer.weights) != 1:
        raise ValueError(
            "A distributed embedding must have one weight, its table. Received: "
            f"{len(layer.weights)} weights ({type(layer).__name__} '{layer.name}')"
        )
    return as_tf_table(unwrap(layer.weights[0]))


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
