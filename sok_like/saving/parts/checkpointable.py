"""The contract between what is saved, how ranks agree on it, and where it is saved.

A part is one kind of state. It writes this rank's file. Its module also reads: it verifies every
byte that this rank will use, and returns a `StagedContent`, or raises an error that names the file.
Neither makes a promise or talks to another rank.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.initialize import local_size
from sok_like.saving.format import checksums, manifest
from sok_like.table.variable import is_embedding_variable, unwrap


@dataclasses.dataclass(eq=False)
class StagedContent:
    """New content that lies ready; the present content is still in use."""

    commit: Callable[[], Any]  # replaces the present content; cannot fail and reads no file
    drop: Callable[[], Any] = lambda: None  # frees the new content
    _: dataclasses.KW_ONLY
    identity: str = ""  # the same on ranks that have read the same files
    target: Any = None  # of two contents for one target, the later counts
    may_fail: bool = False  # `commit` of an object of others: those are first


class CheckpointPart:
    """State that ranks store in files of their own. All ranks take these steps, in this order."""

    name: str  # part of the folder's name, and for errors; the same on all ranks
    folder: str  # of its files; beside a file, the save chooses it
    registered: int | None = None  # the number of its table to read, within a graph
    read_checksum: str | None = None  # of the file that this rank reads back, if it has done so

    def begin(self) -> Any:
        """What ranks must know of each other before they write, in JSON."""

    def agree(self, begun: Sequence[Any]) -> None:
        """Takes what `begin` has returned, by rank; what it raises, it raises on all ranks."""

    def write(self) -> Any:
        """Writes this rank's file, and flushes it; returns its entry, for `see` and `finish`."""
        raise NotImplementedError

    def see(self, entries: Sequence[Any]) -> None:
        """Raises unless the folder shows what all ranks have written; `entries` are by rank.

        Rank 0 looks for all files. Every file is read back by one rank that did not write it, on
        another host if there are several: each rank reads about as much as it wrote.
        """
        if comm.current().rank == 0:
            manifest.check_seen(self.folder, entries)
        if comm.current().world_size > 1:
            writer = rank_to_read_back()
            checksums.check_bytes(self.folder, entries[writer], writer, self.read_checksum)

    def finish(self, entries: Sequence[Any]) -> None:
        """Lists the files, which all ranks have seen, in the folder. Only rank 0 calls it."""
        raise NotImplementedError

    def done(self) -> None:
        """The save is complete, on all ranks."""

    def remove(self) -> None:
        """Removes this rank's file, unless it is part of a complete save."""


def rank_to_read_back() -> int:
    """The rank whose files this rank reads back."""
    rank, world_size = comm.current().rank, comm.current().world_size
    return (rank + (local_size() % world_size or 1)) % world_size


class RankLocalVariables:
    """The variables, out of some given ones, that are not the same on all ranks."""

    def __init__(self, variables: Iterable[Any]):
        variables = list(variables)
        unwrapped = [unwrap(each) for each in variables if is_embedding_variable(each)]
        self.tables = list({id(table): table for table in unwrapped}.values())
        others = [each for each in variables if not is_embedding_variable(each)]
        # Shards of a ModelParallel. The common part holds their whole values.
        self.sharded = [each for each in others if hasattr(each, "_sok_shard")]
        # Other variables of single ranks, such as tables of `dist_model_parallel`.
        local = [each for each in others if getattr(each, "de_local", False)]
        self.own = [each for each in local if not hasattr(each, "_sok_shard")]
        # Holders of dense tables, as checkpoints find them (`dense_tables.py`).
        self.holders = [each for each in others if hasattr(each, "dense_parts")]

    def __bool__(self):
        return bool(self.tables or self.sharded or self.own or self.holders)


def is_of_all_ranks(model: Any) -> bool:
    """Whether a model is under a distribution; ranks save others without tables by themselves."""
    return getattr(model, "_sok_distribution", None) is not None
