"""Sizes of tables: `sok.report` measures them, `sok.estimate_memory` knows them before.

The sizes are those of `cpp/core/cpu/index.h` and `arena.h`:

    index   64 parts; part s doubles its buckets of 5 slots, 64 bytes, when 3/4 - s/512 full
            (from 2**14 buckets on 3/4 - s/341); odd parts have 3 * 2**n buckets, even ones 2**n
    rows    embedding, slot rows, padding; in chunks of a power of two of rows, 2 to 4 MiB
    record  24 bytes per key, in a table with policies
    change  4 bytes per key and 8 per key touched since the last dump, in a table with deltas
"""

import math
from typing import Any, NamedTuple

import numpy as np

from sok_like.optimizers.rules import rule_of
from sok_like.planner.tables import aligned
from sok_like.runtime.checks import check_integer, wrong_argument
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, training_statistics
from sok_like.runtime.ranks.agreement import agreed, check_same
from sok_like.saving.parts.checkpointable import RankLocalVariables
from sok_like.table.policies import StorageOption
from sok_like.table.variable import EmbeddingVariable

_PARTS = 64
_SLOTS, _BUCKET_BYTES = 5, 64
_LARGE = 2**14  # buckets
_CHUNK_BYTES = 2 * 2**20
_RECORD_BYTES = 24


class TableReport(NamedTuple):
    """One table over all ranks."""

    name: str
    keys: int
    bytes: int
    load: float  # of the index, mean over ranks
    evicted: int
    refused: int
    keys_by_rank: tuple[int, ...]
    bytes_by_rank: tuple[int, ...]
    unique_ratio: float | None = None  # different keys over all keys, of each rank's batch
    hottest_share: float | None = None  # share of the most frequent 1% in the batch's keys

    @property
    def imbalance(self) -> float:
        """Keys of the rank with the most keys, over the mean."""
        mean = sum(self.keys_by_rank) / len(self.keys_by_rank)
        return max(self.keys_by_rank) / mean if mean else 1.0


def report(model: Any, *, print_table: bool = True) -> list[TableReport]:
    """Measures the hash tables of a model, and prints them on rank 0.

    One collective: every rank must call it, for the same tables. Eager only. It visits every key
    of the index, some milliseconds per million keys.

    Args:
        model: A Keras model or layer, a tf.Module, a variable, or a list of these.
        print_table: False prints nothing.

    Returns:
        One `TableReport` per table, in the order of the model's variables, on every rank. Numbers
        of a batch are those of the last batch that `sok.callbacks.TableMetrics` has observed; None
        if there is none.

    Raises:
        ValueError: ranks have different numbers of tables.
        TypeError: `model` is something else.
    """
    reports, _ = measure_ranks(tables_of(model))
    if not print_table or comm.current().rank:
        return reports
    lines = [["table", "keys", "MiB", "load", "refused", "evicted", "most keys of a rank / mean"]]
    of_batch = any(t.unique_ratio is not None for t in reports)
    lines[0] += ["unique", "hottest 1 %"] if of_batch else []
    for t in reports:
        line = [t.name, f"{t.keys:,}", f"{t.bytes / 2**20:.1f}", f"{t.load:.2f}"]
        line += [f"{t.refused:,}", f"{t.evicted:,}", f"{t.imbalance:.2f}"]
        shares = (t.unique_ratio, t.hottest_share) if of_batch else ()
        lines.append(line + ["" if share is None else f"{share:.2f}" for share in shares])
    print("\n".join(aligned(lines, left={0})))
    return reports


def tables_of(model: Any) -> list[EmbeddingVariable]:
    """The model's EmbeddingVariables, each once."""

    def variables_of(part):
        if isinstance(part, (list, tuple)):
            return [variable for item in part for variable in variables_of(item)]
        if not hasattr(part, "variables") and not hasattr(part, "assign"):
            required = "a Keras model or layer, a tf.Module, a variable, or a list of these"
            raise wrong_argument("model", required, part, error=TypeError)
        return getattr(part, "variables", [part])

    return RankLocalVariables(variables_of(model)).tables


def measure_ranks(
    tables: list[EmbeddingVariable], with_bytes: bool = True, number: float = 0.0
) -> tuple[list[TableReport], list[float]]:
    """One TableReport per table, and each rank's `number`; `with_bytes` also reads the index."""

    def measure():
        of_tables = []
        for table in tables:
            if with_bytes:
                stats = table.stats()
                totals = stats.size, stats.bytes, stats.load_factor
            else:
                totals = int(table.total_count()[0]), 0, 0.0
            counts = table.statistics() if table.keeps_records else None
            policies = (0, 0) if counts is None else (int(counts.evicted), int(counts.refused))
            batch = training_statistics.observed_batch(table.table_name)
            of_tables.append([float(n) for n in (*totals, *policies, *batch)])
        return [number, *of_tables]

    ranks = agreed(measure, comm.current(), "a measurement of tables")
    counts = [f"{len(of_tables)} tables" for _, *of_tables in ranks]
    check_same(counts, "Every rank must report the same tables", ValueError)
    reports = []
    for i, table in enumerate(tables):
        of_table = np.array([rank[1 + i] for rank in ranks])
        keys, bytes_, load, evicted, refused, batch, unique, hottest = of_table.T
        seen = batch.sum()
        report = TableReport(
            name=table.table_name,
            keys=int(keys.sum()),
            bytes=int(bytes_.sum()),
            load=float(load.mean()),
            evicted=int(evicted.sum()),
            refused=int(refused.sum()),
            keys_by_rank=tuple(map(int, keys)),
            bytes_by_rank=tuple(map(int, bytes_)),
            unique_ratio=float(unique.sum() / seen) if seen else None,
            hottest_share=float(hottest.sum() / seen) if seen else None,
        )
        reports.append(report)
    return reports, [rank[0] for rank in ranks]


