"""`DynamicVariable`, `export` and `assign` of SOK 2.x: a hash table that grows.

    var_type    here
    "hbm"       grows without a limit, or up to `max_capacity` keys per rank; then it raises
    "hybrid"    holds `max_capacity` keys per rank; then the key seen longest ago is evicted

Both are EmbeddingVariables, in the memory of the device that TensorFlow gives its variables.
"""

import contextlib
import itertools
import warnings
from typing import Any

import tensorflow as tf

from sok_like.lookup import by_key as by_key  # makes tables readable by key
from sok_like.runtime.checks import as_integer, require, wrong_argument
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.sok2.distributed_variable import home_of
from sok_like.table import snapshots
from sok_like.table.keys import as_keys, as_rows, held_here
from sok_like.table.policies import EmbeddingVariableOption, ScoreEvict
from sok_like.table.variable import EmbeddingVariable, unwrap

_count = itertools.count()

_VAR_TYPES = ("hbm", "hybrid")
# Number of evicted rows that a rank keeps for `sparse_read_and_evict`.
_MOST_KEPT = 2**16
_SCORES = {"kLru": "lru", "kLfu": "lfu", "kCustomized": "custom"}
# Layout of HierarchicalKV's buckets and its division of memory; results do not depend on it.
_LAYOUT = (
    *("max_hbm_for_vectors", "max_bucket_size", "max_load_factor", "block_size", "io_block_size"),
    *("device_id", "io_by_cpu", "reserved_key_start_bit", "num_of_buckets_per_alloc", "api_lock"),
)


