"""Checks features while a model or function is built; Keras 3 runs no column on them then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2 as fc

from sok_like.feature_column.categorical import EmbeddingCategoricalColumn
from sok_like.table.keys import may_be_keys

_OF_A_DTYPE = (
    *(fc.HashedCategoricalColumn, fc.VocabularyListCategoricalColumn),
    fc.VocabularyFileCategoricalColumn,
)
_INTEGERS, _STRINGS, _NUMBERS, _IDS = "integers", "strings", "numbers", "integers or strings"


def check_features(columns: Sequence[Any], features: Mapping[str, Any], layer: str) -> None:
    """Checks that features are given and have a dtype that their columns support."""
    for column, key in _features_of(columns):
        if key not in features:
            raise ValueError(
                f"The input must hold feature '{key}' of column '{column.name}'. "
                f"Received: {list(features)} (layer '{layer}')"
            )
        feature = features[key]
        dtype = tf.as_dtype((feature if hasattr(feature, "dtype") else tf.constant(feature)).dtype)
        if isinstance(column, EmbeddingCategoricalColumn):
            column.check_dtype(dtype)
            continue
        wanted = _wanted(column, key)
        fits = {
            None: True,
            _INTEGERS: may_be_keys(dtype),
            _STRINGS: dtype == tf.string,
            _NUMBERS: dtype.is_integer or dtype.is_floating,
            _IDS: may_be_keys(dtype) or dtype == tf.string,
        }
        if not fits[wanted]:
            raise ValueError(
                f"Feature '{key}' of column '{column.name}' must hold {wanted}. "
                f"Received: {dtype.name}. Give `tf.keras.Input` another dtype (layer '{layer}')"
            )


def _features_of(columns: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """The features that columns read, each with the column that reads it."""
    for column in columns:
        for parent in column.parents:
            if isinstance(parent, str):
                yield column, parent
            else:
                yield from _features_of([parent])


def _wanted(column, key):
    """The values that a column of TensorFlow takes; None for others."""
    if isinstance(column, fc.NumericColumn) or key == getattr(column, "weight_feature_key", None):
        return _NUMBERS
    if isinstance(column, fc.IdentityCategoricalColumn):
        return _INTEGERS
    if isinstance(column, fc.CrossedColumn):
        return _IDS
    if isinstance(column, _OF_A_DTYPE):
        return _STRINGS if column.dtype == tf.string else _INTEGERS
    return None
