"""A model of the time of a training step on any number of ranks, for tables looked up in one group.

A step is lookup, gradient and update of the tables, without the model above them. Its time is a sum
of products, a constant of the machine times how often that occurs on a rank:

    ops        step, table         calls from Python and TensorFlow's ops, on one core
    tables     key, row, moved     searching for equal keys; finding rows; moving their floats
    exchanges  exchange            ranks meet, three times per step
    copies     routed, byte        packing, copying and unpacking messages within the host
    messages   message             latency of a message to a rank of another host; on paper
    network    network             bytes that leave the host; on paper

`n` ranks, `r` of them per host with `c` cores. Work in tables and copies is divided among a rank's
threads, `c / r`, but a thread gets 1,024 keys at least. More ranks than cores take turns: then all
but messages and network takes `r / c` times as long. Each key is owned by each rank with the same
probability; bytes and messages are those of docs/scaling.md, computed by `shard_traffic`.

Left out: the model and the all-reduce of its gradients, keys that are new to their table, ranks
that wait for a slower one, and that an owner updates a row once which several ranks ask for.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from sok_like.planner.tables import HASHED, Plan, Shard, Step, TableConfig, shard_traffic
from sok_like.runtime.checks import check_integer, require

TERMS = {
    "ops": ("step", "table"),
    "tables": ("key", "row", "moved"),
    "exchanges": ("exchange",),
    "copies": ("routed", "byte"),
    "messages": ("message",),
    "network": ("network",),
}
_EXCHANGES = 3  # keys, rows, gradients
_KEYS_PER_THREAD = 1024  # cpp/core/cpu/table_impl.h


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a rank does in a step; all tables are alike.

    Attributes:
        tables: Number of tables, looked up in one group.
        batch: Samples per rank.
        dim: Columns of a row, float32.
        hotness: Keys per sample and table.
        distinct: Different keys of a rank's batch, as a part of its keys; in (0, 1].
        slots: Slot rows of the optimizer beside a row: 0 for SGD, 1 for Adagrad, 2 for LazyAdam.
    """

    tables: int
    batch: int
    dim: int
    hotness: int = 1
    distinct: float = 1.0
    slots: int = 1

    def __post_init__(self) -> None:
        for argument in ("tables", "batch", "dim", "hotness"):
            check_integer(argument, getattr(self, argument))
        check_integer("slots", self.slots, minimum=0)
        require(0 < self.distinct <= 1, "distinct", "in (0, 1]", self.distinct)

    @property
    def num_keys(self) -> int:
        """Keys of a rank in a step, over all tables."""
        return self.tables * self.batch * self.hotness

    @property
    def table_keys(self) -> int:
        """Different keys of a rank in one table."""
        return max(1, round(self.batch * self.hotness * self.distinct))


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of a host and of the network between hosts, in seconds on one core.

    Attributes:
        cores: Cores per host.
        step: Per step.
        table: Per table and step.
        key: Per key.
        row: Per different key: finding and updating its row.
        moved: Per float that is read or written in tables.
        exchange: Per exchange between ranks of one host.
        routed: Per different key that is sent to its owner.
        byte: Per byte of a rank's messages.
        message: Latency of a message between hosts, in seconds.
        network: Per byte that leaves a host: 1 / bandwidth in bytes per second.
    """

    cores: int
    step: float
    table: float
    key: float
    row: float
    moved: float
    exchange: float
    routed: float
    byte: float
    message: float = 20e-6
    network: float = 8 / 25e9  # 25 Gbit/s

    def __post_init__(self) -> None:
        check_integer("cores", self.cores)
        for name, value in self.constants().items():
            fits = isinstance(value, (int, float)) and 0 <= value < math.inf
            require(fits, name, "a finite number of seconds >= 0", value)

    def constants(self) -> dict[str, float]:
        """The constants by name, without the number of cores."""
        return {name: value for name, value in vars(self).items() if name != "cores"}


class StepTime(NamedTuple):
    """Predicted seconds of a step, by term; see the docstring of this module."""

    ops: float
    tables: float
    exchanges: float
    copies: float
    messages: float
    network: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def largest(self) -> str:
        """The name of the term that takes longest."""
        return max(self._fields, key=self._asdict().__getitem__)


def predict(
    workload: Workload, machine: Machine, ranks: int, ranks_per_host: int | None = None
) -> StepTime:
    """The time of a training step.

    Args:
        workload: What each rank does.
        machine: Constants, measured (`--measure`) or assumed.
        ranks: Number of ranks.
        ranks_per_host: At most so many ranks share a host; None: all ranks are on one host.

    Returns:
        Seconds by term; `total` is their sum.

    Raises:
        ValueError: an argument is not a positive integer.
    """
    occurs, constants = counts(workload, machine.cores, ranks, ranks_per_host), machine.constants()
    return StepTime(*(sum(occurs[c] * constants[c] for c in names) for names in TERMS.values()))


def counts(workload, cores, ranks, ranks_per_host=None):
    """By constant: how often it occurs on a rank in a step, as seconds of one core."""
    ranks = check_integer("ranks", ranks)
    together = check_integer("ranks_per_host", ranks if ranks_per_host is None else ranks_per_host)
    together = min(together, ranks)
    share = cores / together  # of a rank; below 1, ranks take turns
    waits = max(1.0, 1 / share)
    threads = min(share, max(1.0, workload.num_keys / _KEYS_PER_THREAD))
    rows = workload.tables * workload.table_keys
    others = ranks - 1
    remote = ranks - together
    leaving = workload.tables * _bytes_to_others(workload, ranks)
    sent = leaving * ranks / others if others else 0.0  # a rank's message to itself is copied, too
    exchanges = _EXCHANGES if others else 0
    return {
        "step": waits,
        "table": workload.tables * waits,
        "key": workload.num_keys / threads,
        "row": rows / threads,
        # Copied to the batch; its gradient; the row with its slot rows in the update.
        "moved": rows * workload.dim * (3 + workload.slots) / threads,
        "exchange": exchanges * waits,
        "routed": rows * bool(others) / threads,
        "byte": sent / threads,
        "message": exchanges * remote,
        "network": together * sent * remote / ranks,
    }


def _bytes_to_others(workload, ranks):
    """Bytes of keys, rows and gradients of one table that leave a rank in a step."""
    table = TableConfig(0, 0, workload.dim, {"hash_table": True})
    plan = Plan(ranks, (table,), (HASHED,), (), (0,))
    step = Step(workload.table_keys, [1], workload.slots, element_bytes=4, key_bytes=8)
    return shard_traffic(plan, Shard(0, 0, HASHED, 0, 0, 0, workload.dim, 0, 0), step)[1]
