"""`sok.report`: sizes of the tables of a model, over all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sok_like.planner.report import aligned
from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.ranks import comm, training_statistics
from sok_like.runtime.ranks.agreement import agreed
from sok_like.table.variable import EmbeddingVariable, is_embedding_variable, unwrap


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
    if print_table and comm.current().rank == 0:
        print(as_text(reports))
    return reports


def tables_of(model: Any) -> list[EmbeddingVariable]:
    """The model's EmbeddingVariables, each once."""
    tables = (unwrap(item) for item in _variables_of(model) if is_embedding_variable(item))
    return list({id(table): table for table in tables}.values())


def _variables_of(model):
    if isinstance(model, (list, tuple)):
        return [variable for part in model for variable in _variables_of(part)]
    if not hasattr(model, "variables") and not hasattr(model, "assign"):
        required = "a Keras model or layer, a tf.Module, a variable, or a list of these"
        raise wrong_argument("model", required, model, error=TypeError)
    return getattr(model, "variables", [model])


def measure_ranks(
    tables: list[EmbeddingVariable], with_bytes: bool = True, number: float = 0.0
) -> tuple[list[TableReport], list[float]]:
    """One TableReport per table, and each rank's `number`; a collective on several ranks.

    Without `with_bytes`, bytes and load are 0, and no index is read.
    """

    def measure():
        return [number, *([float(n) for n in _numbers(table, with_bytes)] for table in tables)]

    ranks = agreed(measure, comm.current(), "a measurement of tables")
    counts = [len(of_tables) for _, *of_tables in ranks]
    if len(set(counts)) > 1:
        raise ValueError(f"Every rank must report the same tables. Received, by rank: {counts}")
    numbers = [np.array([rank[1 + i] for rank in ranks]) for i in range(len(tables))]
    return list(map(_of_ranks, tables, numbers)), [rank[0] for rank in ranks]


def _numbers(table, with_bytes):
    evicted = refused = 0
    if table.keeps_records:
        counts = table.statistics()
        evicted, refused = int(counts.evicted), int(counts.refused)
    batch = training_statistics.observed_batch(table.table_name)
    if not with_bytes:
        return int(table.total_count()[0]), 0, 0.0, evicted, refused, *batch
    stats = table.stats()
    return stats.size, stats.bytes, stats.load_factor, evicted, refused, *batch


def _of_ranks(table, ranks):
    """The report of a table from the numbers of all ranks, `[ranks, numbers]`."""
    keys, bytes_, load, evicted, refused, batch, unique, hottest = ranks.T
    seen = batch.sum() > 0
    return TableReport(
        table.table_name,
        int(keys.sum()),
        int(bytes_.sum()),
        float(load.mean()),
        int(evicted.sum()),
        int(refused.sum()),
        tuple(map(int, keys)),
        tuple(map(int, bytes_)),
        float(unique.sum() / batch.sum()) if seen else None,
        float(hottest.sum() / batch.sum()) if seen else None,
    )


def as_text(tables: list[TableReport]) -> str:
    """The reports as a table of text."""
    head = ["table", "keys", "MiB", "load", "refused", "evicted", "most keys of a rank / mean"]
    of_batch = any(t.unique_ratio is not None for t in tables)
    head += ["unique", "hottest 1 %"] if of_batch else []
    lines = []
    for t in tables:
        line = [t.name, f"{t.keys:,}", f"{t.bytes / 2**20:.1f}", f"{t.load:.2f}"]
        line += [f"{t.refused:,}", f"{t.evicted:,}", f"{t.imbalance:.2f}"]
        if of_batch:
            shares = (t.unique_ratio, t.hottest_share)
            line += ["" if share is None else f"{share:.2f}" for share in shares]
        lines.append(line)
    return "\n".join(aligned([head, *lines], left={0}))
