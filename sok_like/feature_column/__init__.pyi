# The public names; `runtime/framework/lazy_modules.py` reads them from here.
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
from sok_like.feature_column.columns import (
    group_embedding_column_scope as group_embedding_column_scope,
)
from sok_like.feature_column.columns import shared_embedding_columns as shared_embedding_columns
from sok_like.feature_column.graph_layers import input_layer as input_layer
from sok_like.feature_column.graph_layers import linear_model as linear_model
from sok_like.feature_column.graph_layers import sequence_input_layer as sequence_input_layer
from sok_like.feature_column.layers import DenseFeatures as DenseFeatures
from sok_like.feature_column.layers import SequenceFeatures as SequenceFeatures

__all__: list[str]
