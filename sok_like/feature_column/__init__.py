"""Feature columns in groups; each group is looked up in one fused call.

    from sok_like import feature_column as fc

Names and arguments are those of `tf.feature_column` and of DeepRec's additions to it.
"""

from sok_like.feature_column.categorical import (
    categorical_column_with_embedding,
    sequence_categorical_column_with_embedding,
    sparse_column_with_embedding,
    weighted_categorical_column,
)
from sok_like.feature_column.columns import (
    embedding_column,
    group_embedding_column_scope,
    shared_embedding_columns,
)
from sok_like.feature_column.graph_layers import input_layer, linear_model, sequence_input_layer
from sok_like.feature_column.layers import DenseFeatures, SequenceFeatures

__all__ = [
    "DenseFeatures",
    "SequenceFeatures",
    "categorical_column_with_embedding",
    "embedding_column",
    "group_embedding_column_scope",
    "input_layer",
    "linear_model",
    "sequence_categorical_column_with_embedding",
    "sequence_input_layer",
    "shared_embedding_columns",
    "sparse_column_with_embedding",
    "weighted_categorical_column",
]


def __dir__() -> list[str]:
    return __all__
