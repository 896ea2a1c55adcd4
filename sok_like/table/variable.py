"""EmbeddingVariable: this rank's shard of a table, as TensorFlow sees it.

TensorFlow sees a resource variable whose handle belongs to a table instead of a tensor: tapes watch
it, graphs capture it, `tf.train.Checkpoint` tracks it, and its gradient is
`tf.IndexedSlices(gradients, keys)`. It has no dense value to read or assign. Rows are reached by
key, through the layers, `sok.export` and `sok.assign`.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import handle_data_util, resource_variable_ops

from sok_like.runtime.framework import hooks
from sok_like.runtime.native import devices, libraries
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import check_replicas
from sok_like.table import snapshots
from sok_like.table.as_variable import AsVariable, ShownNames
from sok_like.table.as_variable import as_embedding_variable as as_embedding_variable
from sok_like.table.as_variable import is_embedding_variable as is_embedding_variable
from sok_like.table.as_variable import unwrap as unwrap
from sok_like.table.keys import as_keys
from sok_like.table.options import TableOptions
from sok_like.table.policies import EmbeddingVariableOption
from sok_like.table.policy_methods import PolicyMethods
from sok_like.table.snapshots import TableWeights, checkpointed, from_checkpoint

_unique_ids = itertools.count()
# Tables without a name that were made, by graph, or by communicator: one for each `sok.Init`.
_num_unnamed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class MemoryStats(NamedTuple):
    """Keys and bytes of a shard."""

    size: int
    capacity: int  # keys that fit before the index grows
    max_capacity: int  # 0: no limit
    num_buckets: int
    load_factor: float
    mean_probe_length: float  # buckets visited to find a key
    max_probe_length: int
    index_bytes: int
    arena_bytes: int  # rows and slot rows in memory
    bytes: int  # total in memory
    resident_bytes: int = 0  # rows on disk: their bytes in memory of the process
    file_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0  # upper bound: blocks to write may be unchanged
    blocks_evicted: int = 0  # blocks of 4 KiB that left memory


class EmbeddingVariable(
    ShownNames, AsVariable, PolicyMethods, resource_variable_ops.BaseResourceVariable
):
    """One rank's shard of a table: a hash table from 64-bit keys to rows of floats.

    Key k belongs to rank `uint64(k) % world_size`. A missing row is created from (seed, table name,
    key, column) alone. So it has the same bits whenever, wherever and on however many ranks the key
    arrives.

    Args:
        embedding_dim: Length of a row, at least 1.
        name: Name of the table, the same on all ranks; initial rows depend on it. None:
            "embedding", then "embedding_1" and so on, in the order in which tables without a name
            are made in a graph, or in the process since `sok.Init`. All ranks must make them in the
            same order.
        key_dtype: int64, int32, uint64 or uint32.
        initializer: Keras initializer or its name; see docs/semantics/keys_and_rows.md.
        capacity: Maximum number of keys per rank; None: no limit. A key beyond it raises
            `tf.errors.ResourceExhaustedError` and changes nothing.
        use_hashtable: False: no index; key k is row `k // world_size`, and keys must lie in
            `[0, capacity * world_size)`.
        initial_capacity: Number of keys to allocate at once.
        dtype: Dtype of rows in memory: float32, or bfloat16 or float16 in half the memory. Lookups,
            gradients, slot variables and dumps are float32 in any case. Given and initial rows are
            rounded to nearest. Updated rows are rounded at random (stochastic rounding), with bits
            that are drawn like initial rows. Host memory only; at most 4,096 columns. An optimizer
            that changes every row at every step, such as dense Adam, raises.
        trainable: Whether tapes watch the variable automatically.
        ev_option: sok.EmbeddingVariableOption: which keys get a row, and which lose it. Its
            initializer, if it has one, replaces `initializer`.

    The shard is on the device that TensorFlow gives its variables: on a GPU if the op library was
    built with CUDA and the process sees one. `with tf.device("/CPU:0"):` keeps it in host memory.
    Tables with `use_hashtable=False` are always there.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `ev_option` is not an EmbeddingVariableOption.
        RuntimeError: `sok.Init` has not been called; within a `tf.distribute` strategy of several
            replicas.
    """

    _shown_names: tuple[str, ...] = (
        *("name", "dtype", "device", "trainable"),  # of every tf.Variable
        *("table_name", "dim", "key_dtype", "row_dtype", "shape", "size", "bytes", "stats"),
        *("find", "export", "assign", "erase", "clear", "numpy"),
        *("evict", "pop_evicted", "assign_scores", "set_step", "get_frequency", "get_version"),
        *("statistics", "key_statistics", "total_count", "get_dynamic_shape"),
        *("m_var_name", "emb_handle", "values"),
    )
    # The only rank that holds keys, in a job of several. None: rank `key % world_size` holds a key.
    home: int | None = None
    # Returns what `tf.compat.v1.train.Saver` writes for a table. `sok_like.saving`, a higher layer,
    # sets it.
    element_in_graph: Callable[[Any], Any] | None = None
    # The dump in the background that the checkpoint which is being written refers to.
    beside: bool = False

    def __init__(
        self,
        embedding_dim: int,
        *,
        name: str | None = None,
        key_dtype: Any = tf.int64,
        initializer: Any = "random_uniform",
        capacity: int | None = None,
        use_hashtable: bool = True,
        initial_capacity: int = 0,
        dtype: Any = None,
        trainable: bool = True,
        ev_option: EmbeddingVariableOption | None = None,
    ):
        check_replicas()
        communicator, ops = comm.current(), libraries.ops()
        options = self._options = TableOptions(
            embedding_dim,
            "embedding" if name is None else name,
            key_dtype,
            initializer,
            capacity,
            use_hashtable,
            initial_capacity,
            dtype,
            trainable,
            ev_option,
        )
        self._world_size = communicator.world_size
        self.keeps_records = options.policies.keeps_records
        self.counts_occurrences = options.policies.counts_occurrences
        rows = options.rows(communicator.world_size)
        self.initial_rows = str(rows)
        shape = tf.TensorShape([options.limit, options.embedding_dim])
        with tf.init_scope():
            in_graph_mode = not tf.executing_eagerly()
            if in_graph_mode:
                hooks.open_door(hooks.SESSIONS)
            if name is None:  # nothing was wrong: a rank that failed has taken no number
                options.name = _numbered(options.name, communicator)
            name = options.name
            with tf.name_scope(name) as scope, devices.table_scope():
                # In a graph, scopes distinguish two variables of one name, as in TensorFlow.
                unique = scope.rstrip("/") if in_graph_mode else f"{name}_{next(_unique_ids)}"
                handle = ops.sok_table_handle(
                    shared_name=unique,
                    shape=shape,
                    rank=communicator.rank,
                    world_size=communicator.world_size,
                    name="handle",
                    **options.attributes(rows),
                )
                data = handle_data_util.create_handle_data(shape, tf.float32)
                handle_data_util.set_handle_data(handle, data)
                initializer_op = is_initialized = None
                if in_graph_mode:
                    initializer_op = ops.sok_table_clear(handle=handle, name="initializer")
                    is_initialized = tf.constant(True, name="is_initialized")
        super().__init__(
            trainable=trainable,
            shape=shape,
            dtype=tf.float32,
            handle=handle,
            name=name,
            handle_name=unique if in_graph_mode else name,
            unique_id=unique,
            initializer_op=initializer_op,
            is_initialized_op=is_initialized,
            in_graph_mode=in_graph_mode,
        )
        if in_graph_mode:
            collections = [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES]
            if trainable:
                collections.append(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
            tf.compat.v1.add_to_collections(collections, self)
        else:
            # The table is freed with its last reader, not at the end of the process.
            self._handle_deleter = resource_variable_ops.EagerResourceDeleter(
                handle=handle, handle_device=handle.device
            )

    @property
    def dim(self) -> int:
        """Floats per row."""
        return self._options.embedding_dim

    @property
    def key_dtype(self) -> tf.DType:
        """The dtype in which `export` returns keys."""
        return tf.as_dtype(self._options.key_dtype)

    @property
    def row_dtype(self) -> tf.DType:
        """The dtype of rows in memory; `.dtype` is that of lookups, float32."""
        return tf.as_dtype(self._options.dtype)

    @property
    def _graph_element(self):
        """The tensor that `tf.compat.v1.train.Saver` writes for the table, in a graph."""
        if not self._in_graph_mode:
            return None
        assert self.element_in_graph is not None, "sok.Init sets it"
        return self.element_in_graph(self)

    @_graph_element.setter
    def _graph_element(self, value):
        pass  # BaseResourceVariable's constructor sets it to None

    def _as_graph_element(self):
        return None  # not to be fetched by a session: there is no dense value

    @property
    def key_limit(self) -> int:
        """Keys must lie in `[0, key_limit)`; 0: every key is legal."""
        options = self._options
        return 0 if options.use_hashtable else (options.capacity or 0) * self._world_size

    @property
    def options(self) -> dict:
        """The constructor's arguments as they were given."""
        return dict(vars(self._options))

    def get_config(self) -> dict:
        """The constructor's arguments."""
        config = self.options
        if not isinstance(config["initializer"], str):
            initializer = tf.keras.initializers.get(config["initializer"])
            config["initializer"] = tf.keras.initializers.serialize(initializer)
        return config

    def __repr__(self):
        text = f"sok.EmbeddingVariable '{self.name}' dim={self.dim} key_dtype={self.key_dtype.name}"
        if tf.executing_eagerly():
            optimizer = getattr(vars(self).get("_training"), "optimizer", None)
            text += f" keys={len(self):,} bytes={int(self.bytes()):,} optimizer={optimizer}"
            text += f" on rank {comm.current().rank}" * (self._world_size > 1)
        return f"<{text}>"

    def size(self) -> tf.Tensor:
        """Number of keys on this rank, int64 scalar."""
        return libraries.ops().sok_table_size(handle=self.handle)

    def bytes(self) -> tf.Tensor:
        """Bytes of memory of this rank's shard (index, rows and slot rows), int64 scalar."""
        stats = libraries.ops().sok_table_stats(handle=self.handle)
        return tf.cast(stats[MemoryStats._fields.index("bytes")], tf.int64)

    def stats(self) -> MemoryStats:
        """Keys, capacity, load and bytes of this rank's shard. Eager only."""
        values = libraries.ops().sok_table_stats(handle=self.handle).numpy().tolist()
        fractions = ("load_factor", "mean_probe_length")
        named = zip(MemoryStats._fields, values, strict=True)
        return MemoryStats(*(v if name in fractions else int(v) for name, v in named))

    def find(self, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys in this rank's shard; inserts nothing.

        Args:
            keys: `[num_keys]`, integers.

        Returns:
            float32 `[num_keys, embedding_dim]`, and bool `[num_keys]`: whether the key was present.
            An absent key reads its initial row.
        """
        keys = tf.reshape(as_keys(keys), [-1])
        return libraries.ops().sok_table_find(handle=self.handle, keys=keys)

    def clear(self) -> Any:
        """Removes every key of this rank's shard; in a graph, returns the op that does so."""
        self.__dict__.pop("_kind_of_features", None)
        return libraries.ops().sok_table_clear(handle=self.handle)

    def record_access(self) -> None:
        """Tells tapes and graphs that the variable is about to be read."""
        # tf.distribute's strategy of one replica asks for the container first, as stock optimizers
        # do.
        with self.asked_by_known_optimizer():
            resource_variable_ops.variable_accessed(self)

    @property
    def shape(self) -> tf.TensorShape:
        """`[number of keys on this rank, embedding_dim]`, which Keras' `summary` counts.

        In a graph the number may change: `[None, embedding_dim]`.
        """
        if not tf.executing_eagerly():
            return self.get_shape()
        return tf.TensorShape([int(self.total_count()[0]), self.dim])

    def get_shape(self) -> tf.TensorShape:
        """`[None, embedding_dim]`: TensorFlow's ops do not know the number of rows."""
        return tf.TensorShape([None, self.dim])

    def numpy(self) -> TableWeights:
        """Keys and rows of this rank, from which Keras gets weights. It is not an array."""
        keys, rows = snapshots.export(self)
        return TableWeights(self.table_name, keys.numpy(), rows.numpy())

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> None:
        """Sets what `numpy()` returned, as Keras' `set_weights` does; accepts nothing else."""
        if not isinstance(value, TableWeights):  # Keras has made an array of it
            value = getattr(getattr(value, "base", None), "table_weights", None)
        if value is None:
            raise self._by_position("assign")
        snapshots.set_weights(self, value)

    def __tf_tracing_type__(self, signature_context):
        # Without the number of rows: functions are not traced again when the table has grown.
        traced = super().__tf_tracing_type__(signature_context)
        options = {"dtype": self.dtype, "trainable": self.trainable, "alias_id": traced.alias_id}
        return type(traced)(shape=self.get_shape(), **options)

    def _serialize_to_tensors(self):
        if (self._world_size > 1 or self.beside) and tf.executing_eagerly():
            return snapshots.referring(self, "")  # the save puts the name there
        return checkpointed(self.snapshot(evict=True))

    def _restore_from_tensors(self, restored_tensors):
        return self.load_snapshot(from_checkpoint(restored_tensors, self.table_name))

    def __deepcopy__(self, memo):
        with devices.device_scope(self.device):
            copied = EmbeddingVariable(**self.options)
        copied.load_snapshot(self.snapshot())
        memo[id(self)] = copied
        return copied

    def __reduce__(self):
        tensors = checkpointed(self.snapshot())
        state = {field: tensor.numpy() for field, tensor in tensors.items()}
        return _rebuild, (self.get_config(), state)


def _rebuild(config, state):
    variable = EmbeddingVariable(**config)
    variable._restore_from_tensors(state)
    return variable


def _numbered(name, communicator):
    """The name of the next table without one, numbered as Keras numbers layers."""
    owner = communicator if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    number = _num_unnamed.get(owner, 0)
    _num_unnamed[owner] = number + 1
    return f"{name}_{number}" if number else name
