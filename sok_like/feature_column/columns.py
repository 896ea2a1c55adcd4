"""`embedding_column` and `shared_embedding_columns`: stock columns with a group and a table.

    categorical column                        table
    of this package, any key                  EmbeddingVariable, sharded over all ranks
    stock, ids in [0, num_buckets)            tf.Variable [num_buckets, dimension], on each rank

The column is a stock EmbeddingColumn with two more attributes. So it also works wherever stock
columns do; there it is looked up by itself. A group is only a name that its columns store; there is
no list of members. A layer looks up those of its columns together that have the same name.
"""

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as old
from tensorflow.python.feature_column import feature_column_v2 as fc

from sok_like.feature_column.categorical import EmbeddingCategoricalColumn, table_column
from sok_like.group_embedding.lookup_sparse import group_embedding_lookup_sparse
from sok_like.group_embedding.variables import get_embedding_variable
from sok_like.runtime.checks import check_integer, require, unmet
from sok_like.runtime.framework.scoped_attributes import attributes

v1 = tf.compat.v1
WEIGHTS = "embedding_weights"  # TensorFlow's name of a column's variable
_MORE_FIELDS = ("group", "shared_name")  # of a GroupEmbeddingColumn

_here = threading.local()
_unnamed = itertools.count()


@contextlib.contextmanager
def group_embedding_column_scope(name: str | None = None) -> Iterator[str]:
    """A scope whose embedding columns are looked up together.

    Args:
        name: The group. A name that is used again adds to its group. In nested scopes the
            innermost counts. None: a new group each time.

    Yields:
        The group's name.

    Raises:
        ValueError: `name` is not a string, or is empty.
    """
    if name is None:
        name = f"group_embedding_{next(_unnamed)}"
    is_name = isinstance(name, str) and bool(name)
    require(is_name, "name", "None or a non-empty string", name)
    with attributes(_here, {"group": name}):
        yield name


def current_group() -> str | None:
    """The innermost scope's group; None outside of any scope."""
    return getattr(_here, "group", None)


def graph_weights(column: Any, weight_collections: list | None, trainable: bool) -> Any:
    """The table of a column, made if it is missing; a shared one is found anywhere in the graph."""
    shape = table_shape(column)
    shared = v1.get_collection(column.shared_name) if column.shared_name is not None else []
    if shared:
        if shared[0].shape != shape:
            raise unfit(column, f"{shared[0]!r}")
        return shared[0]
    collections = dict.fromkeys([*(weight_collections or ()), v1.GraphKeys.GLOBAL_VARIABLES])
    options: dict[str, Any] = {"trainable": column.trainable and trainable}
    options["collections"] = list(collections)
    if column.keys_column is None:
        table = v1.get_variable(WEIGHTS, shape, tf.float32, column.initializer, **options)
    else:
        with v1.name_scope(None):  # the name already contains the variable scope
            table = get_embedding_variable(WEIGHTS, **table_options(column), **options)
    if column.shared_name is not None:
        v1.add_to_collection(column.shared_name, table)
    return table


def table_shape(column: Any) -> list[int | None]:
    """Rows of a column's table, None for a hash table, and their length."""
    rows = None if column.keys_column is not None else column.categorical_column._num_buckets
    return [rows, column.dimension]


def unfit(column: Any, received: str) -> Exception:
    """The ValueError of a column with the shared name of another table."""
    required = f"have the shape {table_shape(column)} for the columns that share it"
    return unmet(f"The table of column '{column.name}'", required, received)


def table_options(column: Any) -> dict:
    """The arguments of the EmbeddingVariable of a column with keys, except its name."""
    keys = column.keys_column
    return {
        "embedding_dim": column.dimension,
        "key_dtype": keys.key_dtype,
        "initializer": column.initializer,
        "ev_option": keys.ev_option,
    }


