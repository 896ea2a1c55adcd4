"""`Variable` of SOK 2.x: a dense table whose rows are spread over ranks.

    mode                 rank r of n holds
    "distributed"        rows r, r + n, r + 2 n, ...
    "localized:#"        all rows if r is #, else none

A rank's part is an ordinary resource variable `[rows here, dim]`: any optimizer of TensorFlow
trains it, and reading it reads this rank's rows. `lookup_sparse` and `all2all_dense_embedding` find
rows of all ranks.
"""

import inspect
import itertools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from sok_like.lookup.local_variables import mark_local, marked_part
from sok_like.planner import tables
from sok_like.runtime.checks import require, unmet, wrong_argument
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import check_replicas
from sok_like.table.as_variable import holder_class
from sok_like.table.options import row_initializer
from sok_like.table.variable import EmbeddingVariable, is_embedding_variable, unwrap

_count = itertools.count()


def Variable(*args: Any, mode: str | None = None, **kwargs: Any) -> Any:
    """A dense variable whose rows are spread over ranks.

    Args:
        *args, **kwargs: As for `tf.Variable`: `initial_value`, `trainable`, `name`, `dtype`, ...
            The initial value `[rows, dim]` is that of the whole table, the same on all ranks;
            `[dim]` is one row. Without one, `shape=[rows, dim]` and `initializer` make it.
        mode: "distributed" (or None), or "localized:#" with the number of a rank.

    Returns:
        This rank's part, a tf.Variable `[rows here, dim]`; `.global_shape` is that of the table.

    Raises:
        ValueError: a mode or shape is not one of these, or the rank does not exist.
        RuntimeError: `init` has not been called.
    """
    home = home_of(mode)
    if home is None:
        return DistributedVariable(*args, **kwargs)
    return LocalizedVariable(*args, target_gpu=home, **kwargs)


def home_of(mode: str | None) -> int | None:
    """The rank of mode "localized:#"; None for "distributed" and None."""
    if mode is None or mode == "distributed":
        return None
    world_size = comm.current().world_size
    kind, _, number = mode.partition(":") if isinstance(mode, str) else ("", "", "")
    if kind != "localized" or not number.isdecimal() or int(number) >= world_size:
        required = "'distributed' or 'localized:#' with the number of one of the "
        raise wrong_argument("mode", f"{required}{world_size} ranks", mode)
    return int(number)


