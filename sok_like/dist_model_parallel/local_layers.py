"""Builds the Keras layers that hold a rank's variables, from the planner's configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.dist_model_parallel.concat_initializer import ConcatInitializer, varied
from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.dist_model_parallel.hash_embedding import HashEmbedding
from sok_like.lookup.dense_lookup import as_tf_table
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