class GroupEmbeddingColumn(fc.EmbeddingColumn):
    """See `embedding_column`."""

    group: str | None  # its name; None outside of a scope
    shared_name: str | None  # of the table that it shares with other columns

    def __new__(cls, *args, group=None, shared_name=None, **kwargs):
        column = super().__new__(cls, *args, **kwargs)
        column.group, column.shared_name = group, shared_name
        return column

    @property
    def name(self):
        kind = "embedding" if self.shared_name is None else "shared_embedding"
        return f"{self.categorical_column.name}_{kind}"

    @property
    def _var_scope_name(self):
        return self.shared_name or self.name

    @property
    def keys_column(self) -> EmbeddingCategoricalColumn | None:
        """The categorical column with keys of a hash table; None if ids are row numbers."""
        return table_column(self.categorical_column)

    def _old_get_dense_tensor_internal(self, sparse_tensors, weight_collections, trainable):
        # tf.compat.v1's input_layer calls this.
        table = graph_weights(self, weight_collections, trainable)
        if self.keys_column is None:
            return self._get_dense_tensor_internal_helper(sparse_tensors, table)
        ids, weights = sparse_tensors
        weights = None if weights is None else [weights]
        return group_embedding_lookup_sparse(
            [table], [ids], [self.combiner], sp_weights=weights, name=f"{self.name}_weights"
        )[0]

    def create_state(self, state_manager):
        shares = self.shared_name is not None and not hasattr(state_manager, "of_sok_like")
        if self.keys_column is not None or shares:
            what = "shares its table" if shares else "has a hash table"
            raise NotImplementedError(
                f"Column '{self.name}' {what}, which only layers of this package can hold: use "
                "`sok.feature_column.DenseFeatures` instead of Keras'."
            )
        super().create_state(state_manager)

    def get_config(self):
        return {**super().get_config(), **{name: getattr(self, name) for name in _MORE_FIELDS}}

    @classmethod
    def from_config(cls, config, custom_objects=None, columns_by_name=None):
        stock = {name: value for name, value in config.items() if name not in _MORE_FIELDS}
        column = super().from_config(stock, custom_objects, columns_by_name)
        for name in _MORE_FIELDS:
            setattr(column, name, config[name])
        return column


def is_fused(column: Any) -> bool:
    """Whether this package, not TensorFlow, looks the column up."""
    if not isinstance(column, GroupEmbeddingColumn):
        return False
    if column.keys_column is not None:
        return True
    stock_only = column.max_norm is not None or column.ckpt_to_load_from is not None
    return column.group is not None and not stock_only


def embedding_column(
    categorical_column: Any,
    dimension: int,
    combiner: str = "mean",
    initializer: Any = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    use_safe_embedding_lookup: bool = True,
) -> GroupEmbeddingColumn:
    """`tf.feature_column.embedding_column`, in the group of the current scope.

    Args:
        categorical_column: A column of this package, or any stock column. The table of a stock
            column is a `tf.Variable`, as in TensorFlow.
        dimension: Length of a row.
        combiner: "mean", "sum" or "sqrtn".
        initializer: Callable; None is a truncated normal distribution with standard deviation
            `1 / sqrt(dimension)`.
        ckpt_to_load_from, tensor_name_in_ckpt: As in TensorFlow; not with a hash table.
        max_norm: As in TensorFlow; not with a hash table. With it, or with a checkpoint, TensorFlow
            looks the column up by itself.
        trainable: Whether the table is a trainable variable.
        use_safe_embedding_lookup: False keeps negative ids of stock columns, and weights <= 0.

    Raises:
        ValueError: an argument is not one of these values.
    """
    rest = (ckpt_to_load_from, tensor_name_in_ckpt, max_norm, trainable, use_safe_embedding_lookup)
    return _make([categorical_column], None, dimension, combiner, initializer, *rest)[0]


