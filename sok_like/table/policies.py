"""Options of an EmbeddingVariable, under DeepRec's names: admission, eviction, storage, rows.

Options check their arguments when they are created, so an error points to the user's line. They
only describe policies; the core implements them (`cpp/core/policy.h`).
"""

import dataclasses
import os
import re
from typing import Any

from sok_like.runtime.checks import as_integer, check_integer, require, unmet, wrong_argument

DEFAULT_VALUE_DIM = 4096
COUNTER_TYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
COUNTS = ("lookups", "occurrences")
SCORES = ("lru", "lfu", "custom")
STORAGE_TYPES = ("DRAM", "HBM", "DRAM_SSDHASH")
CACHE_STRATEGIES = ("LRU", "LFU")

_default_count = "lookups"


def set_default_count(count: str) -> None:
    """Sets what later options count by default: "lookups" or "occurrences"."""
    global _default_count
    _default_count = count


def _require_count(argument: str, value: Any) -> None:
    fits = value is None or 1 <= (as_integer(value) or 0) < 2**63
    require(fits, argument, "None or a positive integer", value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- admission ----


@dataclasses.dataclass(frozen=True)
class CounterFilter:
    """A key gets its row in the `filter_freq`-th training lookup that contains it.

    Until then it reads `InitializerOption.default_value_no_permission`, and its gradient is
    dropped. With `EmbeddingVariableOption(count="occurrences")` its occurrences count instead. The
    lookup that completes the count makes the row, and its gradient moves it, but this lookup still
    reads the value of a waiting key. Counts are exact; a waiting key takes 40 to 70 bytes. If too
    many keys wait, the table forgets those seen longest ago (at equal steps the lower key, as
    unsigned), and an eighth more.

    Args:
        filter_freq: Number of lookups; 0 and 1 admit every key.
        max_waiting: Maximum number of waiting keys per rank after a lookup. None: the table's
            capacity, or no limit if it has none.

    Raises:
        ValueError: `filter_freq` is not an integer >= 0, or `max_waiting` is neither None nor a
            positive integer.
    """

    filter_freq: int = 0
    max_waiting: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        check_integer("filter_freq", self.filter_freq, 0)
        _require_count("max_waiting", self.max_waiting)


@dataclasses.dataclass(frozen=True)
class CBFFilter:
    """`CounterFilter` with a counting Bloom filter of fixed size.

    For n = `max_element_size` waiting keys the filter has m = -n ln(p) / ln(2)^2 counters; each key
    uses k = m / n ln(2) of them (Fan et al., Summary Cache, 2000; the sizes are those of Bloom's
    filter). The count of a key is the minimum of its counters: too large with probability
    p = `false_positive_probability`, never too small.

    Args:
        filter_freq: Number of lookups; 0 and 1 admit every key.
        max_element_size: Maximum number of waiting keys in the whole table. Each rank has a filter
            of this size, so that a dump can be restored on any number of ranks.
        false_positive_probability: In (0, 1).
        counter_type: uint8, uint16, uint32 or uint64, int8, int16, int32 or int64, or a tf.DType of
            that name. Counters stop at their largest value.

    Raises:
        ValueError: an argument is not one of these values.
    """

    filter_freq: int = 0
    max_element_size: int = 0
    false_positive_probability: float = -1.0
    counter_type: Any = "uint64"

    def __post_init__(self):
        name = getattr(self.counter_type, "name", self.counter_type)
        require(name in COUNTER_TYPES, "counter_type", f"one of {COUNTER_TYPES}", name)
        object.__setattr__(self, "counter_type", name)
        largest = 2 ** (self.counter_bits - (not name.startswith("u"))) - 1
        freq, p = as_integer(self.filter_freq), self.false_positive_probability
        fits = freq is not None and 0 <= freq <= min(largest, 2**63 - 1)
        required = f"an integer in [0, {largest}], the range of {name}"
        require(fits, "filter_freq", required, self.filter_freq)
        if self.filter_freq > 1:
            check_integer("max_element_size", self.max_element_size)
            fits = _is_number(p) and 0 < p < 1
            require(fits, "false_positive_probability", "a number in (0, 1)", p)

    @property
    def counter_bits(self) -> int:
        """Bits of a counter. Signed counters are stored as unsigned ones, which hold as much."""
        return int(self.counter_type.removeprefix("u").removeprefix("int"))


# ---- eviction ----


@dataclasses.dataclass(frozen=True)
class GlobalStepEvict:
    """`evict()` and dumps remove keys that no training lookup contained for `steps_to_live` steps.

    Args:
        steps_to_live: A key last seen in step s is removed if the table's step is greater than
            s + steps_to_live. None: never.

    Raises:
        ValueError: `steps_to_live` is neither None nor a positive integer.
    """

    steps_to_live: int | None = None

    def __post_init__(self):
        _require_count("steps_to_live", self.steps_to_live)


@dataclasses.dataclass(frozen=True)
class L2WeightEvict:
    """`evict()` and dumps remove keys whose row w has sum(w^2) / 2 below a threshold.

    Args:
        l2_weight_threshold: A positive number, compared with `tf.nn.l2_loss(w)`; -1: never.

    Raises:
        ValueError: `l2_weight_threshold` is neither -1 nor a positive number.
    """

    l2_weight_threshold: float = -1.0

    def __post_init__(self):
        value = self.l2_weight_threshold
        fits = _is_number(value) and (value == -1.0 or 0 < value < float("inf"))
        require(fits, "l2_weight_threshold", "-1 or a positive number", value)


@dataclasses.dataclass(frozen=True)
class ScoreEvict:
    """A full table evicts the keys of least score to make room for new ones.

    Of equal scores the lower key (as unsigned) is evicted first. Keys of the lookup itself stay. If
    they alone exceed the capacity, the lookup raises `tf.errors.ResourceExhaustedError`. Keys that
    are written or restored beyond the capacity are evicted at once, with a warning.

    Args:
        score: "lru": the step of the last training lookup that contained the key. "lfu": the number
            of these lookups. "custom": the value from `variable.assign_scores`, 0 until then.
        capacity: Maximum number of keys per rank; None: the variable's capacity.

    Raises:
        ValueError: `score` or `capacity` is not one of these values.
    """

    score: str = "lru"
    capacity: int | None = None

    def __post_init__(self):
        require(self.score in SCORES, "score", f"one of {SCORES}", self.score)
        check_capacity(self.capacity)


# ---- storage, initial rows and the whole option ----


@dataclasses.dataclass(frozen=True)
class StorageOption:
    """Where rows are kept: in the memory of the table's device, or on disk.

    With "DRAM_SSDHASH" the index and the rows in use stay in memory; all rows with their slot rows
    are in a file, one per table and rank. Values are bit-identical to those of a table in memory.
    The file is temporary: it has no name and ends with the process. Dumps are permanent.

    Args:
        storage_type: None, "DRAM", "HBM" or "DRAM_SSDHASH", or an enum member of that name.
        storage_path: With "DRAM_SSDHASH" a directory on a disk; created if it is missing.
        storage_size: With "DRAM_SSDHASH" `[bytes of rows in memory]` or `[bytes of rows in memory,
            maximum bytes of the file]`, per table and rank; further entries must be 0. One batch
            may exceed the first. It does not include the system's page cache, which is freed when
            memory is short. None: `[2**30]`, as in DeepRec.
        cache_strategy: With "DRAM_SSDHASH": which rows leave memory first, in blocks of 4 KiB.
            "LFU" or None: those used least often. "LRU": those unused for longest.
        layout: Must be None.

    Raises:
        ValueError: an argument is not one of these values, or would be ignored.
    """

    storage_type: Any = None
    storage_path: str | None = None
    storage_size: Any = None
    cache_strategy: Any = None
    layout: Any = None

    def __post_init__(self):
        name = getattr(self.storage_type, "name", self.storage_type)
        require(
            name is None or name in STORAGE_TYPES,
            "storage_type",
            f"None or one of {STORAGE_TYPES}. For a table that is larger than memory, on PMEM or "
            "SSD, use DRAM_SSDHASH, which keeps rows in a file and those in use in host memory",
            self.storage_type,
        )
        object.__setattr__(self, "storage_type", name)
        require(self.layout is None, "layout", "None", self.layout)
        if self.is_on_disk:
            self._check_disk()
            return
        for argument in ("storage_path", "storage_size", "cache_strategy"):
            value = getattr(self, argument)
            required = "None: only storage_type DRAM_SSDHASH has rows on disk"
            require(value is None, argument, required, value)

    def _check_disk(self):
        path = self.storage_path
        is_path = isinstance(path, (str, os.PathLike)) and os.fspath(path) != ""
        require(is_path, "storage_path", "a directory on a disk for DRAM_SSDHASH", path)
        # The file is mapped into memory, which no other file system can do. One slash: pathlib.
        has_scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path))
        require(not has_scheme, "storage_path", "a directory on a disk, without a scheme", path)
        object.__setattr__(self, "storage_path", os.fspath(path))
        entries = 2**30 if self.storage_size is None else self.storage_size
        entries = entries if isinstance(entries, (list, tuple)) else [entries]
        sizes = [as_integer(entry) for entry in entries]
        fits = 0 < len(sizes) <= 4 and all(n is not None and 0 <= n < 2**63 for n in sizes)
        required = (
            "[bytes of rows in memory] or [bytes of rows in memory, maximum bytes of the file], "
            "optionally followed by zeros"
        )
        fits = fits and bool(sizes[0]) and not any(sizes[2:])
        require(fits, "storage_size", required, self.storage_size)
        object.__setattr__(self, "storage_size", tuple(sizes))
        strategy = getattr(self.cache_strategy, "name", self.cache_strategy)
        required, legal = f"None or one of {CACHE_STRATEGIES}", (None, *CACHE_STRATEGIES)
        require(strategy in legal, "cache_strategy", required, self.cache_strategy)
        object.__setattr__(self, "cache_strategy", strategy)

    @property
    def is_on_disk(self) -> bool:
        """Whether rows are in a file."""
        return self.storage_type == "DRAM_SSDHASH"