class ShardedVariable(ResourceVariable):
    """This rank's rows; `global_gpu_id` is this rank, `target_gpu` that of all rows, or -1."""

    _keras_variable: Any = None

    def __init__(
        self, *args: Any, initializer: Any = None, target_gpu: int | None = None, **kwargs: Any
    ):
        check_replicas()
        communicator = comm.current()
        self.global_gpu_id, self.num_gpus = communicator.rank, communicator.world_size
        # As in an EmbeddingVariable: the rank that has all rows, or None.
        self.home = None if target_gpu is None else home_of(f"localized:{target_gpu}")
        self.target_gpu = -1 if self.home is None else self.home
        arguments = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        arguments["name"] = arguments.get("name") or f"sok_static_Variable_{next(_count)}"
        self.table_name = name = arguments["name"]
        self._of = f"variable '{name}'"
        if self.num_gpus > 1 and self.home is None:
            constraint = {"constraint": arguments.get("constraint")}
            tables.check_cut(constraint, tables.ROWS, name, "mode='localized:#'")
        for argument in ("variable_def", "import_scope"):
            if arguments.get(argument) is not None:
                required = "None: a variable is made from its rows"
                raise wrong_argument(argument, required, arguments[argument], self._of)
        value, dtype = arguments.pop("initial_value", None), arguments.get("dtype")
        rows = self._rows_of(value, arguments.pop("shape", None), initializer, dtype)
        super().__init__(tf.cast(rows, dtype) if dtype is not None else rows, **arguments)
        mark_local(self)

    def _rows_of(self, value, shape, initializer, dtype):
        """Sets the global shape, and returns the rows of this rank."""
        if [shape is not None, initializer is not None] != [value is None] * 2:
            required = "both be given if there is no initial value"
            required = required if value is None else "be None if an initial value is given"
            rule, received = required, f"shape={shape}, initializer={initializer!r}"
            raise unmet("`shape` and `initializer`", rule, received, self._of)
        if value is not None:
            value = value() if callable(value) and not isinstance(value, tf.Variable) else value
            value = np.asarray(value) if isinstance(value, (list, tuple)) else value
            value = tf.convert_to_tensor(value)
            value = value[tf.newaxis] if value.shape.rank == 1 else value
            dims = value.shape
            is_table = dims.rank == 2 and dims.is_fully_defined() and dims[1] >= 1
            required = "of a known shape [rows, dim], or [dim] for one row"
            require(is_table, "initial_value", required, dims, self._of)
            self._global_shape = tuple(dims.as_list())
            with tf.device(value.device if tf.executing_eagerly() else None):
                return tf.gather(value, self._rows_here())
        dims = tf.TensorShape(shape)
        is_legal = dims.rank == 2 and dims.is_fully_defined() and min(dims) >= 1
        require(is_legal, "shape", "[rows, dim]", shape, self._of)
        self._global_shape = rows, dim = tuple(dims.as_list())
        is_function = not isinstance(initializer, str) and not hasattr(initializer, "get_config")
        by_row = None if is_function else row_initializer(initializer, dim, rows)
        depends_on_position = by_row is None or by_row.kind == "default_rows"
        if not depends_on_position and tf.compat.v1.executing_eagerly_outside_functions():
            # Drawn like rows of tables: the same on any number of ranks, and no rank draws the
            # others' rows.
            with tf.init_scope():
                table = EmbeddingVariable(
                    dim, name=self.table_name, initializer=by_row, trainable=False
                )
                return table.find(self._rows_here())[0]
        initializer = tf.keras.initializers.get(initializer)
        whole_table = initializer(shape=(rows, dim), dtype=dtype or tf.float32)
        return tf.gather(tf.convert_to_tensor(whole_table), self._rows_here())

    def _rows_here(self):
        rows = self._global_shape[0]
        if self.home is None:
            return np.arange(self.global_gpu_id, rows, self.num_gpus)
        return np.arange(rows if self.home == self.global_gpu_id else 0)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Rows by their number in this rank's part; norms recognize the gradient as a part's."""

        @tf.custom_gradient
        def read(indices):
            rows = super(ShardedVariable, self).sparse_read(indices, name)

            def back(gradient, variables=None):
                if not variables:  # not trainable
                    return None
                flat = tf.reshape(indices, [-1])
                values = tf.reshape(gradient, [tf.size(flat), self.dim])
                shape = tf.constant(self.shape.as_list())
                return None, [marked_part(tf.IndexedSlices(values, flat, shape))]

            return rows, back

        return read(tf.convert_to_tensor(indices))

    @property
    def global_shape(self) -> tuple[int, int]:
        """`(rows, dim)` of the whole table."""
        return self._global_shape

    @property
    def dim(self) -> int:
        """Number of columns of the table."""
        return self._global_shape[1]

    def key_map(self, indices: Any) -> Any:
        """The row numbers, within their rank's part, of rows `indices` of the table."""
        return indices // self.num_gpus if self.home is None else indices

    def as_weight(self) -> Any:
        """As `EmbeddingVariable.as_weight`."""
        if not is_keras_3():
            return self
        if self._keras_variable is None:
            self._keras_variable = mark_local(holder_class()(self, tuple(self.shape)))
        return self._keras_variable

    def __deepcopy__(self, memo):
        raise NotImplementedError(f"Variable '{self.table_name}' cannot be copied.")


class DistributedVariable(ShardedVariable):
    """A `Variable` whose rows r, r + n, r + 2 n, ... are on rank r of n.

    Raises:
        ValueError, RuntimeError: As for `Variable`, whose arguments it takes, except `mode`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        if kwargs.get("target_gpu") is not None:
            raise ValueError("`target_gpu` is an argument of LocalizedVariable")
        super().__init__(*args, **kwargs)


class LocalizedVariable(ShardedVariable):
    """A `Variable` whose rows are all on one rank, none on others.

    Args:
        target_gpu: Number of the rank.
        *args, **kwargs: As for `Variable`, without `mode`.

    Raises:
        ValueError, RuntimeError: As for `Variable`; also if the rank does not exist.
    """

    def __init__(self, *args: Any, target_gpu: int, **kwargs: Any):
        super().__init__(*args, target_gpu=target_gpu, **kwargs)


def is_static(variable: Any) -> bool:
    """Whether a variable was made by `Variable`, even if Keras 3 has wrapped it."""
    return isinstance(getattr(variable, "_value", variable), ShardedVariable)


def own_variable(variable: Any, rule: str) -> Any:
    """The table inside a variable of sok2; TypeError, which begins with `rule`, for another one."""
    if is_static(variable):
        return getattr(variable, "_value", variable)
    if not is_embedding_variable(variable):
        raise TypeError(f"{rule}. Received: {variable!r}")
    return unwrap(variable)
