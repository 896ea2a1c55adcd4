"""`sok.get_embedding_variable`: tables by name, as in DeepRec.

Tables are stored by their full name (the variable scope's and their own). In a graph they belong to
the graph, eagerly to what `sok.Init` set up. Asking again returns the same table.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import tensorflow as tf

from sok_like.lookup import by_key as by_key  # makes its tables readable by key
from sok_like.runtime.checks import require, wrong_argument
from sok_like.runtime.ranks import comm, communication_dtype
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.table.keys import as_key_dtype
from sok_like.table.policies import (
    EmbeddingVariableOption,
    InitializerOption,
    with_steps_to_live,
)
from sok_like.table.variable import EmbeddingVariable

_DEFAULT_INITIALIZER = "random_uniform"

# Eager tables by communicator. If `sok.Init` replaces it, its tables go with it.
_eager: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def get_embedding_variable(
    name: str,
    embedding_dim: int,
    key_dtype: Any = tf.int64,
    value_dtype: Any = None,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
    collections: Any = None,
    caching_device: Any = None,
    partitioner: Any = None,
    validate_shape: bool = True,
    custom_getter: Any = None,
    constraint: Any = None,
    init_data_source: Any = None,
    ev_option: EmbeddingVariableOption | None = None,
    *,
    steps_to_live: int | None = None,
    capacity: int | None = None,
) -> EmbeddingVariable:
    """The table of this name: the first call makes it, later calls return it.

    Within `tf.compat.v1.variable_scope` the name begins with the scope's. A scope with `reuse=True`
    returns existing tables only.

    Args:
        name: Name of the table, the same on all ranks.
        embedding_dim: Length of a row, at least 1.
        key_dtype: int64, int32, uint64 or uint32.
        value_dtype: Dtype of rows in memory: None or float32, bfloat16 or float16, see `dtype` of
            `sok.EmbeddingVariable`. Lookups are float32 in any case.
        initializer: Keras initializer or its name. That of `ev_option.init_option` replaces it, as
            in DeepRec. None: the variable scope's, or else "random_uniform" (-0.05 to 0.05).
        regularizer, constraint, custom_getter, init_data_source: Must be None, also in the variable
            scope: a hash table has no dense value for them.
        trainable: Whether tapes watch the variable automatically.
        collections: In a graph, further collections for the table; must include GLOBAL_VARIABLES,
            to which it always belongs.
        caching_device, partitioner, validate_shape: Ignored: a table is spread over all ranks, read
            in place, and has no shape to validate. With a partitioner, iterating over the table
            yields it as the only part.
        ev_option: sok.EmbeddingVariableOption.
        steps_to_live: DeepRec's older form of `GlobalStepEvict(steps_to_live)`; None or 0: none.
        capacity: Maximum number of keys per rank; None: no limit.

    Raises:
        ValueError: an argument is out of range or would be ignored, or a table of this name has
            other settings.
        TypeError: `ev_option` is not an EmbeddingVariableOption.
    """
    scope = tf.compat.v1.get_variable_scope()
    is_name, of = isinstance(name, str) and bool(name), f"table '{name}'"
    require(is_name, "name", "a string that is not empty", name)
    if ev_option is not None and not isinstance(ev_option, EmbeddingVariableOption):
        required = "a sok.EmbeddingVariableOption"
        raise wrong_argument("ev_option", required, ev_option, of, error=TypeError)
    global_variables = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
    holds_it = collections is None or global_variables in collections
    required = f"a list with '{global_variables}', whose initializer makes the table ready"
    require(holds_it, "collections", required, collections, of)
    refused = {
        "regularizer": regularizer or scope.regularizer,
        "constraint": constraint or scope.constraint,
        "custom_getter": custom_getter or scope.custom_getter,
        "init_data_source": init_data_source,
    }
    for argument, value in refused.items():
        require(value is None, argument, "None: hash tables do not support it", value, of)
    of_option = ev_option.init_option.initializer if ev_option and ev_option.init_option else None
    ev_option = with_steps_to_live(ev_option, steps_to_live, of)
    full_name = f"{scope.name}/{name}" if scope.name else name
    ensure_initialized()
    initializers = (of_option, initializer, scope.initializer, _DEFAULT_INITIALIZER)
    options = {
        "embedding_dim": embedding_dim,
        "name": full_name,
        "key_dtype": as_key_dtype(key_dtype, full_name).name,
        "dtype": communication_dtype.check(value_dtype, f"table '{full_name}'", "value_dtype")
        or "float32",
        "initializer": next(choice for choice in initializers if choice is not None),
        "capacity": capacity,
        "trainable": trainable,
        "ev_option": ev_option,
    }
    with tf.init_scope():
        tables = _tables()
        table = tables.get(full_name)
        if table is None:
            if scope.reuse is True:
                raise ValueError(
                    f"In a scope with reuse=True, table '{full_name}' must exist. "
                    f"Received: {sorted(tables) or 'no table'}"
                )
            table = tables[full_name] = EmbeddingVariable(**options)
            if not tf.executing_eagerly():
                for collection in collections or ():
                    tf.compat.v1.get_default_graph().add_to_collections([collection], table)
        for argument, value in options.items():
            if _comparable(table.options[argument]) != _comparable(value):
                raise ValueError(
                    f"Table '{full_name}' exists with {argument}={table.options[argument]!r}. "
                    f"Received: {argument}={value!r}"
                )
        table.is_partitioned |= partitioner is not None
        return table


def _tables() -> dict:
    """Tables by full name, of the current graph or of the eager program."""
    owner: Any = comm.current()
    if tf.executing_eagerly():
        return _eager.setdefault(owner, {})
    graph: Any = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "_sok_tables"):
        graph._sok_tables = {}
    return graph._sok_tables


def _comparable(value):
    """Equal for equal settings; initializers, which compare by identity, by their config."""
    if isinstance(value, EmbeddingVariableOption):
        init = value.init_option or InitializerOption()
        init = dataclasses.replace(init, initializer=_comparable(init.initializer))
        return dataclasses.replace(value, init_option=init)
    if hasattr(value, "get_config") and not isinstance(value, type):
        return type(value), repr(sorted(value.get_config().items()))
    return value