@dataclasses.dataclass(frozen=True)
class InitializerOption:
    """Initial rows.

    Args:
        initializer: Keras initializer or its name; None: the variable's argument.
        default_value_dim: An initializer that is not elementwise makes a matrix of this many rows,
            and key k starts from row `uint64(k) % default_value_dim`. A value other than 4096 does
            the same for every initializer.
        default_value_no_permission: The value of every element of the row that a waiting key reads.

    Raises:
        ValueError: an argument is out of range.
    """

    initializer: Any = None
    default_value_dim: int = DEFAULT_VALUE_DIM
    default_value_no_permission: float = 0.0

    def __post_init__(self):
        check_integer("default_value_dim", self.default_value_dim)
        value = self.default_value_no_permission
        finite = _is_number(value) and abs(value) < float("inf")
        require(finite, "default_value_no_permission", "a finite number", value)


@dataclasses.dataclass(frozen=True)
class EmbeddingVariableOption:
    """Policies and settings of an EmbeddingVariable.

    Args:
        ht_type, ht_partition_num: DeepRec's type and partitions of its hash table; ignored.
        evict_option: GlobalStepEvict, L2WeightEvict or ScoreEvict, or a list with at most one of
            each.
        ckpt: Must be None; `sok.Saver` restores rows.
        filter_option: CounterFilter or CBFFilter.
        storage_option: StorageOption; "DRAM_SSDHASH" keeps rows on disk.
        init_option: InitializerOption.
        evicted_buffer_size: Number of evicted rows that each rank keeps for
            `variable.pop_evicted()`; when it is full, the oldest are dropped and counted.
        record_statistics: True keeps frequencies, steps and counts even without a policy.
        count: What frequencies and filters count. "lookups": the training lookups that contain a
            key. "occurrences": how often the key occurs in them, on all ranks together, as in
            DeepRec; in host memory only. None: "lookups", or "occurrences" after
            `sok.deeprec.install()`.

    Raises:
        ValueError: a number is out of range, or an argument would be ignored.
        TypeError: an option has the wrong class.
    """

    ht_type: str = ""
    ht_partition_num: int = 1000
    evict_option: Any = None
    ckpt: Any = None
    filter_option: CounterFilter | CBFFilter | None = None
    storage_option: StorageOption | None = None
    init_option: InitializerOption | None = None
    evicted_buffer_size: int = dataclasses.field(default=0, kw_only=True)
    record_statistics: bool = dataclasses.field(default=False, kw_only=True)
    count: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        if isinstance(self.evict_option, list):
            object.__setattr__(self, "evict_option", tuple(self.evict_option))
        for eviction in self.evictions:
            check_option("evict_option", eviction, GlobalStepEvict, L2WeightEvict, ScoreEvict)
        kinds = [type(eviction).__name__ for eviction in self.evictions]
        distinct = len(set(kinds)) == len(kinds)
        require(distinct, "evict_option", "at most one policy of each kind", kinds)
        check_option("filter_option", self.filter_option, CounterFilter, CBFFilter)
        check_option("storage_option", self.storage_option, StorageOption)
        check_option("init_option", self.init_option, InitializerOption)
        require(self.ckpt is None, "ckpt", "None; sok.Saver restores tables", self.ckpt)
        size = check_integer("evicted_buffer_size", self.evicted_buffer_size, 0)
        recorded = self.record_statistics
        require(isinstance(recorded, bool), "record_statistics", "a bool", recorded)
        if self.count is None:
            object.__setattr__(self, "count", _default_count)
        require(self.count in COUNTS, "count", f"one of {COUNTS}", self.count)
        if size > 0 and not any(self.evictions):
            raise ValueError(
                "`evicted_buffer_size` needs an `evict_option`: without one nothing is evicted. "
                f"Received: evicted_buffer_size={size}"
            )

    @property
    def evictions(self) -> tuple:
        """`evict_option` as a tuple, which may be empty."""
        option = self.evict_option
        return option if isinstance(option, tuple) else (option,) if option is not None else ()

    @property
    def keeps_records(self) -> bool:
        """Whether the table keeps one record per key: only if an option needs it."""
        return self.filter_option is not None or bool(self.evictions) or self.record_statistics

    @property
    def counts_occurrences(self) -> bool:
        """Whether the table counts how often a key occurs."""
        return self.keeps_records and self.count == "occurrences"


