"""Looks up columns, with one fused lookup per group.

columns   a: user   b: ads   c: user   d: -            groups by name
              |        |        |        |
          ids and weights of each, from its categorical column
              |        |        |        |
lookups     [a, c]    [b]               [d]            group_embedding_lookup_sparse, one each
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as old
from tensorflow.python.feature_column import feature_column_v2 as fc

from sok_like.feature_column.categorical import table_column
from sok_like.feature_column.columns import GroupEmbeddingColumn, is_fused
from sok_like.group_embedding.lookup_sparse import group_embedding_lookup_sparse
from sok_like.runtime.checks import unmet
from sok_like.runtime.framework.graphs import checked
from sok_like.table.keys import check_kind


class _Ragged:
    """Adds RaggedTensors, which stock columns do not support, to both kinds of inputs."""

    def ragged(self, key):
        """The feature if it is a RaggedTensor; None otherwise."""
        raw = self._features.get(key)
        return raw if isinstance(raw, tf.RaggedTensor) else None

    def _get_raw_feature_as_tensor(self, key):
        ragged = self.ragged(key)
        return super()._get_raw_feature_as_tensor(key) if ragged is None else ragged.to_sparse()


class GraphInputs(_Ragged, old._LazyBuilder):
    """Features in a graph, and the columns' transformations of them; each is made once."""

    def sparse_tensors(self, categorical):
        """(ids, weights or None) of a categorical column, SparseTensors."""
        return categorical._get_sparse_tensors(self)


class LayerInputs(_Ragged, fc.FeatureTransformationCache):
    """The same for one call of a layer; `state` holds the layer's variables."""

    def __init__(self, features, state):
        super().__init__(features)
        self._state = state

    def sparse_tensors(self, categorical):
        """(ids, weights or None) of a categorical column, SparseTensors."""
        return categorical.get_sparse_tensors(self, self._state)


def check_columns(feature_columns: Any, *, in_graph: bool, sequence: bool = False) -> list:
    """The columns sorted by name, of TF1's kind in a graph; all or none are over sequences."""
    kind = old if in_graph else fc
    columns = kind._normalize_feature_columns(feature_columns)
    for column in columns:
        if sequence and not is_fused(column):
            raise ValueError(
                "Embedding columns of this package are required, each in a group or over a column "
                "with keys, without `max_norm` or `ckpt_to_load_from`. "
                f"Received: {column!r}"
            )
        if not isinstance(column, old._DenseColumn if in_graph else fc.DenseColumn):
            raise ValueError(
                "Dense columns are required; wrap a categorical column in an embedding_column or "
                f"an indicator_column. Received: {column!r}"
            )
        categorical = getattr(column, "categorical_column", None)
        if isinstance(categorical, fc.SequenceCategoricalColumn) != sequence:
            required = "have a sequence categorical column here"
            if not sequence:
                required = "not have a sequence categorical column; use sequence_input_layer"
            raise unmet(f"Column '{column.name}'", required, f"{column!r}")
    return sorted(columns, key=lambda column: column.name)


