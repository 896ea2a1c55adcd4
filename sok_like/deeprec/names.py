"""`sok.deeprec.install()` puts DeepRec's names where DeepRec's scripts look for them.

    import sok_like as sok
    import tensorflow.compat.v1 as tf

    sok.deeprec.install()
    tf.config.experimental.enable_distributed_strategy(strategy="collective")

TensorFlow is changed only by this call, and `uninstall()` restores it.
"""

from __future__ import annotations

import enum
import functools
import importlib
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as old

from sok_like import feature_column
from sok_like.feature_column.categorical import table_column
from sok_like.feature_column.columns import GroupEmbeddingColumn, current_group
from sok_like.group_embedding.lookup_sparse import (
    group_embedding_lookup,
    group_embedding_lookup_sparse,
)
from sok_like.group_embedding.variables import (
    enable_distributed_strategy,
    get_embedding_variable,
    get_multihash_variable,
)
from sok_like.optimizers import deeprec as optimizers
from sok_like.optimizers.wrapper import train_tables
from sok_like.runtime.framework import hooks
from sok_like.table import policies

# DeepRec's kinds of storage, for `StorageOption`, which supports DRAM, HBM and DRAM_SSDHASH.
StorageType = enum.Enum(
    "StorageType",
    "DEFAULT DRAM PMEM_MEMKIND PMEM_LIBPMEM SSDHASH LEVELDB HBM DRAM_PMEM DRAM_SSDHASH HBM_DRAM "
    "DRAM_LEVELDB DRAM_PMEM_SSDHASH HBM_DRAM_SSDHASH",
)

CacheStrategy = enum.Enum("CacheStrategy", "LRU LFU")

_hooks: list[hooks.Hook] = []


def enable_group_embedding(fusion_type: str = "collective") -> None:
    """DeepRec's earlier name for `enable_distributed_strategy`.

    Args:
        fusion_type: Its `strategy`.
    """
    enable_distributed_strategy(fusion_type)


