"""Categorical columns whose ids are keys of a hash table: no vocabulary, no number of buckets.

feature          key
integers         the integer itself, uint64 by its bits
strings          `sok_like.table.keys.keys_of`, the same in every process
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as old
from tensorflow.python.feature_column import feature_column_v2 as fc

from sok_like.lookup.ids import keys_of_ids
from sok_like.runtime.checks import as_integer, require, unmet
from sok_like.table.keys import DTYPES, dtype_hint, may_be_keys
from sok_like.table.policies import EmbeddingVariableOption, check_option, with_steps_to_live

# Columns of TensorFlow that take strings or integers, as their `dtype` says.
_OF_EITHER = (
    *(fc.HashedCategoricalColumn, fc.VocabularyListCategoricalColumn),
    fc.VocabularyFileCategoricalColumn,
)


class EmbeddingCategoricalColumn(
    fc.CategoricalColumn,
    old._CategoricalColumn,
    collections.namedtuple(
        "EmbeddingCategoricalColumn", ("key", "dtype", "partition_num", "ev_option")
    ),
):
    """See `categorical_column_with_embedding`."""

    def __hash__(self):  # options may not be hashable
        return hash((self.key, self.dtype))

    @property
    def _is_v2_column(self):
        return True

    @property
    def name(self):
        return self.key

    @property
    def parents(self):
        return [self.key]

    @property
    def parse_example_spec(self):
        # tf.io parses only int64 and strings.
        dtype = tf.string if self.dtype == tf.string else tf.int64
        return {self.key: tf.io.VarLenFeature(dtype)}

    _parse_example_spec = parse_example_spec

    @property
    def num_buckets(self):
        raise ValueError(
            f"Column '{self.key}' has keys of a hash table and no number of buckets. Pass it to "
            "`sok.feature_column.embedding_column` or `shared_embedding_columns`, or, after "
            "`sok.deeprec.install()`, to TensorFlow's functions of these names."
        )

    _num_buckets = num_buckets

    @property
    def key_dtype(self) -> tf.DType:
        return tf.int64 if self.dtype == tf.string else self.dtype

    def to_keys(self, values: tf.Tensor) -> tf.Tensor:
        """int64 keys of flat values `[num_keys]`, of the column's kind."""
        self.check_dtype(values.dtype)
        return keys_of_ids(values)

    def check_dtype(self, dtype: tf.DType) -> None:
        """Raises ValueError, with a remedy, unless a feature may have this dtype."""
        if dtype == tf.string if self.dtype == tf.string else may_be_keys(dtype):
            return
        hint = dtype_hint(dtype)
        if dtype == tf.string:
            hint = "Give `categorical_column_with_embedding` the dtype tf.string"
        elif self.dtype == tf.string:
            hint = "A `tf.keras.Input` of strings has the dtype 'string'"
        required = f"match the dtype of its column, {self.dtype.name}"
        raise unmet(f"Feature '{self.key}'", required, f"{dtype.name}. {hint}")

    def _to_sparse_keys(self, tensor):
        sparse = fc._to_sparse_input_and_drop_ignore_values(tensor)
        return tf.SparseTensor(sparse.indices, self.to_keys(sparse.values), sparse.dense_shape)

    def transform_feature(self, transformation_cache, state_manager):
        return self._to_sparse_keys(transformation_cache.get(self.key, state_manager))

    def _transform_feature(self, inputs):
        return self._to_sparse_keys(inputs.get(self.key))

    def get_sparse_tensors(self, transformation_cache, state_manager):
        return self.IdWeightPair(transformation_cache.get(self, state_manager), None)

    def _get_sparse_tensors(self, inputs, weight_collections=None, trainable=None):
        return self.IdWeightPair(inputs.get(self), None)

    def get_config(self):
        if self.ev_option is not None:
            raise NotImplementedError(f"Column '{self.key}' with an `ev_option` has no config.")
        return {**dict(zip(self._fields, self, strict=True)), "dtype": self.dtype.name}

    @classmethod
    def from_config(cls, config, custom_objects=None, columns_by_name=None):
        return cls(**{**config, "dtype": tf.as_dtype(config["dtype"])})


def categorical_column_with_embedding(
    key: str, dtype: Any = tf.string, partition_num: int | None = None, ev_option: Any = None
) -> EmbeddingCategoricalColumn:
    """A categorical column backed by an EmbeddingVariable: any string, or any 64-bit integer.

    In dense features '' and -1 are padding, as in stock columns; in SparseTensors and RaggedTensors
    they are keys.

    Args:
        key: Name of the feature and of the column.
        dtype: tf.string, or int64, int32, uint64 or uint32.
        partition_num: DeepRec's number of partitions: None or a positive integer; ignored.
            A table is always sharded over all ranks.
        ev_option: None or the `sok.EmbeddingVariableOption` of the table.

    Raises:
        ValueError: an argument is not one of these values.
        TypeError: `ev_option` is not an EmbeddingVariableOption.
    """
    dtype = tf.as_dtype(dtype)
    require(isinstance(key, str) and bool(key), "key", "a non-empty string", key)
    of, is_legal = f"column '{key}'", dtype in (tf.string, *DTYPES)
    require(is_legal, "dtype", "string, int64, int32, uint64 or uint32", dtype, of)
    check_option("ev_option", ev_option, EmbeddingVariableOption, of=of)
    legal = partition_num is None or (as_integer(partition_num) or 0) >= 1
    require(legal, "partition_num", "None or a positive integer", partition_num, of)
    return EmbeddingCategoricalColumn(key, dtype, partition_num, ev_option)