class DynamicVariable(EmbeddingVariable):
    """A table whose rows are created when their keys are first looked up.

    Args:
        dimension: Length of a row, at least 1.
        initializer: "random" (also None and ""; "hbm" draws from [0, 1), "hybrid" from a normal
            distribution), "uniform" in [0, 1), "normal", "ones", "zeros", a number as a string, or
            an initializer of `sok.EmbeddingVariable`.
        var_type: "hbm" or "hybrid"; None: "hybrid".
        name: Name of the table, the same on all ranks. Initial rows depend on it, and dumps have
            this name.
        constraint: Must be None.
        trainable: Whether tapes watch the variable automatically.
        key_type: Dtype of exported keys; "hybrid" has int64 only. None: int64.
        dtype: float32, or None for it.
        mode: None spreads keys over ranks by `key % size`; "localized:#" keeps all of them on one
            rank. Keys of such a table in a job of n ranks must be in `[0, 2**64 // n - 1)`.
        init_capacity: Number of keys to allocate at once; None: none.
        max_capacity: Maximum number of keys per rank; None: no limit for "hbm", 2**26 for "hybrid".
        evict_strategy: For "hybrid": "kLru" (None), "kLfu" or "kCustomized" (`assign_scores`).
        filter_ratio: Must be 1.0: every key gets a row.
        **kwargs: The layout of HierarchicalKV (`max_hbm_for_vectors`, `max_bucket_size`, ...),
            which does not exist here: ignored, with a warning that names them.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is unknown.
        NotImplementedError: "hybrid" with other keys than int64, or a dtype, constraint or filter
            that is not supported.

    If `init` was not called, this calls it.
    """

    _shown_names = (
        *("dimension", "key_type", "handle_dtype", "initializer_str", "backend_type", "mode"),
        *("config_dict", "target_gpu", "num_gpus", "scatter_add", "scatter_sub", "scatter_update"),
    )

    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str | None = None,
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = None,
        dtype: Any = None,
        mode: str | None = None,
        *,
        init_capacity: int | None = None,
        max_capacity: int | None = None,
        evict_strategy: str | None = None,
        filter_ratio: float = 1.0,
        **kwargs: Any,
    ):
        ensure_initialized()
        name = name or f"sok_dynamic_Variable_{next(_count)}"
        var_type = "hybrid" if var_type is None else var_type
        key_type = tf.int64 if key_type is None else tf.as_dtype(key_type)
        of, error = f"table '{name}'", NotImplementedError
        require(var_type in _VAR_TYPES, "var_type", f"one of {_VAR_TYPES} or None", var_type, of)
        if var_type == "hybrid" and key_type != tf.int64:
            raise wrong_argument("key_type", "int64 if var_type is 'hybrid'", key_type, of, error)
        if dtype is not None and tf.as_dtype(dtype) != tf.float32:
            raise wrong_argument("dtype", "float32", dtype, of, error)
        if constraint is not None:
            raise wrong_argument("constraint", "None", constraint, of, error)
        if filter_ratio != 1.0:
            required = (
                "1.0: keys cannot be admitted at random. To admit them by frequency, use "
                "sok.EmbeddingVariable(..., ev_option=sok.EmbeddingVariableOption("
                "filter_option=sok.CounterFilter(n)))"
            )
            raise wrong_argument("filter_ratio", required, filter_ratio, of, error)
        unknown = sorted(set(kwargs) - set(_LAYOUT))
        if unknown:
            raise TypeError(f"DynamicVariable has no arguments {unknown} ({of})")
        if kwargs:
            warnings.warn(
                "DynamicVariable ignores the arguments of HierarchicalKV's layout, which do not "
                f"change results. Received: {kwargs} ({of})",
                stacklevel=2,
            )
        given: dict[str, Any] = {"init_capacity": init_capacity, "max_capacity": max_capacity}
        given["evict_strategy"] = evict_strategy
        self._config_dict = {k: v for k, v in given.items() if v is not None} | kwargs
        self._var_type, self._mode, self._initializer_given = var_type, mode, initializer
        self.home = home_of(mode)
        super().__init__(
            dimension,
            name=name,
            key_dtype=key_type,
            initializer=_initializer(initializer, var_type),
            initial_capacity=init_capacity or 0,
            trainable=trainable,
            **_bounds(of, var_type, max_capacity, evict_strategy),
        )

    @property
    def size(self) -> tf.Tensor:
        """`[number of keys on this rank, dimension]`, int64 `[2]`."""
        return self.total_count()

    dimension, key_type = EmbeddingVariable.dim, EmbeddingVariable.key_dtype
    handle_dtype = EmbeddingVariable.dtype
    """Dtype of rows."""

    @property
    def backend_type(self) -> str:
        """ "hbm" or "hybrid"."""
        return self._var_type

    @property
    def config_dict(self) -> dict[str, Any]:
        """The arguments that were given after `mode`."""
        return dict(self._config_dict)

    @property
    def initializer_str(self) -> Any:
        """The `initializer` that was given."""
        return self._initializer_given

    @property
    def mode(self) -> str | None:
        """The `mode` that was given."""
        return self._mode

    @property
    def target_gpu(self) -> int:
        """The rank that holds all keys; -1 if each rank holds some."""
        return -1 if self.home is None else self.home

    @property
    def num_gpus(self) -> int:
        """The number of ranks."""
        return self._world_size

    def key_map(self, indices: Any) -> Any:
        """`indices`: keys are the same on every rank."""
        return indices

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Rows of keys, as `EmbeddingVariable.sparse_read`; every rank must call it."""
        if self.home is None or self._world_size == 1:
            return super().sparse_read(indices, name)
        from sok_like.sok2.lookup import all2all_dense_embedding

        return all2all_dense_embedding(self, indices)

    def scatter_add(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Adds `sparse_delta.values` to the rows of the keys `sparse_delta.indices`.

        Args:
            sparse_delta: tf.IndexedSlices with keys that this rank holds; values of equal keys are
                added. A missing key first gets its initial row.
            use_locking, name: Ignored.

        Returns:
            None when eager; the op in a graph.

        Raises:
            TypeError: `sparse_delta` is not a tf.IndexedSlices.
            tf.errors.InvalidArgumentError: another rank holds a key.
        """
        keys, values = self._delta(sparse_delta)
        delta = comm.distinct(tf.IndexedSlices(values, keys))
        rows, _ = self.find(delta.indices)
        return self._write(delta.indices, rows + delta.values)

    def scatter_sub(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Subtracts `sparse_delta.values`; otherwise like `scatter_add`."""
        keys, values = self._delta(sparse_delta)
        return self.scatter_add(tf.IndexedSlices(-values, keys))

    def scatter_update(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Writes `sparse_delta.values`, of equal keys the last; otherwise like `scatter_add`."""
        return self._write(*self._delta(sparse_delta))

    def _delta(self, sparse_delta):
        if not isinstance(sparse_delta, tf.IndexedSlices):
            required, of = "tf.IndexedSlices of keys", f"table '{self.table_name}'"
            raise wrong_argument("sparse_delta", required, sparse_delta, of, TypeError)
        keys = as_keys(sparse_delta.indices, "sparse_delta.indices")
        values = as_rows(sparse_delta.values, "sparse_delta.values", self.table_name)
        if self._world_size > 1:
            held = "key % size" if self.home is None else f"none: rank {self.home} holds all"
            rule = (
                f"`sparse_delta.indices` must be keys of rank {comm.current().rank}, which holds "
                f"{held} (table '{self.table_name}'); sok2.assign takes keys of any rank"
            )
            keys = checked(keys, tf.reduce_all(held_here(self, keys)), rule)
        return keys, values

    def _write(self, keys, rows):
        return libraries.ops().sok_table_assign(handle=self.handle, keys=keys, rows=rows)

    def _serialize_to_tensors(self):
        self._check_checkpointed()
        return super()._serialize_to_tensors()

    def _restore_from_tensors(self, restored_tensors):
        self._check_checkpointed()
        return super()._restore_from_tensors(restored_tensors)

    def _check_checkpointed(self):
        if self.home is not None and self._world_size > 1:
            raise NotImplementedError(
                f"tf.train.Checkpoint cannot hold table '{self.table_name}' of mode "
                f"{self._mode!r} in a job of several ranks; sok2.dump can"
            )

    def __deepcopy__(self, memo):
        raise NotImplementedError(f"Table '{self.table_name}' cannot be copied.")

    def __reduce__(self):
        raise NotImplementedError(f"Table '{self.table_name}' cannot be pickled.")

    def __repr__(self):
        return (
            f"<sok2.DynamicVariable '{self.name}' shape={self.get_shape()} "
            f"key_type={self.key_type.name} var_type={self._var_type}>"
        )


def export(var: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """This rank's keys `[size]`, ascending, and rows float32 `[size, dimension]`, on the CPU.

    Args:
        var: DynamicVariable, or a slot from `OptimizerWrapper.get_slot`.

    Raises:
        TypeError: `var` is something else.
    """
    return var.sok2_export() if hasattr(var, "sok2_export") else snapshots.export(var)


def assign(var: Any, indices: Any, values: Any) -> Any:
    """Writes rows by key and inserts missing keys; if keys repeat, the last row wins.

    Args:
        var: DynamicVariable, or a slot from `OptimizerWrapper.get_slot`.
        indices: `[num_keys]`, integers. Each rank writes the keys it holds and ignores the rest.
        values: float32 `[num_keys, dimension]`.

    Returns:
        `var` when eager, as in 2.x; the op in a graph.

    Raises:
        TypeError: `var` is something else, or keys are not integers.
        tf.errors.InvalidArgumentError: the shapes do not fit.
        tf.errors.ResourceExhaustedError: the table cannot hold all new keys; none was written.
    """
    if hasattr(var, "sok2_assign"):
        op = var.sok2_assign(indices, values)
    else:
        op = snapshots.assign(unwrap(var), indices, values)
    return var if tf.executing_eagerly() else op


def _bounds(of, var_type, max_capacity, evict_strategy):
    """The arguments of an EmbeddingVariable that limit its keys."""
    if var_type == "hbm":
        required = "None if var_type is 'hbm', which evicts nothing"
        require(evict_strategy is None, "evict_strategy", required, evict_strategy, of)
        return {"capacity": max_capacity}
    score = _SCORES.get(evict_strategy or "kLru")
    required = f"one of {tuple(_SCORES)}"
    require(score is not None, "evict_strategy", required, evict_strategy, of)
    capacity = 2**26 if max_capacity is None else max_capacity
    buffer_size = min(as_integer(capacity) or 0, _MOST_KEPT)
    evict = ScoreEvict(score)
    option = EmbeddingVariableOption(evict_option=evict, evicted_buffer_size=buffer_size)
    return {"capacity": capacity, "ev_option": option}


def _initializer(name, var_type):
    """The initializer with a name of SOK 2.x; other ones unchanged."""
    if name is None or name in ("", "random"):
        name = "uniform" if var_type == "hbm" else "normal"
    if name == "uniform":
        return tf.keras.initializers.RandomUniform(0.0, 1.0, seed=0)
    if name == "normal":
        return tf.keras.initializers.RandomNormal(0.0, 1.0, seed=0)
    if isinstance(name, str):
        with contextlib.suppress(ValueError):
            return tf.keras.initializers.Constant(float(name))
    return name
