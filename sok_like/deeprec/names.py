"""DeepRec's names, where DeepRec's scripts look for them, and its strategy for several ranks.

    import sok_like as sok
    import tensorflow.compat.v1 as tf

    strategy = sok.deeprec.CollectiveStrategy()    `install()`, and the ranks
    with strategy.scope():                         optimizers average, sessions start alike
        with strategy.embedding_scope():           no effect: tables are spread over the ranks
            rows = tf.nn.group_embedding_lookup_sparse(...)

TensorFlow is changed only by `install()` and in `scope()`; `uninstall()` restores it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import os
from collections.abc import Iterator
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
from sok_like.lookup import replicas
from sok_like.optimizers import deeprec as optimizers
from sok_like.optimizers.embedding_aware import knows_tables
from sok_like.optimizers.wrapper import OptimizerWrapper, train_tables
from sok_like.runtime.checks import require
from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import comm, lookup_options
from sok_like.table import policies
from sok_like.table.variable import is_embedding_variable

# DeepRec's kinds of storage, for `StorageOption`, which supports DRAM, HBM and DRAM_SSDHASH.
StorageType = enum.Enum(
    "StorageType",
    "DEFAULT DRAM PMEM_MEMKIND PMEM_LIBPMEM SSDHASH LEVELDB HBM DRAM_PMEM DRAM_SSDHASH HBM_DRAM "
    "DRAM_LEVELDB DRAM_PMEM_SSDHASH HBM_DRAM_SSDHASH",
)

CacheStrategy = enum.Enum("CacheStrategy", "LRU LFU")

_hooks: list[hooks.Hook] = []


def enable_group_embedding(fusion_type: str = "collective") -> None:
    """DeepRec's earlier name for `enable_distributed_strategy`, and for its `strategy`."""
    enable_distributed_strategy(fusion_type)


def _refused(name, instead):
    """Stands for a function or method of DeepRec that is missing here; names another way."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not in this version. {instead}")

    refuse.__name__, refuse.__doc__ = name, f"Raises NotImplementedError. {instead}"
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

    Added: this package's `get_embedding_variable`, `get_multihash_variable` and option classes,
    `config.experimental.enable_distributed_strategy`, the lookups of groups in `nn`, DeepRec's
    optimizers in `train`, and in `feature_column` its scope and its columns with keys.

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
        (tf.feature_column, "embedding_column", _make_column),
        (v1.feature_column, "embedding_column", _make_column),
        (v1.feature_column, "shared_embedding_columns", _make_column),
        (v1.feature_column, "input_layer", _use_columns),
        (v1.feature_column, "linear_model", _use_columns),
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


def _make_column(own, *args, **kwargs):
    """In place of `embedding_column` and `shared_embedding_columns`."""
    first, *_ = inspect.signature(own).bind(*args, **kwargs).arguments.values()
    # A column is itself a tuple.
    columns = [first] if isinstance(first, old._FeatureColumn) else first
    have_keys = any(table_column(column) is not None for column in columns)
    make = getattr(feature_column, own.__name__) if have_keys or current_group() else own
    return make(*args, **kwargs)


def _use_columns(own, features, feature_columns, *args, **kwargs):
    """In place of `input_layer` and `linear_model`."""
    columns = old._normalize_feature_columns(feature_columns)  # may be a generator
    ours = any(isinstance(c, GroupEmbeddingColumn) or table_column(c) is not None for c in columns)
    use = getattr(feature_column, own.__name__) if ours else own
    return use(features, columns, *args, **kwargs)


class CollectiveStrategy:
    """Training on the ranks of the job, like DeepRec's class of this name.

    It calls `sok.deeprec.install()` and `sok.enable_distributed_strategy("collective")`. In DeepRec
    the environment variable `COLLECTIVE_STRATEGY`, "sok" or "hb", chooses an engine; here both are
    the same. Unlike DeepRec's, `scope` does not change the learning rate.

    Raises:
        ValueError: `COLLECTIVE_STRATEGY` has another value.
    """

    def __init__(self) -> None:
        engine, engines = os.environ.get("COLLECTIVE_STRATEGY", "sok"), ("sok", "hb")
        require(engine in engines, "COLLECTIVE_STRATEGY", f"one of {engines}", engine)
        enable_distributed_strategy("collective")  # may raise, so it comes first
        install()

    @contextlib.contextmanager
    def scope(self, *args: Any, **kwargs: Any) -> Iterator[CollectiveStrategy]:
        """A scope in which `tf.compat.v1.train` works on ranks.

        Each optimizer's `apply_gradients` averages the gradients of ordinary variables over ranks,
        with and without tables. Losses are treated as means over the rank's own batch:
        `gradient_scale="auto"` is "mean". `MonitoredTrainingSession` gives all ranks rank 0's
        ordinary variables before the first step. Without a `config` it allows soft placement of
        ops.

        Args:
            *args, **kwargs: DeepRec's; ignored.
        """
        train, why = tf.compat.v1.train, "sok.deeprec.CollectiveStrategy.scope"
        steps = train.Optimizer, "apply_gradients", _averaging
        sessions = train, "MonitoredTrainingSession", _starting_alike
        with contextlib.ExitStack() as stack:
            for place in (steps, sessions):
                stack.callback(hooks.wrap(*place, why, copies=False).undo)
            stack.enter_context(lookup_options.losses_are_means)
            yield self

    @contextlib.contextmanager
    def embedding_scope(self, **kwargs: Any) -> Iterator[CollectiveStrategy]:
        """In DeepRec, tables must be made in it. Here it has no effect; `kwargs` are ignored."""
        yield self

    def world_size(self) -> int:
        """The number of ranks."""
        return comm.current().world_size

    def rank(self) -> int:
        """This process's rank."""
        return comm.current().rank

    estimator = _refused(
        "estimator",
        "TensorFlow has no Estimator since 2.16. Train in tf.train.MonitoredTrainingSession, or "
        "with Keras and sok.GroupEmbedding.",
    )
    export_saved_model = _refused(
        "export_saved_model",
        "A graph of tf.compat.v1 is not exported. Make the model a tf.Module or a Keras model, "
        "restore its tables by sok.Saver, and call sok.export_saved_model(model, path).",
    )


def _averaging(own, self, grads_and_vars, *args, **kwargs):
    # A class with tables calls this function with gradients that it has averaged.
    if comm.current().world_size == 1 or knows_tables(self):
        return own(self, grads_and_vars, *args, **kwargs)
    return OptimizerWrapper(self).apply_gradients(list(grads_and_vars), *args, **kwargs)


def _starting_alike(own, *args, **kwargs):
    arguments = inspect.signature(own).bind(*args, **kwargs).arguments
    arguments["hooks"] = [*(arguments.get("hooks") or []), _Broadcast()]
    if arguments.get("config") is None:  # scripts name "/gpu:0", which a machine may lack
        arguments["config"] = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    return own(**arguments)


class _Broadcast(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks rank 0's ordinary variables whenever a session is created."""

    def begin(self) -> None:
        ordinary = [v for v in tf.compat.v1.global_variables() if not is_embedding_variable(v)]
        self._assign = replicas.broadcast(ordinary, 0, "collective_strategy")

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._assign)