class Call(NamedTuple):
    """What a call of a layer or function looks up."""

    tables: Mapping[GroupEmbeddingColumn, Any]  # the table of each column
    inputs: GraphInputs | LayerInputs
    training: bool
    gradient_scale: str

    def embeddings(self, is_sequence: bool = False) -> dict[GroupEmbeddingColumn, tf.Tensor]:
        """Looks up the columns, those of a group together: `[batch, (T,) dimension]` per column."""
        groups: dict[Any, list[GroupEmbeddingColumn]] = {}
        for column in self.tables:
            groups.setdefault(column.group or column, []).append(column)  # alone without a group
        outputs: dict[GroupEmbeddingColumn, tf.Tensor] = {}
        for group, members in groups.items():
            for column in members:
                if column.keys_column is not None:
                    of = f"column '{column.name}'"
                    check_kind(self.tables[column], column.keys_column.dtype, of)
            pairs = [_counted_ids(column, self.inputs) for column in members]
            weights = [weights for _, weights in pairs]
            no_weights = is_sequence and all(w is None for w in weights)
            name = group if isinstance(group, str) else group.name
            rows = group_embedding_lookup_sparse(
                [self.tables[column] for column in members],
                [ids for ids, _ in pairs],
                [column.combiner for column in members],
                sp_weights=None if no_weights else weights,
                name=re.sub(r"[^a-zA-Z0-9.]", "_", name),
                is_sequence=is_sequence,
                training=self.training,
                gradient_scale=self.gradient_scale,
            )
            outputs.update(zip(members, rows, strict=True))
        return outputs

    def sequences(self) -> tuple[tf.Tensor, tf.Tensor]:
        """`[batch, T, sum of dimensions]` of the columns in order, and lengths int64 `[batch]`."""
        rows, columns = self.embeddings(is_sequence=True), list(self.tables)
        lengths = []
        for column in columns:
            ids, _ = _all_ids(column.categorical_column, self.inputs)
            if isinstance(ids, tf.RaggedTensor):
                lengths.append(tf.cast(ids.row_lengths(), tf.int64))
            else:  # up to the last id of each sample
                samples, positions = ids.indices[:, 0], ids.indices[:, 1]
                ends = tf.math.unsorted_segment_max(positions + 1, samples, ids.dense_shape[0])
                lengths.append(tf.maximum(ends, 0))
        for column, length in zip(columns[1:], lengths[1:], strict=True):
            text = (
                "Features must have the same lengths. Received: different lengths in columns "
                f"'{columns[0].name}' and '{column.name}'"
            )
            lengths[0] = checked(lengths[0], tf.reduce_all(tf.equal(length, lengths[0])), text)
        with tf.control_dependencies([lengths[0]]):
            return tf.concat([rows[column] for column in columns], 2), tf.identity(lengths[0])


def _counted_ids(column, inputs):
    """`_all_ids` of an embedding column without those that stock lookups skip."""
    ids, weights = _all_ids(column.categorical_column, inputs)
    if not column.use_safe_embedding_lookup:
        return ids, weights
    conditions = []
    if column.keys_column is None:  # keys may be negative, row numbers may not
        conditions.append(ids.values >= 0)
    if weights is not None and column.combiner != "sum":
        conditions.append(weights.values > 0)
    if not conditions:
        return ids, weights
    keep = functools.reduce(tf.logical_and, conditions)
    return _retain(ids, keep), None if weights is None else _retain(weights, keep)


def _all_ids(categorical, inputs):
    """All ids of a categorical column and their weights (or None), ragged or sparse."""
    keys, of = table_column(categorical), f"column '{categorical.name}'"
    if isinstance(categorical, fc.SequenceCategoricalColumn):  # which would give [batch, T, 1]
        categorical = categorical.categorical_column
    weight_key = getattr(categorical, "weight_feature_key", None)
    ragged = None if keys is None else inputs.ragged(keys.key)
    if ragged is not None:
        weights = None if weight_key is None else inputs.ragged(weight_key)
        if weight_key is not None and weights is None:
            required, received = f"be a RaggedTensor, like '{keys.key}'", "another kind"
            raise unmet(f"Feature '{weight_key}'", required, received, of)
        return ragged.with_values(keys.to_keys(ragged.values)), weights
    if keys is not None and weight_key is not None:
        # As in DeepRec's scripts, weights `[num_ids, 1]` belong to ids `[batch, hotness]` in order.
        dense = inputs._get_raw_feature_as_tensor(weight_key)
        if isinstance(dense, tf.Tensor) and dense.shape.rank == 2 and dense.shape[1] == 1:
            ids, _ = inputs.sparse_tensors(categorical.categorical_column)
            if not ids.shape.is_compatible_with(dense.shape):
                values = tf.cast(tf.reshape(dense, [-1]), tf.float32)
                sizes = tf.size(values), tf.size(ids.values)
                text = f"Feature '{weight_key}' must have a weight for each id. Received: weights"
                values = checked(values, tf.equal(*sizes), f"{text} and ids:", *sizes)
                return ids, tf.SparseTensor(ids.indices, values, ids.dense_shape)
    return inputs.sparse_tensors(categorical)


def _retain(values, keep):
    if isinstance(values, tf.RaggedTensor):
        return tf.ragged.boolean_mask(values, values.with_values(keep))
    return tf.sparse.retain(values, keep)


def flat(column: Any, tensor: tf.Tensor) -> tf.Tensor:
    """A column's `[batch, ...]` as `[batch, width]`."""
    shape = getattr(column, "variable_shape", None)
    width = (column._variable_shape if shape is None else shape).num_elements()
    return tf.reshape(tensor, [tf.shape(tensor)[0], width])
