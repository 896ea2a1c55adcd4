"""Options of an EmbeddingVariable: admission, eviction and initial rows, under DeepRec's names.

Options check their arguments when they are created, so an error points to the user's line. They
only describe policies; the core implements them (`cpp/core/policy.h`).
"""

import dataclasses
from typing import Any

from sok_like.runtime.checks import as_integer, check_integer, require, unmet, wrong_argument
from sok_like.table.storage import StorageOption as StorageOption

DEFAULT_VALUE_DIM = 4096
COUNTER_TYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
COUNTS = ("lookups", "occurrences")
SCORES = ("lru", "lfu", "custom")

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


EVICTIONS = (GlobalStepEvict, L2WeightEvict, ScoreEvict)

# ---- initial rows and the whole option ----


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
            check_option("evict_option", eviction, *EVICTIONS)
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

    def attributes(self, capacity: int | None) -> dict[str, Any]:
        """The policies as attributes of the op that makes a table of this capacity."""
        admission = self.filter_option
        attributes: dict[str, Any] = {
            "record": self.keeps_records,  # also for a policy without effect (filter_freq=1)
            "count_occurrences": self.counts_occurrences,
            "evicted_buffer": self.evicted_buffer_size,
        }
        if admission is not None:
            attributes["filter_freq"] = admission.filter_freq
        if isinstance(admission, CounterFilter):
            attributes["max_waiting"] = admission.max_waiting or capacity or 0
        if isinstance(admission, CBFFilter) and admission.filter_freq > 1:
            attributes["bloom_max_keys"] = admission.max_element_size
            attributes["bloom_probability"] = admission.false_positive_probability
            attributes["bloom_counter_bits"] = admission.counter_bits
        if self.init_option is not None:
            attributes["no_permission"] = self.init_option.default_value_no_permission
        for eviction in self.evictions:
            if isinstance(eviction, GlobalStepEvict):
                attributes["steps_to_live"] = eviction.steps_to_live or 0
            elif isinstance(eviction, L2WeightEvict):
                attributes["l2_threshold"] = eviction.l2_weight_threshold
            elif isinstance(eviction, ScoreEvict):
                attributes["score"] = eviction.score
        on_disk = {} if self.storage_option is None else self.storage_option.attributes()
        return attributes | on_disk

    def capacity(self, of_table: int | None, table: str) -> int | None:
        """Maximum number of keys per rank, from the variable or from ScoreEvict; None: no limit."""
        score = next((e for e in self.evictions if isinstance(e, ScoreEvict)), None)
        if score is None:
            return of_table
        fits = of_table is None or score.capacity in (None, of_table)
        required = f"that of ScoreEvict, {score.capacity}, or None"
        require(fits, "capacity", required, of_table, f"table '{table}'")
        if of_table is None and score.capacity is None:
            raise ValueError(
                "ScoreEvict needs a capacity, its own or the variable's: without one nothing is "
                f"evicted. Received: None (table '{table}')"
            )
        return of_table if of_table is not None else score.capacity


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