def with_steps_to_live(
    option: EmbeddingVariableOption | None, steps_to_live: int | None, where: str
) -> EmbeddingVariableOption | None:
    """`option` with `GlobalStepEvict(steps_to_live)`; None or 0 leaves it as it is."""
    if not steps_to_live:
        return option
    option, added = option or EmbeddingVariableOption(), GlobalStepEvict(steps_to_live)
    others = [e for e in option.evictions if isinstance(e, GlobalStepEvict)]
    if others == [added]:
        return option
    if others:
        required = "be given once, as an argument or in GlobalStepEvict"
        received = f"steps_to_live={steps_to_live} and {others[0]!r}"
        raise unmet("`steps_to_live`", required, received, where)
    evictions = (*option.evictions, added) if option.evictions else added
    return dataclasses.replace(option, evict_option=evictions)


def check_option(argument: str, value: Any, *classes: type, of: str = "") -> None:
    """Raises TypeError unless an option is None or of one of these classes."""
    names = " or ".join(f"a sok.{cls.__name__}" for cls in classes)
    if not isinstance(value, (type(None), *classes)):
        raise wrong_argument(argument, f"None or {names}", value, of, TypeError)


def check_capacity(capacity: Any, of: str = "") -> int | None:
    """A maximum number of keys per rank as an int, or None; ValueError unless it is legal."""
    integer = as_integer(capacity)
    fits = capacity is None or 1 <= (integer or 0) < 2**32 - 1
    require(fits, "capacity", "None or an integer in [1, 2**32 - 1)", capacity, of)
    return integer
