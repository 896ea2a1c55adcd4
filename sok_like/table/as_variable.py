"""What TensorFlow and Keras ask of a variable, and what a table answers.

TensorFlow's own lookups read rows with `sparse_read`, which finds them by key. A table has no dense
value: every read of one raises `NoDenseValue` and names a function to use instead. It is a
TypeError because TensorFlow's dispatch, on a TypeError, asks `sok_like.lookup.by_key` to do the
same by key.

tf_keras tracks a `tf.Variable` as it is. Keras 3 tracks only its own variables, so there one of
them wraps the table, and passes on the handle that tapes and graphs look at.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python.ops import resource_variable_ops

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import check_replicas
from sok_like.table.keys import as_keys, held_here
from sok_like.table.options import TableOptions

# (variable, keys, name) -> rows. `sok_like.lookup.by_key`, a higher layer, sets it.
look_up: Callable[[Any, Any, Any], Any] | None = None
# .exporting: the `lookup.exporting.Exporting` of a thread that exports a model; its `handles` stand
# for those of tables, by the table's `id`.
this_thread = threading.local()


def _refusing(error, received):
    """A method that raises what the method `error` makes of `received`."""

    def refuse(self, *args, **kwargs):
        raise getattr(self, error)(received)

    return refuse


class AsVariable:
    """Methods of an EmbeddingVariable that TensorFlow calls on any variable."""

    _trained_by_sok = False
    is_partitioned = False  # True if made with a partitioner, whose parts scripts ask for
    _handle: Any
    _keras_variable: Any = None
    _options: TableOptions

    @property
    def handle(self) -> Any:
        """The table's resource; TensorFlow places ops beside it."""
        export = getattr(this_thread, "exporting", None)
        return self._handle if export is None else export.handles.get(id(self), self._handle)

    def as_weight(self) -> Any:
        """This table as a weight of a layer: `self.table = variable.as_weight()`.

        Keras 3 tracks only its own variables, so there it is one of them that holds this table, the
        same one each time. tf_keras and tf.Module track an EmbeddingVariable as it is.
        """
        if not is_keras_3():
            return self
        held = self._keras_variable and self._keras_variable()
        if held is None:
            held = _wrapper_class()(self)
            # Weak, as it refers to the table. Layers that share a table list one wrapper.
            self._keras_variable = weakref.ref(held)
        return held

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

    _read_variable_op = _refusing("_no_dense_value", "a read of the whole variable")
    value = _refusing("_no_dense_value", "variable.value()")
    read_value = _refusing("_no_dense_value", "variable.read_value()")
    initialized_value = _refusing("_no_dense_value", "variable.initialized_value()")
    _dense_tensor_conversion = _refusing("_no_dense_value", "a conversion to a tensor")
    __array__ = _refusing("_no_dense_value", "a conversion to a NumPy array")
    __bool__ = _refusing("_no_dense_value", "the truth value of a variable")

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


for _method in (
    *("assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update"),
    *("scatter_min", "scatter_max", "scatter_mul", "scatter_div", "scatter_nd_add"),
    *("scatter_nd_sub", "scatter_nd_update", "batch_scatter_update", "count_up_to"),
):
    setattr(AsVariable, _method, _refusing("_by_position", _method))


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


@functools.cache
def holder_class():
    """The class of Keras 3 variables whose value is a given variable with a `table_name`."""
    import keras

    class HeldVariable(keras.Variable):
        """A Keras 3 variable whose value is another variable."""

        def __init__(self, variable, shape):
            self._held = variable
            super().__init__(
                initializer=lambda *args, **kwargs: None,  # never called: see _initialize
                shape=shape,
                dtype=variable.dtype.name,
                trainable=variable.trainable,
                autocast=False,
                name=variable.table_name.replace("/", "_"),
            )

        def _initialize_with_initializer(self, initializer=None):
            self._value = self._held

        _deferred_initialize = _initialize_with_initializer

    return HeldVariable


@functools.cache
def _wrapper_class():
    class KerasEmbeddingVariable(holder_class()):
        """A Keras 3 variable whose value is an EmbeddingVariable."""

        def __init__(self, variable):
            self._embedding_variable = variable
            super().__init__(variable, (0, variable.dim))

        @property
        def shape(self):
            return self._embedding_variable.shape

        def assign(self, value):
            self._embedding_variable.assign(value)
            return value

        def __tf_tracing_type__(self, context):
            # tf.function would otherwise convert its argument to an array, which raises.
            return default_types.Weakref(weakref.ref(self))

        __reversed__, __eq__ = None, AsVariable.__eq__
        __ne__, __hash__ = object.__ne__, object.__hash__

        def __getattr__(self, name):
            # Attributes of a table that a Keras variable does not have: size, stats, find, ...
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._embedding_variable, name)

    def of_table(name):
        return lambda self, *args, **kw: getattr(self._embedding_variable, name)(*args, **kw)

    # Without `__iter__`, Python would ask for rows 0, 1, 2, ... forever.
    special = ("__array__", "__iter__", "__len__", "__contains__", "__repr__")
    for name in (*special, "assign_add", "assign_sub"):
        setattr(KerasEmbeddingVariable, name, of_table(name))
    return KerasEmbeddingVariable
