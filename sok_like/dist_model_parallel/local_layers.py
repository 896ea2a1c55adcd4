"""What a plan says to a layer: where lookups find tables, and which layers hold its variables."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding, HashEmbedding
from sok_like.lookup import exchange
from sok_like.lookup.dense_lookup import DENSE_COMBINERS, as_tf_table
from sok_like.planner.tables import COLUMN_WISE, HASHED, Plan, Shard
from sok_like.runtime.checks import OPTIONAL_COMBINERS, as_integer, check_combiner, require
from sok_like.table.variable import unwrap


class LookupTable(NamedTuple):
    """What lookups know of a table."""

    table_id: int
    name: str
    num_rows: int
    dim: int
    combiner: str | None
    pad_key: int | None  # has no row
    masked_id: int | None  # what masks leave out: id 0 of `mask_zero`, which has a row, or padding
    kind: int
    shards: list[Shard]  # in column order; of a table that is not cut by columns one for all ranks

    def shard_of(self, rank: int) -> Shard:
        """A rank's shard of a column-wise table; the one for all ranks of other tables."""
        return next(s for s in self.shards if s.rank == rank or self.kind != COLUMN_WISE)

    def owner(self, shard: Shard) -> int:
        """The rank with the rows of a shard, as `lookup.exchange` expects it."""
        if self.kind == COLUMN_WISE:
            return shard.rank
        return exchange.BY_KEY if self.kind == HASHED else exchange.ALL_RANKS


def lookup_tables(plan: Plan) -> list[LookupTable]:
    """The tables of a plan, by number."""
    tables = []
    for table, kind in zip(plan.tables, plan.kinds, strict=True):
        config, hashed = table.config, table.hashed
        legal = OPTIONAL_COMBINERS if hashed else DENSE_COMBINERS
        combiner = check_combiner(config.get("combiner"), legal)
        mask_zero = not hashed and config.get("mask_zero")
        required = "False with a combiner, whose output has no positions to mask"
        fits = not mask_zero or combiner is None
        require(fits, "mask_zero", required, mask_zero, f"table '{table.name}'")
        pad_key = config.get("pad_key") if hashed else None
        masked_id = 0 if mask_zero else pad_key if combiner is None else None
        shards = plan.shards_of(table.table_id)[: None if kind == COLUMN_WISE else 1]
        facts = table.table_id, table.name, table.input_dim, table.output_dim
        tables.append(LookupTable(*facts, combiner, pad_key, masked_id, kind, shards))
    return tables


def check_descriptions(embeddings: Sequence[Any], can_mask: bool) -> None:
    """Refuses what a table lacks; `can_mask`: whether this process knows the ids of its outputs."""
    for i, each in enumerate(embeddings):
        known = isinstance(each, (tf.keras.layers.Embedding, Embedding, HashEmbedding))
        masks = getattr(each, "mask_zero", False)
        masks = masks or (isinstance(each, HashEmbedding) and each.supports_masking)
        problem = None
        # tf_keras keeps weights given to the constructor until the layer is built.
        if (known and each.weights) or getattr(each, "_initial_weights", None) is not None:
            problem = (
                "hold layers that are not built: their configurations make the tables, and their "
                "weights would be lost. Give the weights to `DistributedEmbedding.set_weights`"
            )
        elif getattr(each, "activity_regularizer", None) is not None:
            problem = (
                "hold layers without an `activity_regularizer`, since their `call` is not used. "
                "Put a `tf.keras.layers.ActivityRegularization` after the output"
            )
        elif masks and not can_mask:
            problem = (
                "not make masks (`mask_zero=True`, or `pad_key` without a combiner) with "
                "dp_input=False on more than one rank: a rank does not know the ids of its outputs"
            )
        if problem:
            received = f"embeddings[{i}]: {type(each).__name__} '{getattr(each, 'name', i)}'"
            raise ValueError(f"`embeddings` must {problem}. Received: {received}")


def build_layer(config: dict[str, Any], sizes: Sequence[int] = (), vary: int = 0) -> Any:
    """Makes a layer and its variable; `sizes`: rows of joined tables, `vary`: of its seeds."""
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
        fits = len(identifiers) == len(self.sizes)
        received = f"{len(identifiers)} initializers for {len(self.sizes)} sizes"
        require(fits, "initializer", "one initializer or one per item of `sizes`", received)
        self.initializers = [tf.keras.initializers.get(each) for each in identifiers]

    def __call__(self, shape, dtype=None, **kwargs):
        """Initial rows `[sum(sizes), ...]`; ValueError if `shape` has another number of rows."""
        rows, *rest = shape
        fits = rows == sum(self.sizes)
        require(fits, "shape", f"one that starts with sum(sizes)={sum(self.sizes)}", shape)
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