def _refused(name, instead):
    """Stands for a function of DeepRec that is missing here; names another way."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not in this version. {instead}")

    refuse.__name__ = name
    return refuse


# What is added to a module of `tf` and of `tf.compat.v1`, under the values' own names.
_ADDED: dict[str, tuple[Any, ...]] = {
    "": (
        *(get_embedding_variable, get_multihash_variable, policies.CBFFilter),
        *(policies.CounterFilter, policies.EmbeddingVariableOption, policies.GlobalStepEvict),
        *(policies.InitializerOption, policies.L2WeightEvict, policies.StorageOption),
        _refused(
            "get_dynamic_dimension_embedding_variable",
            "Rows of a table have one width: give it the widest, tf.get_embedding_variable(name, "
            "embedding_dim=...), or make one table per width and look them up in one group, "
            "tf.nn.group_embedding_lookup_sparse.",
        ),
    ),
    "config.experimental": (enable_distributed_strategy, enable_group_embedding),
    "feature_column": (
        feature_column.categorical_column_with_embedding,
        feature_column.group_embedding_column_scope,
        feature_column.sequence_categorical_column_with_embedding,
        feature_column.sparse_column_with_embedding,
        _refused(
            "categorical_column_with_adaptive_embedding",
            "To keep rare keys out of the table, use categorical_column_with_embedding(key, "
            "ev_option=tf.EmbeddingVariableOption(filter_option=tf.CounterFilter(n))). For rows "
            "that rare keys share, add an embedding_column over "
            "categorical_column_with_hash_bucket(key, ...).",
        ),
        _refused(
            "categorical_column_with_multihash",
            "Use tf.get_multihash_variable(...) and tf.nn.embedding_lookup(variable, ids), which "
            "give its rows.",
        ),
    ),
    "train": (
        *(optimizers.AdagradDecayOptimizer, optimizers.AdagradDecayOptimizerV2),
        *(optimizers.AdamAsyncOptimizer, optimizers.AdamWOptimizer),
    ),
    "nn": (group_embedding_lookup, group_embedding_lookup_sparse),
}


def _added() -> list[tuple[Any, str, Any]]:
    """Tuples: a module of TensorFlow, the name to add to it, and the value."""
    # `import tensorflow.compat.v1` makes a second module, which replaces the one that was
    # `tf.compat.v1` until then. Both share all submodules.
    of_v1 = map(importlib.import_module, ("tensorflow._api.v2.compat.v1", "tensorflow.compat.v1"))
    roots = {id(module): module for module in (tf, tf.compat.v1, *of_v1)}.values()
    return [
        (functools.reduce(getattr, filter(None, path.split(".")), root), value.__name__, value)
        for root in roots
        for path, values in _ADDED.items()
        for value in values
    ]


def install() -> None:
    """Puts DeepRec's names into `tf` and `tf.compat.v1`; a second call does nothing.

    Added: `get_embedding_variable` and the option classes (`EmbeddingVariableOption`,
    `CounterFilter`, ...), `config.experimental.enable_distributed_strategy`,
    `nn.group_embedding_lookup_sparse`, `nn.group_embedding_lookup`, and in `feature_column`
    `group_embedding_column_scope`, `categorical_column_with_embedding`,
    `sequence_categorical_column_with_embedding` and `sparse_column_with_embedding`, all from this
    package.

    Wrapped, in `tf.compat.v1`, the first also in `tf`. Each is this package's in the case beside it
    and as before in all others: `feature_column.embedding_column` and `shared_embedding_columns` in
    a `group_embedding_column_scope` or over a column with keys, `feature_column.input_layer` with
    such a column, `feature_column.linear_model` over a column with keys, and
    `train.Optimizer.apply_gradients` with tables.

    From then on options count occurrences: `EmbeddingVariableOption(count="occurrences")` is the
    default until `uninstall`.

    Raises:
        RuntimeError: one of the names to be added is in use. Then nothing is changed.
    """
    places, v1 = _added(), tf.compat.v1
    for module, name, value in places:
        if getattr(module, name, value) is not value:
            raise RuntimeError(
                f"sok.deeprec.install() requires that {module.__name__} does not have '{name}'. "
                f"Received: {getattr(module, name)!r}"
            )
    for module, name, value in places:
        setattr(module, name, value)
    policies.set_default_count("occurrences")
    if _hooks:
        return
    for owner, name, wrapper in (
        (tf.feature_column, "embedding_column", _embedding_column),
        (v1.feature_column, "embedding_column", _embedding_column),
        (v1.feature_column, "shared_embedding_columns", _shared_embedding_columns),
        (v1.feature_column, "input_layer", _input_layer),
        (v1.feature_column, "linear_model", _linear_model),
        (v1.train.Optimizer, "apply_gradients", train_tables),
    ):
        why = "sok.deeprec.install(): DeepRec's meaning, for its columns and tables"
        # Where DeepRec's scripts look; TensorFlow's own callers keep its functions.
        _hooks.append(hooks.wrap(owner, name, wrapper, why, copies=False))


def uninstall() -> None:
    """Removes what `install` added; values that others have set under these names stay."""
    for module, name, value in _added():
        if getattr(module, name, None) is value:
            delattr(module, name)
    while _hooks:
        _hooks.pop().undo()
    policies.set_default_count("lookups")


# ---- wrappers of TensorFlow's functions, for groups and tables ----


def _embedding_column(own, categorical_column, *args, **kwargs):
    ours = current_group() is not None or table_column(categorical_column) is not None
    make = feature_column.embedding_column if ours else own
    return make(categorical_column, *args, **kwargs)


def _shared_embedding_columns(own, categorical_columns, *args, **kwargs):
    have_keys = any(table_column(column) is not None for column in categorical_columns)
    ours = current_group() is not None or have_keys
    make = feature_column.shared_embedding_columns if ours else own
    return make(categorical_columns, *args, **kwargs)


def _input_layer(own, features, feature_columns, *args, **kwargs):
    feature_columns = old._normalize_feature_columns(feature_columns)  # may be a generator
    ours = any(isinstance(column, GroupEmbeddingColumn) for column in feature_columns)
    make = feature_column.input_layer if ours else own
    return make(features, feature_columns, *args, **kwargs)


def _linear_model(own, features, feature_columns, *args, **kwargs):
    feature_columns = old._normalize_feature_columns(feature_columns)
    ours = any(table_column(column) is not None for column in feature_columns)
    make = feature_column.linear_model if ours else own
    return make(features, feature_columns, *args, **kwargs)
