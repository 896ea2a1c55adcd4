"""Feature columns in groups; each group is looked up in one fused call.

    from sok_like import feature_column as fc

Names and arguments are those of `tf.feature_column` and of DeepRec's additions to it.
"""

from sok_like.feature_column.categorical import (
    categorical_column_with_embedding as categorical_column_with_embedding,
)
from sok_like.feature_column.categorical import (
    sequence_categorical_column_with_embedding as sequence_categorical_column_with_embedding,
)
from sok_like.feature_column.categorical import (
    sparse_column_with_embedding as sparse_column_with_embedding,
)
from sok_like.feature_column.categorical import (
    weighted_categorical_column as weighted_categorical_column,
)
from sok_like.feature_column.columns import embedding_column as embedding_column
from sok_like.feature_column.columns import shared_embedding_columns as shared_embedding_columns
from sok_like.feature_column.input_layer import input_layer as input_layer
from sok_like.feature_column.input_layer import sequence_input_layer as sequence_input_layer
from sok_like.feature_column.layers import DenseFeatures as DenseFeatures
from sok_like.feature_column.layers import SequenceFeatures as SequenceFeatures
from sok_like.feature_column.linear_model import linear_model as linear_model
from sok_like.feature_column.scope import (
    group_embedding_column_scope as group_embedding_column_scope,
)

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