class MemoryEstimate(NamedTuple):
    """Bytes of one rank's shard."""

    index_bytes: int
    row_bytes: int  # rows and slot rows
    record_bytes: int
    bytes: int
    change_bytes: int = 0  # the record of touched keys, in a table with deltas


def estimate_memory(
    num_keys: int,
    embedding_dim: int,
    optimizer: Any = "adam",
    *,
    world_size: int = 1,
    keeps_records: bool = False,
    touched_keys: int | None = None,
    storage_option: Any = None,
) -> MemoryEstimate:
    """The host memory of a table, per rank, without making it.

    Args:
        num_keys: Keys of the whole table.
        embedding_dim: Length of a row.
        optimizer: A stock or wrapped optimizer, whose slot rows lie beside the rows; or the name of
            a rule: "sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl",
            "adagrad_decay", "rmsprop"; None for rows only, as in evaluation.
        world_size: Number of ranks; keys are assumed to be spread evenly.
        keeps_records: Whether the table has a filter, an eviction policy or statistics.
        touched_keys: For a table whose deltas are dumped, the number of keys of the whole table
            that are touched between two dumps; None for other tables.
        storage_option: The table's `sok.StorageOption`. With rows on disk, `row_bytes` are those in
            memory: at most the first of `storage_size`. A batch that needs more takes more.

    Returns:
        Bytes as `variable.stats()` counts them after training. The process needs more for batches
        and for TensorFlow.

    Raises:
        ValueError: an argument is out of range, or `optimizer` cannot train a table.
    """
    num_keys = check_integer("num_keys", num_keys, 0)
    keys = -(-num_keys // check_integer("world_size", world_size))
    floats = _row_floats(check_integer("embedding_dim", embedding_dim), optimizer)
    lines = -(-floats // 16) * 16
    row_bytes = 4 * (lines if (lines - floats) * 8 <= lines else -(-floats // 4) * 4)
    chunk_rows = 2 ** max(0, math.ceil(math.log2(_CHUNK_BYTES / row_bytes)))
    index, rows = _index_bytes(keys), -(-keys // chunk_rows) * chunk_rows * row_bytes
    if storage_option is not None and not isinstance(storage_option, StorageOption):
        raise wrong_argument("storage_option", "None or a StorageOption", storage_option)
    if storage_option is not None and storage_option.is_on_disk:
        rows = min(rows, storage_option.storage_size[0])
    records = keys * _RECORD_BYTES if keeps_records else 0
    changes = 0
    if touched_keys is not None:
        touched = -(-check_integer("touched_keys", touched_keys, 0) // world_size)
        # The list of touched keys doubles as it grows.
        changes = 4 * keys + (8 << (touched - 1).bit_length() if touched else 0)
    return MemoryEstimate(index, rows, records, index + rows + records + changes, changes)


def _row_floats(dim, optimizer):
    if optimizer is None:
        return dim
    if isinstance(optimizer, str):
        name, options = optimizer, {}
    else:
        rule = getattr(optimizer, "embedding_rule", None) or rule_of(optimizer)
        name, options = rule.rule, dict(rule.options)
    try:
        return dim + sum(libraries.core().slot_widths(name, dim, **options).values())
    except ValueError as error:
        required = "None, an optimizer or the name of a rule"
        raise wrong_argument("optimizer", required, f"{optimizer!r}: {error}") from error


def _index_bytes(keys):
    """The expected size; keys are distributed over the parts at random, and each part doubles."""
    mean = keys / _PARTS
    if not keys:
        return 0
    empty, expected = math.exp(-mean) if mean < 700 else 0.0, 0.0
    for part in range(_PARTS):
        below, buckets = empty, 1 + part % 2 * 2
        while below < 1 - 1e-9:
            # The share of parts with at most so many keys: Poisson, by its normal limit.
            below_384 = part + part // 2 if buckets >= _LARGE else part
            most = buckets * _SLOTS * (384 - below_384) // 512
            fits = 0.5 * (1 + math.erf((most + 0.5 - mean) / math.sqrt(2 * mean)))
            expected += buckets * max(0.0, fits - below)
            below, buckets = max(below, fits), buckets * 2
    return round(expected * _BUCKET_BYTES)
