"""The contract between what is saved, how ranks agree on it, and where it is saved.

    part        one kind of state: a hash table, dense tables, variables of one rank
    transaction what is promised of all parts of a call: whole, checked, on all ranks or none
    container   a Keras file, a checkpoint, a v1 Saver: finds parts and hands them over

A part writes this rank's file. Its module also reads: it verifies every byte that this rank will
use, and returns a `StagedContent`, or raises an error that names the file. Neither makes a promise
or talks to another rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sok_like.saving.parts import dump_checks
from sok_like.table.variable import is_embedding_variable, unwrap


class StagedContent:
    """New content that lies ready; the present content is still in use."""

    identity: str = ""  # the same on ranks that have read the same files
    # The object that takes the content; of two contents of one object, the later counts.
    target: Any = None
    # True for objects of others, whose `commit` may raise. They take theirs first.
    may_fail: bool = False

    def commit(self) -> None:
        """Replaces the present content; cannot fail. Nothing is read from a file any more."""
        raise NotImplementedError

    def drop(self) -> None:
        """Frees the new content: the present one stays."""


class CheckpointPart:
    """A part of a program's state that ranks store in files of their own."""

    name: str  # part of the folder's name, and for errors; the same on all ranks
    reference: str | None = None  # the folder's name, of a part that has begun to write

    def write(self, folder: str) -> dict[str, Any]:
        """Writes this rank's file into a new folder, and flushes it to the disk.

        Returns:
            `file` (its name), `bytes` and `checksum`.
        """
        raise NotImplementedError

    def write_now(self, folder: str, reference: str) -> None:
        """Writes it before the others of a save; `write` only returns its result then."""
        entry, self.reference = self.write(folder), reference
        vars(self)["write"] = lambda _: entry

    def see(self, folder: str, entries: Sequence[dict[str, Any]]) -> None:
        """Raises unless the folder shows what all ranks have written. Every rank calls it."""
        dump_checks.see_shards(folder, entries)

    def finish(self, folder: str, entries: Sequence[dict[str, Any]]) -> None:
        """Lists the files, which all ranks have seen, in the folder. Rank 0 calls it.

        Args:
            entries: What `write` has returned, by rank.
        """
        raise NotImplementedError


class RankLocalVariables:
    """The variables, out of some given ones, that are not the same on all ranks.

    Attributes:
        tables: EmbeddingVariables, each once.
        sharded: Shards of a ModelParallel. The common part holds their whole values.
        own: Other variables of single ranks, such as tables of `dist_model_parallel`.
        holders: Holders of dense tables, as checkpoints find them (`dense_tables.py`).
    """

    def __init__(self, variables: Iterable[Any]):
        variables = list(variables)
        unwrapped = [unwrap(each) for each in variables if is_embedding_variable(each)]
        self.tables = list({id(table): table for table in unwrapped}.values())
        others = [each for each in variables if not is_embedding_variable(each)]
        self.sharded = [each for each in others if hasattr(each, "_sok_shard")]
        self.own = [
            each
            for each in others
            if getattr(each, "de_local", False) and not hasattr(each, "_sok_shard")
        ]
        self.holders = [each for each in others if hasattr(each, "dense_parts")]

    def __bool__(self):
        return bool(self.tables or self.sharded or self.own or self.holders)


def is_of_all_ranks(model: Any) -> bool:
    """Whether a model is under a distribution: its ranks save it together, and one writes.

    Also if none of its variables is sharded. Other models without tables are the program's: each
    rank may save its own.
    """
    return getattr(model, "_sok_distribution", None) is not None
