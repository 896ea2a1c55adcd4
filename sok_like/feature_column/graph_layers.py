"""TF1's functions `input_layer`, `sequence_input_layer` and `linear_model`, with fused lookups.

Names of scopes and variables are those of `tf.compat.v1.feature_column`, so checkpoints of its
ordinary variables can be restored. Outside of a graph nothing would own the tables between calls;
use the layer `DenseFeatures` there.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as old
from tensorflow.python.feature_column import feature_column_v2 as fc

from sok_like.feature_column import lookup
from sok_like.feature_column.categorical import table_column
from sok_like.feature_column.columns import GroupEmbeddingColumn, graph_weights, is_fused
from sok_like.group_embedding.variables import get_embedding_variable

v1 = tf.compat.v1
_stock = v1.feature_column.linear_model


def input_layer(
    features: dict,
    feature_columns: Any,
    weight_collections: Any = None,
    trainable: bool = True,
    cols_to_vars: dict | None = None,
    cols_to_output_tensors: dict | None = None,
    *,
    training: bool = True,
    gradient_scale: str = "auto",
) -> tf.Tensor:
    """`tf.compat.v1.feature_column.input_layer`, with one fused lookup per group of columns.

    Args:
        features: Features by name: dense `[batch]` or `[batch, hotness]`, a SparseTensor or a
            RaggedTensor. Columns with keys read RaggedTensors directly, others as SparseTensors.
        feature_columns: Dense columns of this package and of TensorFlow.
        weight_collections: Names of collections to which variables are added.
        trainable: Whether variables are trainable.
        cols_to_vars: A dictionary that receives one list of variables per column.
        cols_to_output_tensors: A dictionary that receives one `[batch, dimension]` per column.
        training: False reads initial rows of missing keys and inserts no keys.
        gradient_scale: As in `sok.GroupEmbedding`.

    Returns:
        float32 `[batch, sum of dimensions]`: the columns sorted by name.

    Raises:
        RuntimeError: called eagerly or in a tf.function.
        ValueError: a column is not dense, or the variable scope forbids a variable.
    """
    columns = lookup.check_columns(feature_columns, in_graph=True)
    _require_graph("input_layer", "DenseFeatures")
    with v1.variable_scope(None, "input_layer", list(features.values())):
        inputs = lookup.GraphInputs(features)
        tables, tensors = _variables(columns, inputs, weight_collections, trainable, cols_to_vars)
        tensors |= lookup.Call(tables, inputs, training, gradient_scale).embeddings()
        outputs = [lookup.flat(column, tensors[column]) for column in columns]
        if cols_to_output_tensors is not None:
            cols_to_output_tensors.update(zip(columns, outputs, strict=True))
        fc._verify_static_batch_size_equality(outputs, columns)
        return tf.concat(outputs, 1)


def sequence_input_layer(
    features: dict,
    feature_columns: Any,
    weight_collections: Any = None,
    trainable: bool = True,
    *,
    training: bool = True,
    gradient_scale: str = "auto",
) -> tuple[tf.Tensor, tf.Tensor]:
    """Rows of sequence columns, one per position, with one fused lookup per group.

    Args:
        feature_columns: Embedding columns of this package over sequence categorical columns.
        features, weight_collections, trainable, training, gradient_scale: As in `input_layer`.

    Returns:
        float32 `[batch, T, sum of dimensions]`, the columns sorted by name, padded with zeros; and
        the sequence lengths, int64 `[batch]`.

    Raises:
        RuntimeError: called eagerly or in a tf.function.
        ValueError: a column is not an embedding column over sequences.
        tf.errors.InvalidArgumentError: features have different lengths.
    """
    columns = lookup.check_columns(feature_columns, in_graph=True, sequence=True)
    _require_graph("sequence_input_layer", "SequenceFeatures")
    with v1.variable_scope(None, "sequence_input_layer", list(features.values())):
        inputs = lookup.GraphInputs(features)
        tables, _ = _variables(columns, inputs, weight_collections, trainable)
        return lookup.Call(tables, inputs, training, gradient_scale).sequences()


def _variables(columns, inputs, weight_collections, trainable, cols_to_vars=None):
    """By column, the table of what is fused, and the tensor of what TensorFlow looks up."""
    collections = _collections(weight_collections)
    tables, tensors = {}, {}
    for column in columns:
        with v1.variable_scope(None, getattr(column, "_var_scope_name", column.name)) as scope:
            if is_fused(column):
                tables[column] = graph_weights(column, collections, trainable)
            else:
                options = {"weight_collections": collections, "trainable": trainable}
                tensors[column] = column._get_dense_tensor(inputs, **options)
            if cols_to_vars is not None:
                variables = v1.GraphKeys.GLOBAL_VARIABLES
                cols_to_vars[column] = v1.get_collection(variables, scope.name)
    return tables, tensors


def _collections(weight_collections):
    names = v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.MODEL_VARIABLES
    return list(dict.fromkeys([*(weight_collections or ()), *names]))


def _require_graph(function, layer):
    # In a tf.function of a TF2 program every trace would make new tables.
    if v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            f"sok.feature_column.{function} must be called in a tf.compat.v1 graph; eagerly and in "
            f"tf.functions make a layer once, sok.feature_column.{layer}(columns), and call it. "
            "Received: a call outside of a graph"
        )


def linear_model(
    features: dict,
    feature_columns: Any,
    units: int = 1,
    sparse_combiner: str = "sum",
    weight_collections: Any = None,
    trainable: bool = True,
    cols_to_vars: dict | None = None,
    *,
    training: bool = True,
    gradient_scale: str = "auto",
) -> tf.Tensor:
    """`tf.compat.v1.feature_column.linear_model`, also over columns with keys.

    All columns with keys are looked up as one group. Their weights start from 0, or from the
    initializer of the column's `ev_option`.

    Args:
        features, feature_columns, units, weight_collections, trainable, cols_to_vars: As in
            TensorFlow.
        sparse_combiner: "sum", "mean" or "sqrtn".
        training, gradient_scale: As in `sok.feature_column.input_layer`.

    Returns:
        float32 `[batch, units]`.

    Raises:
        RuntimeError: called eagerly or in a tf.function.
        ValueError: no columns, or the variable scope forbids a variable.
    """
    columns = sorted(old._normalize_feature_columns(feature_columns), key=lambda c: c.name)
    keyed = [column for column in columns if table_column(column) is not None]
    others = [column for column in columns if table_column(column) is None]
    variables: dict[Any, Any] = {} if cols_to_vars is None else cols_to_vars
    stock = (units, sparse_combiner, weight_collections, trainable, variables)
    if not keyed:
        return _stock(features, others, *stock)
    _require_graph("linear_model", "DenseFeatures")
    with v1.variable_scope(None, "linear_model", list(features.values())):
        options = {"trainable": trainable, "collections": _collections(weight_collections)}
        options["initializer"] = v1.zeros_initializer()
        if others:  # with the bias
            parts = [_stock(features, others, *stock)]
        else:
            bias = v1.get_variable("bias_weights", [units], **options)
            parts, variables["bias"] = [], [bias]
        # Its weights are rows of `units` floats.
        tables: dict[Any, Any] = {}
        group, stock_only = v1.get_variable_scope().name, (None,) * 4
        for column in keyed:
            keys: Any = table_column(column)
            with v1.variable_scope(None, column.name), v1.name_scope(None):
                of_keys = {"key_dtype": keys.key_dtype, "ev_option": keys.ev_option}
                table = get_embedding_variable("weights", units, **of_keys, **options)
            variables[column] = [table]
            of_table = (column, units, sparse_combiner, *stock_only, trainable, False)
            tables[GroupEmbeddingColumn(*of_table, group=group)] = table
        call = lookup.Call(tables, lookup.GraphInputs(features), training, gradient_scale)
        total = tf.add_n([*parts, *call.embeddings().values()])
        return total if others else total + bias
