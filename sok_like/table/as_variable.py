"""What TensorFlow asks of a variable, and what a table answers.

TensorFlow's own lookups read rows with `sparse_read`, which finds them by key. A table has no dense
value: every read of one raises `NoDenseValue` and names a function to use instead. It is a
TypeError because TensorFlow's dispatch, on a TypeError, asks `sok_like.lookup.by_key` to do the
same by key.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import check_replicas
from sok_like.table.keys import as_keys, held_here
from sok_like.table.options import TableOptions

# (variable, keys, name) -> rows. `sok_like.lookup.by_key`, a higher layer, sets it.
look_up: Callable[[Any, Any, Any], Any] | None = None


# .handles: in a thread that exports a model, those that stand for tables, by the table's `id`.
stand_ins = threading.local()


def _unreadable(what):
    def read(self, *args, **kwargs):
        raise self._no_dense_value(what)

    return read


class AsVariable:
    """Methods of an EmbeddingVariable that TensorFlow calls on any variable."""

    _trained_by_sok = False
    is_partitioned = False  # True if made with a partitioner, whose parts scripts ask for
    _handle: Any
    _options: TableOptions

    @property
    def handle(self) -> Any:
        """The table's resource; TensorFlow places ops beside it."""
        return vars(stand_ins).get("handles", {}).get(id(self), self._handle)

    @property
    def table_name(self) -> str:
        """The name that initial rows depend on; `.name` is what TensorFlow made of it."""
        return self._options.name

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """float32 rows of keys of all ranks, with a gradient; every rank must call it."""
        assert look_up is not None, "sok.Init and sok.EmbeddingVariable load it"
        return look_up(self, indices, name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """Rows of keys `[..., 1]`; a longer last axis would index elements of a row."""
        indices = tf.convert_to_tensor(indices)
        if indices.shape.rank is None or indices.shape[-1] != 1:
            raise self._no_dense_value(f"gather_nd with indices of shape {indices.shape}")
        return self.sparse_read(tf.squeeze(indices, -1), name)

    def __getitem__(self, key):
        number = tf.is_tensor(key) and key.dtype.is_integer and key.shape.rank == 0
        if not number and (isinstance(key, bool) or not isinstance(key, (int, np.integer))):
            raise self._no_dense_value(f"variable[{key!r}]; one integer key is required")
        return self.sparse_read(key)

    def __len__(self):
        """The number of keys on this rank, as `size()`; no truth value, an empty table has none."""
        if not tf.executing_eagerly():
            raise TypeError(
                f"A graph does not know how many keys table '{self.table_name}' will have: use "
                "`variable.size()`. Received: len(variable)"
            )
        return int(self.total_count()[0])  # `size` of a sok2.DynamicVariable is something else

    def __contains__(self, key):
        keys = as_keys(key, "key")
        if keys.shape.rank != 0 or not tf.executing_eagerly():
            raise TypeError(
                "`key in variable` takes one key, eagerly; `variable.find(keys)[1]` says the same "
                f"of many, also in graphs. Received: {key!r} (table '{self.table_name}')"
            )
        if comm.current().world_size > 1 and not held_here(self, keys):
            raise ValueError(
                "`key in variable` asks this rank alone, and another one holds the key. Received: "
                f"key {int(keys)} of table '{self.table_name}' on rank {comm.current().rank}"
            )
        return bool(self.find(keys)[1])

    # Python would read rows 0, 1, 2, ... backwards.
    __reversed__ = None

    def _no_dense_value(self, what):
        return TypeError(
            f"EmbeddingVariable '{self.table_name}' has no dense value: its rows are found by key, "
            "not by position. `tf.nn.embedding_lookup(variable, keys)`, `tf.gather(variable, keys)`"
            " and `variable[key]` read rows, and have gradients; `sok.export(variable)` returns "
            f"the keys and rows of this rank. Received: {what}"
        )

    _read_variable_op = _unreadable("a read of the whole variable")
    value = _unreadable("variable.value()")
    read_value = _unreadable("variable.read_value()")
    initialized_value = _unreadable("variable.initialized_value()")
    _dense_tensor_conversion = _unreadable("a conversion to a tensor")
    __array__ = _unreadable("a conversion to a NumPy array")
    __bool__ = _unreadable("the truth value of a variable")

    def read_value_no_copy(self):
        # TensorFlow's lookups use this; then they ask it for rows, or convert it, which raises.
        return self

    def __iter__(self):
        if self.is_partitioned:  # behaves as a PartitionedVariable, with one part
            return iter([self])
        raise self._no_dense_value("an iteration")

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """True: a table is ready when it is created; in a graph, once its initializer has run."""
        return tf.constant(True, name=name)

    # Comparing elements would be a read as well; a list finds a variable by identity.

    def __eq__(self, other):
        return self is other

    __ne__, __hash__ = object.__ne__, object.__hash__

    def _export_to_saved_model_graph(self, *args, **kwargs):
        raise NotImplementedError(
            f"EmbeddingVariable '{self.table_name}' cannot be part of a SavedModel that TensorFlow "
            "or Keras writes: it would hold no rows of the table. `sok.export_saved_model(model, "
            "path)` writes one that any TensorFlow serves; to go on training, `sok.Saver` and "
            "tf.train.Checkpoint keep the table. Received: an export to a SavedModel "
            "(model.export, tf.saved_model.save, save_format='tf')"
        )

    def _by_position(self, method):
        return NotImplementedError(
            f"EmbeddingVariable '{self.table_name}' cannot be assigned by position: its rows are "
            "found by key. `sok.assign(variable, keys, rows)` writes rows; to train them, wrap the "
            f"optimizer, `sok.OptimizerWrapper(optimizer)`. Received: variable.{method}(...)"
        )

    @property
    def _distributed_container(self):
        # Optimizers ask for this first, to name the state they are about to allocate (dense state,
        # for a stock one). tf.distribute asks, too, before it updates a variable.
        check_replicas()
        self._refuse_stock_optimizer()
        raise AttributeError("_distributed_container")

    @property
    def constraint(self):
        # This is all that v1 optimizers without slots ask for before an update.
        self._refuse_stock_optimizer()
        return None

    def _refuse_stock_optimizer(self):
        if not self._trained_by_sok:
            raise NotImplementedError(
                f"A stock optimizer cannot update EmbeddingVariable '{self.table_name}': its rows "
                "are found by key and live in a hash table. Wrap the optimizer, "
                "`sok.OptimizerWrapper(optimizer)`, or use `sok.tf.keras.optimizers.Adam`."
            )

    def _ref(self):
        # v1 optimizers differentiate with respect to this.
        return self.handle

    @contextlib.contextmanager
    def asked_by_known_optimizer(self):
        """A scope in which an optimizer that supports tables may ask as stock ones do."""
        # Threads that look up one table meet here: no attribute may disappear.
        before, self._trained_by_sok = self._trained_by_sok, True
        try:
            yield
        finally:
            self._trained_by_sok = before

    @property
    def m_var_name(self) -> str:
        """The table's name, as it appears in names of dump files."""
        return self.table_name

    @property
    def emb_handle(self) -> Any:
        """The resource handle of the table."""
        return self.handle

    @property
    def values(self) -> tuple[Any]:
        """The variables of the replicas in this process: there is one."""
        return (self,)


def _refused(method):
    def refuse(self, *args, **kwargs):
        raise self._by_position(method)

    return refuse


for _method in (
    *("assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update"),
    *("scatter_min", "scatter_max", "scatter_mul", "scatter_div", "scatter_nd_add"),
    *("scatter_nd_sub", "scatter_nd_update", "batch_scatter_update", "count_up_to"),
):
    setattr(AsVariable, _method, _refused(_method))


def unwrap(variable: Any) -> Any:
    """The EmbeddingVariable inside a Keras 3 variable; any other object unchanged."""
    inner = getattr(variable, "_embedding_variable", None)
    return variable if inner is None else inner


def is_embedding_variable(variable: Any) -> bool:
    """Whether it is an EmbeddingVariable, possibly wrapped by Keras 3."""
    return isinstance(unwrap(variable), AsVariable)


def as_embedding_variable(variable: Any, argument: str = "variable") -> Any:
    """The EmbeddingVariable itself; raises TypeError for anything else."""
    if not is_embedding_variable(variable):
        raise wrong_argument(argument, "an EmbeddingVariable", variable, error=TypeError)
    return unwrap(variable)


class _ShowsNames(type(resource_variable_ops.BaseResourceVariable)):  # type: ignore[misc]
    # `dir` shows names for users (docs/reference/tables.md), of the hundred that a tf.Variable has.
    def __dir__(cls):
        shown = {name for base in cls.__mro__ for name in vars(base).get("_shown_names", ())}
        return sorted(shown | set(dir(object)))


class ShownNames(metaclass=_ShowsNames):
    """Makes `dir` of a class and its objects show `_shown_names`, also those of base classes."""

    _shown_names: tuple[str, ...] = ()

    def __dir__(self):
        return dir(type(self))
