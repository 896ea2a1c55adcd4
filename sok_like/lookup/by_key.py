"""TensorFlow's own lookups of an EmbeddingVariable: by key, with gradients, over ranks.

    tf.gather, tf.nn.embedding_lookup     ask the variable for rows: `sparse_read`
    tf.nn.embedding_lookup_sparse,        TensorFlow's dispatch on types calls this module
    tf.nn.safe_embedding_lookup_sparse

This module looks rows up, and TensorFlow's own function combines them. So every argument (weights,
`max_norm`, `default_id`, ...) means the same as for a dense variable.
"""

import inspect
import re
import typing
from typing import Any

import tensorflow as tf

from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.ids import FlatIds, flat_values, with_flat_values
from sok_like.lookup.keras_call import by_training, training_of_call
from sok_like.lookup.local_variables import mark_gradients
from sok_like.runtime.framework import hooks
from sok_like.runtime.ranks import comm
from sok_like.table import as_variable
from sok_like.table.keys import as_keys
from sok_like.table.variable import EmbeddingVariable as EmbeddingVariable
from sok_like.table.variable import is_embedding_variable, unwrap


def rows_by_key(variable: EmbeddingVariable, keys: Any, name: str | None = None) -> Any:
    """Rows of keys of all ranks, float32 `[..., embedding_dim]`; keys may be a RaggedTensor."""
    # Missing keys are inserted, except in a Keras call with `training=False`.
    keys = keys if tf.is_tensor(keys) else tf.convert_to_tensor(keys)
    flat = FlatIds(keys, None, hashed=True)
    name = name or re.sub(r"[^A-Za-z0-9_.]", "_", f"rows_of_{variable.table_name}")

    def rows(training):
        return lookup([HashFeature(variable, flat.ids)], training=training, name=name)[0]

    return flat.restore(by_training(training_of_call(), rows))


as_variable.look_up = rows_by_key


class OnTypeError(tf.__internal__.dispatch.OpDispatcher):
    """Answers calls in which TensorFlow cannot convert an argument, unless `answer` gives None."""

    def __init__(self, function: Any, answer: Any):
        self._function, self._signature = function, inspect.signature(function)
        self._answer = answer
        self.register(function)

    def handle(self, args: Any, kwargs: Any) -> Any:
        """What TensorFlow calls."""
        try:
            arguments = self._signature.bind(*args, **kwargs).arguments
        except TypeError:  # a mistake of the caller, which TensorFlow reports
            return self.NOT_SUPPORTED
        answer = self._answer(self._function, arguments)
        return self.NOT_SUPPORTED if answer is None else answer


def _unwrapped(function, arguments):
    """Of a table inside a variable of Keras 3, which TensorFlow takes for a tensor."""
    params = arguments.get("params")
    table = _only_table(params)
    if table is None or params is table:
        return None  # the TypeError had another cause
    return function(**{**arguments, "params": table})


def _only_table(params):
    """The EmbeddingVariable that `params` is, or the only one in a list; otherwise None."""
    if isinstance(params, (list, tuple)) and len(params) == 1:
        params = params[0]
    return unwrap(params) if is_embedding_variable(params) else None


class _IsTable(type):
    def __instancecheck__(cls, instance):
        return is_embedding_variable(instance)


class _Table(metaclass=_IsTable):
    """The type of EmbeddingVariables, including those inside a variable of Keras 3."""


def _dispatch(function, table, ids, kinds, by_key):
    """Makes TensorFlow call `by_key(table, arguments)` before `function` of sparse ids."""
    # It returns arguments without a table. For ragged ids of v1 functions a target exists already.
    signature = inspect.signature(function)
    # TensorFlow supports only this form; on Python 3.10 it takes `list[...]` for a class.
    tables = typing.Union[_Table, typing.List[_Table]]  # noqa: UP006, UP007

    @tf.experimental.dispatch_for_api(function, {table: tables, ids: kinds})
    def dispatched(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        only = _only_table(bound.arguments[table])
        if only is None:  # several tables: no rule divides keys among them
            return NotImplemented
        return function(**{**bound.arguments, **by_key(only, bound.arguments)})


def _sparse(table, arguments):
    ids = arguments["sp_ids"]
    rows = rows_by_key(table, flat_values(ids))
    return {"params": rows, "sp_ids": with_flat_values(ids, tf.range(tf.shape(rows, tf.int64)[0]))}


def _safe(table, arguments):
    """Looks up only the keys that count. Row 0 is that of `default_id`, or zeros."""
    ids, weights = arguments["sparse_ids"], arguments["sparse_weights"]
    keys, default = as_keys(flat_values(ids)), arguments["default_id"]
    counts = keys >= 0
    if weights is not None and arguments["combiner"] != "sum":
        counts &= flat_values(weights) > 0
    keys = tf.boolean_mask(keys, counts)
    if default is None:
        rows = tf.concat([tf.zeros([1, table.dim]), rows_by_key(table, keys)], 0)
    else:
        rows = rows_by_key(table, tf.concat([tf.reshape(as_keys(default), [1]), keys], 0))
    positions = tf.where(counts, tf.cumsum(tf.cast(counts, tf.int64)), -1)
    return {
        "embedding_weights": rows,
        "sparse_ids": with_flat_values(ids, positions),
        "default_id": None if default is None else 0,
    }


_EITHER = typing.Union[tf.SparseTensor, tf.RaggedTensor]  # noqa: UP007
for _nn, _kinds in ((tf.nn, _EITHER), (tf.compat.v1.nn, tf.SparseTensor)):
    OnTypeError(_nn.embedding_lookup, _unwrapped)
    _dispatch(_nn.embedding_lookup_sparse, "params", "sp_ids", _kinds, _sparse)
    _dispatch(_nn.safe_embedding_lookup_sparse, "embedding_weights", "sparse_ids", _kinds, _safe)


@hooks.at_init
def _install():
    if comm.launched_world_size() > 1:  # a program may have marked variables by itself
        hooks.at_init(mark_gradients)