def shared_embedding_columns(
    categorical_columns: Sequence,
    dimension: int,
    combiner: str = "mean",
    initializer: Any = None,
    shared_embedding_collection_name: str | None = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    use_safe_embedding_lookup: bool = True,
) -> list[GroupEmbeddingColumn]:
    """`tf.compat.v1.feature_column.shared_embedding_columns`: one table for several features.

    Columns with the same shared name share their table in a graph, or in a Keras layer.

    Args:
        categorical_columns: All with keys of one dtype, or all stock with the same number of
            buckets.
        shared_embedding_collection_name: Name of the table; default: from the columns' names.
        dimension, combiner, initializer, max_norm, trainable: As in `embedding_column`.
        ckpt_to_load_from, tensor_name_in_ckpt, use_safe_embedding_lookup: As there, too.

    Returns:
        One column per categorical column, in order.

    Raises:
        ValueError: an argument is not one of these values.
    """
    if not categorical_columns:
        raise ValueError("`categorical_columns` must hold at least one column. Received: 0")
    kinds: set[tuple] = set()
    for column in categorical_columns:
        if (keys := table_column(column)) is None:
            kinds.add(("buckets", column._num_buckets))
        else:
            kinds.add(("keys", keys.dtype.name, repr(keys.ev_option)))
    if len(kinds) > 1:
        raise ValueError(
            "`categorical_columns` must all have keys of one dtype and the same options, or all "
            "the same number of buckets. "
            f"Received: {', '.join(column.name for column in categorical_columns)} with {kinds}"
        )
    names = sorted(column.name for column in categorical_columns)
    name = shared_embedding_collection_name or "_".join(names) + "_shared_embedding"
    rest = (ckpt_to_load_from, tensor_name_in_ckpt, max_norm, trainable, use_safe_embedding_lookup)
    return _make(categorical_columns, name, dimension, combiner, initializer, *rest)


def _make(categorical_columns, shared_name, dimension, combiner, initializer, *rest):
    ckpt_to_load_from, tensor_name_in_ckpt, max_norm, _, _ = rest
    of_option = None
    for column in categorical_columns:
        if not isinstance(column, (fc.CategoricalColumn, old._CategoricalColumn)):
            raise ValueError(f"A categorical column is required. Received: {column!r}")
        keys = table_column(column)
        if keys is None:
            continue
        init_option = getattr(keys.ev_option, "init_option", None)
        of_option = None if init_option is None else init_option.initializer
        if max_norm is not None or ckpt_to_load_from is not None:
            raise ValueError(
                f"`max_norm` and `ckpt_to_load_from` must be None for column '{column.name}': rows "
                "of a hash table are combined inside the op, and restored by sok.Saver or "
                f"tf.train.Checkpoint. Received: max_norm={max_norm!r}, "
                f"ckpt_to_load_from={ckpt_to_load_from!r}"
            )
    of = f"column '{categorical_columns[0].name}'"
    check_integer("dimension", dimension, of=of)
    is_combiner = combiner in ("mean", "sum", "sqrtn")
    require(is_combiner, "combiner", "'mean', 'sum' or 'sqrtn'", combiner, of)
    if (ckpt_to_load_from is None) != (tensor_name_in_ckpt is None):
        required = "be given together"
        received = f"{ckpt_to_load_from!r} and {tensor_name_in_ckpt!r}"
        raise unmet("`ckpt_to_load_from` and `tensor_name_in_ckpt`", required, received, of)
    is_initializer = initializer is None or callable(initializer)
    require(is_initializer, "initializer", "callable", initializer, of)
    if initializer is not None and of_option is not None:
        required = "be given once, to the column or to its InitializerOption"
        raise unmet("`initializer`", required, f"{initializer!r} and {of_option!r}", of)
    default = v1.truncated_normal_initializer(0.0, 1 / math.sqrt(dimension))
    initializer = next(i for i in (initializer, of_option, default) if i is not None)
    of_table = (dimension, combiner, initializer, *rest)
    more = {"group": current_group(), "shared_name": shared_name}
    return [GroupEmbeddingColumn(column, *of_table, **more) for column in categorical_columns]
