"""The core on NumPy arrays, without TensorFlow.

Keys are one-dimensional integer arrays; every key in the range of `key_dtype` is legal. Rows are
float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

# fmt: off

def set_num_threads(num_threads: int) -> None:
    """Sets the number of threads of later calls, including the calling thread."""

def num_threads() -> int: ...

class SlotVariableSpec:
    """A slot variable: `width` floats kept behind each row.

    Args:
        name: Unique within a table.
        width: Floats per row, positive.
        initial: Value in a new row.
        saved: False for derived state that an export leaves out.
    """

    def __init__(
        self, name: str, width: int, *, initial: float = 0.0, saved: bool = True
    ) -> None: ...
    name: Final[str]
    width: Final[int]
    initial: Final[float]
    saved: Final[bool]

class ReplayedSteps:
    """The steps that deltas have logged, for rows of the dumps before them.

    Args:
        dim: Row width.
        slot_names, slot_widths: Of the slots that lie side by side in slot rows.
        segments: One per delta: rule, options as of `apply_gradients`, and steps float64
            `[num_runs, 3]`: count (0: every row was brought up to date), learning rate, number of
            the first.
    """

    def __init__(
        self, dim: int, slot_names: Sequence[str], slot_widths: Sequence[int],
        segments: Sequence[tuple[str, Mapping[str, Any], NDArray[np.float64]]]
    ) -> None: ...
    def bring_up(
        self, dump: int, rows: NDArray[np.float32], slot_rows: NDArray[np.float32]
    ) -> None:
        """Brings up rows `[num_rows, dim]` and slot rows of a dump, 0 for the base, in place."""

class _AnyTable:  # not a class at run time
    """The common part of `Table` and `CudaTable`. Reading the size of a CudaTable waits."""

    name: Final[str]
    dim: Final[int]
    key_dtype: Final[str]
    size: Final[int]  # number of keys present
    def __len__(self) -> int: ...
    capacity: Final[int]  # number of keys that fit before the index grows
    slots: Final[list[SlotVariableSpec]]
    keeps_records: Final[bool]  # whether the table has policies
    def pop_evicted(self) -> dict[str, Any]:
        """Buffered evicted rows, oldest first: `keys`, `rows`, `slot_rows`, `slot_names`,
        `frequencies`, `last_steps`. They are in host memory."""
    def set_step(self, step: int) -> None:
        """Sets the step; the next training lookup is `step + 1`."""

class Table(_AnyTable):
    """One rank's shard of a table. Safe to use from several threads.

    Args:
        name: Initial rows depend on it.
        dim: Floats in a row's embedding, positive.
        key_dtype: `"int64"`, `"int32"`, `"uint64"` or `"uint32"`.
        row_dtype: `"float32"`, `"bfloat16"` or `"float16"`, how rows lie in memory. Slot rows and
            all arrays are float32.
        initializer: `"uniform"` over [a, b), `"normal"` and `"truncated_normal"` with mean `a` and
            standard deviation `b`, `"constant"` a, or `"default_rows"`.
        default_rows: `[num_default_rows, dim]`; key k starts from row
            `uint64(k) % num_default_rows`.
        seed: An initial row depends only on `seed`, `name`, key and column.
        initial_capacity: Number of keys for which memory is allocated at first.
        max_capacity: Maximum number of keys; 0 for no limit.
        use_hashtable: False for keys in `[0, max_capacity * world_size)` with
            `key % world_size == rank`. All their rows exist from the start.
        policy: Which keys get a row and which lose it, by name: `filter_freq`, `max_waiting`,
            `bloom_max_keys`, `bloom_probability`, `bloom_counter_bits`, `no_permission`,
            `steps_to_live`,
            `l2_threshold`, `score` ("", "lru", "lfu", "custom"), `evicted_buffer`, `record`
            (cpp/core/policy.h). With a policy `find_or_insert` is a training lookup, and the
            methods from `observe` on may be called.

    Raises:
        ValueError: An argument is out of range; the message names it.
    """

    def __init__(
        self, name: str, dim: int, *, key_dtype: str = "int64",
        row_dtype: str = "float32", initializer: str = "uniform",
        a: float = -0.05, b: float = 0.05, default_rows: ArrayLike | None = None, seed: int = 0,
        initial_capacity: int = 0, max_capacity: int = 0, use_hashtable: bool = True,
        rank: int = 0, world_size: int = 1, policy: Mapping[str, bool | int | float | str] = ...
    ) -> None: ...
    def configure_slots(self, specs: Sequence[SlotVariableSpec]) -> None:
        """Sets the slot variables behind the rows, keeping those of equal name and width."""
    def find(self, keys: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Reads rows; a missing key reads its initial row and is not inserted.

        Args:
            keys: `[num_keys]`; keys may repeat.

        Returns:
            Rows `[num_keys, dim]`, and whether each key was present `[num_keys]`.

        Raises:
            ValueError: A key does not fit in `key_dtype`.
            IndexError: Without hashtable, a key is outside the range of this rank.
        """
    def find_or_insert(self, keys: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Reads rows, inserting missing keys with their initial rows.

        Returns:
            Rows `[num_keys, dim]`, and a flag that is true at the first position of each new key.

        Raises:
            ValueError: `max_capacity` would be exceeded; nothing was inserted.
        """
    def assign(self, keys: ArrayLike, rows: ArrayLike) -> None:
        """Writes rows `[num_keys, dim]`, inserting missing keys; of equal keys the last wins."""
    def erase(self, keys: ArrayLike) -> int:
        """Removes keys and returns how many were present."""
    def clear(self) -> None:
        """Removes all keys and frees their memory."""
    def reserve(self, num_keys: int) -> None:
        """Makes room in the index for `num_keys` keys in total."""
    def export(
        self, with_slots: bool = True
    ) -> tuple[NDArray[Any], NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Copies of keys `[size]`, ascending as unsigned, rows `[size, dim]`, and saved slot rows
        `[size, width]` by name."""
    def import_(
        self, keys: ArrayLike, rows: ArrayLike, slots: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """Inserts or overwrites keys with rows `[num_keys, dim]` and slot rows `[num_keys, width]`.

        Slot variables missing in `slots` get their initial value; those missing in the table are
        added.
        """
    def initial_rows(self, keys: ArrayLike) -> NDArray[np.float32]:
        """The rows `[num_keys, dim]` that missing keys read."""
    def stats(self) -> dict[str, int | float]:
        """Size, load factor, probe lengths and bytes. Visits every key."""
    def observe(self, keys: ArrayLike) -> None:
        """A training lookup of keys `[num_keys]` without reading their rows.

        Raises:
            ValueError: The keys alone need more than `max_capacity` rows; nothing was counted.
        """
    def evict(self) -> int:
        """Removes keys by `steps_to_live` and `l2_threshold`; returns how many."""
    def statistics(self) -> dict[str, int]:
        """Counts since the table was made, cleared or replaced."""
    def key_statistics(
        self, keys: ArrayLike
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Whether each key `[num_keys]` has a row, its frequency, and its last step or -1."""
    def assign_scores(self, keys: ArrayLike, scores: ArrayLike) -> int:
        """Sets custom scores `[num_keys]`, integers; returns how many keys were present."""

def unique_with_inverse(
    keys: ArrayLike, world_size: int = 1
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int64]]:
    """Deduplicates keys and groups them by owner, `uint64(key) % world_size`.

    The order within an owner depends only on the keys, not on the number of threads.

    Args:
        keys: `[num_keys]`; unsigned arrays are uint64 keys, all others int64.

    Returns:
        Unique keys `[num_unique]`, grouped by owner; inverse `[num_keys]` with
        `unique[inverse] == keys`; owner offsets `[world_size + 1]` into the unique keys.

    Raises:
        ValueError: `world_size` is below 1.
    """

def combine(
    rows: ArrayLike,
    inverse: ArrayLike,
    row_splits: ArrayLike | None,
    combiner: str = "sum",
    weights: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """Reduces the rows of each sample to one.

    With weights w and rows v of a sample: `"sum"` is sum(w v), `"mean"` sum(w v) / sum(w),
    `"sqrtn"` sum(w v) / sqrt(sum(w^2)). A sample that is empty, or whose divisor is 0, gives zeros.
    `"none"` returns each key's row times its weight.

    Args:
        rows: Unique rows `[num_unique, dim]`.
        inverse: `[num_keys]`, the row of each key.
        row_splits: `[batch + 1]`, offsets of the samples' keys; `None` with `"none"`.
        weights: `[num_keys]`; `None` for all ones.

    Returns:
        `[batch, dim]`, or `[num_keys, dim]` with `"none"`.

    Raises:
        ValueError: An argument has the wrong shape or range, or the combiner is unknown.
    """

def combine_gradient(
    grad: ArrayLike,
    inverse: ArrayLike,
    row_splits: ArrayLike | None,
    num_unique: int,
    combiner: str = "sum",
    weights: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """Gradient of `combine` for the unique rows, `[num_unique, dim]`, summed in order of position.

    Args:
        grad: `[batch, dim]`, or `[num_keys, dim]` with `"none"`.
    """

def weight_gradient(
    rows: ArrayLike,
    grad: ArrayLike,
    inverse: ArrayLike,
    row_splits: ArrayLike | None,
    combiner: str = "sum",
    weights: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """Gradient of `combine` for the weights, `[num_keys]`."""

def merge_gradients(keys: ArrayLike, grads: ArrayLike) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Sums the gradients `[num_keys, dim]` of equal keys, in order of position.

    Returns:
        Unique keys `[num_unique]` and their sums `[num_unique, dim]`.
    """

def crc32_of_blocks(data: Any, first: int, block: int) -> np.ndarray:
    """CRC-32, uint32: of the first `first` bytes of a buffer, then of each `block` bytes."""

def crc32_of_two(first: int, second: int, num_bytes: int) -> int:
    """CRC-32 of bytes with CRC `first` followed by `num_bytes` bytes with CRC `second`."""

def apply_gradients(
    table: Table, rule: str, learning_rate: float, step: int, keys: ArrayLike, grads: ArrayLike, *,
    keys_are_unique: bool = False, momentum: float = 0.0, nesterov: bool = False,
    lazy: bool = False, momentum_before_rate: bool = False, beta_1: float = 0.9,
    beta_2: float = 0.999, epsilon: float = 1e-7, amsgrad: bool = False,
    initial_accumulator: float = 0.1, l1: float = 0.0, l2: float = 0.0, l2_shrinkage: float = 0.0,
    learning_rate_power: float = -0.5, beta: float = 0.0, weight_decay: float = 0.0,
    clip_value: float = 0.0
) -> None:
    """One optimizer step on the rows of a batch; missing keys are inserted.

    The first call adds the rule's slot variables to the table. An empty batch is also a step: with
    `"adam"`, momentum that is not lazy, or weight decay it changes every row of the table.

    Args:
        rule: `"sgd"`, `"momentum"`, `"adagrad"`, `"rowwise_adagrad"`, `"adam"`, `"lazy_adam"` or
            `"ftrl"`. Options of other rules are ignored.
        step: Counts from 1 (Adam's bias correction).
        keys: `[num_keys]`; gradients of equal keys are summed first.
        grads: `[num_keys, dim]`.
        keys_are_unique: True skips the search for equal keys.
        momentum_before_rate: TF1's momentum, `a = momentum a + g; w -= lr a`, instead of Keras'
            `v = momentum v - lr g; w += v`.
        weight_decay: Decoupled as in Keras, `row *= 1 - weight_decay * learning_rate` before the
            update, for every row at every step.
        clip_value: Maximum absolute value of each element of the summed gradient; 0: no limit.

    Raises:
        ValueError: An option is out of range; the table has another rule or other options; or
            `max_capacity` would be exceeded, and then the table is unchanged.
        TypeError: An option does not exist.
    """

def slot_widths(rule: str, dim: int, **options: Any) -> dict[str, int]:
    """Floats per row of each slot variable of a rule, by name, derived ones included.

    Args:
        rule, options: As in `apply_gradients`.
        dim: Floats per row of the table.

    Raises:
        ValueError: There is no such rule, or an option is out of range.
    """

def _hash_pieces(key: int, num_buckets: int = 4) -> tuple[int, int, int]:
    """Index shard, home among so many buckets, and digest of a key, in this process."""

# ---- tables in device memory; docs/cuda.md ----
#
# Device arrays are objects with `__dlpack__` or `__cuda_array_interface__`: CuPy, PyTorch, JAX and
# Numba arrays, and CudaArray, on the current device, contiguous in row-major order; ValueError
# names an argument that is not. `stream` is the address of a CUDA stream, 0 for the default one.
# Calls return before the device has finished, unless they return a value in host memory. In a build
# without CUDA all of them except `cuda_device_count` raise RuntimeError.

def cuda_device_count() -> int:
    """Number of usable devices; 0 without a driver, and in a build without CUDA."""

def cuda_device_info() -> dict[str, Any]:
    """Name, sizes in bytes and CUDA versions (1000 * major + 10 * minor) of the current device."""

def cuda_release_memory() -> None:
    """Frees memory that is kept for later use. Waits for the device."""

class CudaEvent:
    """A point in a stream, for timing."""

    def record(self, *, stream: int = 0) -> None: ...
    def seconds_since(self, earlier: CudaEvent) -> float: ...  # waits for both

def cuda_synchronize(*, stream: int = 0) -> None:
    """Waits for all work on the stream."""

def cuda_copy(to: Any, from_: Any, *, stream: int = 0) -> None:
    """Copies floats `[n]` from one device array to another."""

class CudaError(RuntimeError):
    """A CUDA call failed, device memory ran out, or there is no device."""

class CudaArray:
    """A copy of a NumPy array in device memory, or the result of a call.

    Its memory is freed in the order of the stream that made it; the stream must outlive it. Work on
    another stream must be ordered before the last reference to the array is deleted.
    """

    def __init__(self, array: NDArray[Any], *, stream: int = 0) -> None: ...
    __cuda_array_interface__: Final[dict[str, Any]]
    def __dlpack__(self, *, stream: int | None = None, **others: Any) -> Any:
        """As in the array API; BufferError for another `dl_device`, and for `copy=True`."""
    def __dlpack_device__(self) -> tuple[int, int]: ...
    shape: Final[tuple[int, ...]]
    dtype: Final[np.dtype[Any]]
    def __len__(self) -> int: ...
    def get(self) -> NDArray[Any]:
        """A copy as a NumPy array. Waits for the stream."""

class CudaTable(_AnyTable):
    """One rank's shard of a table in device memory, for one host thread at a time.

    Args:
        name, dim, initializer, a, b, default_rows, seed, initial_capacity, max_capacity: As in
            `Table`; initial rows have the same bits.
        use_hashtable, rank, world_size: As in `Table`. Without a hashtable, memory for all rows is
            allocated at once, and a call that takes keys waits for the device once.
        key_dtype: `"int64"` or `"uint64"`, also the dtype of the key arrays.
        row_dtype: `"float32"`.
        max_load_factor: Load factor at which the index grows, in (0, 0.97].
        policy: As in `Table`. With a policy, calls that may insert wait for the device once.

    Raises:
        ValueError: An argument is out of range; the message names it.
        CudaError: There is no device, or too little memory.
    """

    def __init__(
        self, name: str, dim: int, *, key_dtype: str = "int64",
        row_dtype: str = "float32", initializer: str = "uniform",
        a: float = -0.05, b: float = 0.05, default_rows: ArrayLike | None = None, seed: int = 0,
        initial_capacity: int = 0, max_capacity: int = 0, use_hashtable: bool = True,
        rank: int = 0, world_size: int = 1, max_load_factor: float = 0.875,
        policy: Mapping[str, bool | int | float | str] = ..., stream: int = 0
    ) -> None: ...
    def configure_slots(self, specs: Sequence[SlotVariableSpec], *, stream: int = 0) -> None: ...
    def find(
        self, keys: Any, *, rows: Any = None, found: Any = None, stream: int = 0
    ) -> tuple[Any, Any]:
        """Rows `[num_keys, dim]` and whether each key was present, written to arrays if given."""
    def find_or_insert(
        self, keys: Any, *, rows: Any = None, inserted: Any = None, stream: int = 0
    ) -> tuple[Any, Any]:
        """Reads rows, inserting missing keys; the flag is true at one position of each new key.

        Raises:
            ValueError: `max_capacity` would be exceeded; nothing was inserted.
        """
    def row_numbers(
        self, keys: Any, *, insert: bool = False, out: Any = None, stream: int = 0
    ) -> Any:
        """Row numbers `[num_keys]`, uint32; 2**32 - 1 for keys missing and not inserted."""
    def gather(self, row_numbers: Any, *, rows: Any = None, stream: int = 0) -> Any:
        """Rows by number, `[num_rows, dim]`. Every number must belong to this table."""
    def assign(self, keys: Any, rows: Any, *, stream: int = 0) -> None:
        """Writes rows, inserting missing keys; of equal keys the last wins."""
    def erase(self, keys: Any, *, stream: int = 0) -> int:
        """Removes keys and returns how many were present. Waits."""
    def clear(self, *, stream: int = 0) -> None: ...
    def reserve(self, num_keys: int, *, stream: int = 0) -> None: ...
    def export(
        self, with_slots: bool = True, *, stream: int = 0
    ) -> tuple[NDArray[Any], NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """As `Table.export`, to NumPy arrays. Waits."""
    def import_(
        self, keys: ArrayLike, rows: ArrayLike, slots: Mapping[str, ArrayLike] | None = None, *,
        stream: int = 0
    ) -> None:
        """As `Table.import_`, from NumPy arrays. Waits."""
    def stats(self, *, stream: int = 0) -> dict[str, int | float]:
        """Size, load factor and bytes. Waits."""
    # As in `Table`, with device arrays.
    def observe(self, keys: Any, *, stream: int = 0) -> None: ...
    def evict(self, *, stream: int = 0) -> int: ...
    def statistics(self, *, stream: int = 0) -> dict[str, int]: ...
    def key_statistics(self, keys: Any, *, stream: int = 0) -> tuple[CudaArray, ...]: ...
    def assign_scores(self, keys: Any, scores: Any, *, stream: int = 0) -> int: ...

def cuda_apply_gradients(
    table: CudaTable, rule: str, learning_rate: float, step: int, keys: Any, grads: Any, *,
    keys_are_unique: bool = False, stream: int = 0, **options: float | bool
) -> None:
    """As `apply_gradients`, on device arrays."""

def cuda_apply_gradients_to_rows(
    table: CudaTable, rule: str, learning_rate: float, step: int, row_numbers: Any,
    grads: Any, *, stream: int = 0, **options: float | bool
) -> None:
    """The same by row number. Row numbers must not repeat."""

def cuda_unique_with_inverse(
    keys: Any, world_size: int = 1, *, stream: int = 0
) -> tuple[CudaArray, CudaArray, CudaArray]:
    """As `unique_with_inverse`, in the order of first occurrence within an owner. Waits."""

def cuda_combine(
    rows: Any, inverse: Any, row_splits: Any, combiner: str = "sum", weights: Any = None, *,
    stream: int = 0
) -> CudaArray:
    """As `combine`. The values of `inverse` (int32) and `row_splits` (int64) are not checked."""

def cuda_combine_of_table(
    table: CudaTable, row_numbers: Any, inverse: Any, row_splits: Any, combiner: str =
    "sum", weights: Any = None, *, stream: int = 0
) -> CudaArray:
    """The same directly from a table: `inverse` indexes `row_numbers` `[num_unique]`."""

def cuda_combine_gradient(
    grad: Any, inverse: Any, row_splits: Any, num_unique: int, combiner: str = "sum",
    weights: Any = None, *, stream: int = 0
) -> CudaArray:
    """As `combine_gradient`: `[num_unique, dim]`."""

def cuda_group_lookup(
    tables: list[CudaTable], keys: list[Any], rows: list[Any] | None = None, *, insert: bool = True,
    stream: int = 0
) -> list[Any]:
    """Rows `[num_keys, dim]` of each table's keys, in the launches of one table.

    Works like `find_or_insert` (`insert=False`: `find`) of each table. Tables without policies that
    occur once in the list take all new keys or none. `rows`: output arrays.
    """

def cuda_group_apply_gradients(
    tables: list[CudaTable], rule: str, learning_rate: float, step: int, keys: list[Any],
    grads: list[Any], *, keys_are_unique: bool = False, stream: int = 0, **options: float | bool
) -> None:
    """One optimizer step on several tables, in the launches of one: on all tables or on none."""
# fmt: on