def sparse_column_with_embedding(
    column_name: str,
    dtype: Any = tf.string,
    partition_num: int | None = None,
    steps_to_live: int | None = None,
    init_data_source: None = None,
    ht_partition_num: int = 1000,
    evconfig: EmbeddingVariableOption | None = None,
    ev_option: EmbeddingVariableOption | None = None,
) -> EmbeddingCategoricalColumn:
    """DeepRec's older name for `categorical_column_with_embedding`.

    Args:
        column_name, dtype, partition_num: Its `key`, `dtype` and `partition_num`.
        steps_to_live: The same as an option with `GlobalStepEvict(steps_to_live)`; None or 0:
            no eviction.
        init_data_source: Must be None.
        ht_partition_num: DeepRec's number of hash table partitions; ignored.
        evconfig, ev_option: Its `ev_option`; the name depends on the release of DeepRec.

    Raises:
        ValueError: an argument is not one of these values, or both names are given.
        TypeError: `ev_option` is not a sok.EmbeddingVariableOption.
    """
    of, required = f"column '{column_name}'", "None: use sok.assign or sok.Saver to load rows"
    require(init_data_source is None, "init_data_source", required, init_data_source, of)
    if evconfig is not None and ev_option is not None:
        rule = "be given once, under this name or as `evconfig`"
        raise unmet("`ev_option`", rule, f"ev_option={ev_option!r}, evconfig={evconfig!r}", of)
    option = ev_option if evconfig is None else evconfig
    column = categorical_column_with_embedding(column_name, dtype, partition_num, option)
    return column._replace(ev_option=with_steps_to_live(option, steps_to_live, of))


def sequence_categorical_column_with_embedding(
    key: str, dtype: Any = tf.string, partition_num: int | None = None, ev_option: Any = None
) -> fc.SequenceCategoricalColumn:
    """`categorical_column_with_embedding` for `sequence_input_layer`: one row per position.

    Args:
        key, dtype, partition_num, ev_option: As there.

    Raises:
        ValueError, TypeError: As there.
    """
    column = categorical_column_with_embedding(key, dtype, partition_num, ev_option)
    return fc.SequenceCategoricalColumn(column)


def weighted_categorical_column(
    categorical_column: Any, weight_feature_key: str, dtype: Any = tf.float32
) -> fc.WeightedCategoricalColumn:
    """`tf.feature_column.weighted_categorical_column`, also for columns of this package.

    Args:
        categorical_column: The column whose ids are weighted.
        weight_feature_key: Name of the feature with one weight per id, of the same kind and shape.
            "mean" and "sqrtn" skip ids whose weight is not positive.
        dtype: Integer or floating dtype of the weights.

    Raises:
        ValueError: `dtype` is neither an integer nor a floating dtype.
    """
    return tf.feature_column.weighted_categorical_column(
        categorical_column, weight_feature_key, tf.as_dtype(dtype)
    )


def table_column(categorical: Any) -> EmbeddingCategoricalColumn | None:
    """The column with keys inside weighted and sequence columns, or None."""
    while isinstance(categorical, (fc.WeightedCategoricalColumn, fc.SequenceCategoricalColumn)):
        categorical = categorical.categorical_column
    return categorical if isinstance(categorical, EmbeddingCategoricalColumn) else None


def check_features(columns: Sequence[Any], features: Mapping[str, Any], layer: str) -> None:
    """Checks that a graph's features are given, with dtypes that their columns support."""
    for column, key in _features_of(columns):
        if key not in features:
            required = f"hold feature '{key}' of column '{column.name}'"
            raise unmet("The input", required, list(features), f"layer '{layer}'")
        feature = features[key]
        dtype = tf.as_dtype((feature if hasattr(feature, "dtype") else tf.constant(feature)).dtype)
        if isinstance(column, EmbeddingCategoricalColumn):
            column.check_dtype(dtype)
            continue
        wanted, fits = "integers", may_be_keys(dtype)
        is_weight = key == getattr(column, "weight_feature_key", None)
        if is_weight or isinstance(column, fc.NumericColumn):
            wanted, fits = "numbers", dtype.is_integer or dtype.is_floating
        elif isinstance(column, fc.CrossedColumn):
            wanted, fits = "integers or strings", fits or dtype == tf.string
        elif isinstance(column, _OF_EITHER) and column.dtype == tf.string:
            wanted, fits = "strings", dtype == tf.string
        elif not isinstance(column, (fc.IdentityCategoricalColumn, *_OF_EITHER)):
            continue
        if not fits:
            subject, required = f"Feature '{key}' of column '{column.name}'", f"hold {wanted}"
            received = f"{dtype.name}. Give `tf.keras.Input` another dtype"
            raise unmet(subject, required, received, f"layer '{layer}'")


def _features_of(columns: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """The features that columns read, each with the column that reads it."""
    for column in columns:
        for parent in column.parents:
            if isinstance(parent, str):
                yield column, parent
            else:
                yield from _features_of([parent])
