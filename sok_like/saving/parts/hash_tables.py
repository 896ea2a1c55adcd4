"""A hash table as a part: a dump of it in a folder, as `sok.Saver` writes one (`manifest.py`)."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import text_of
from sok_like.saving.format import deltas, durable, manifest, shard_file
from sok_like.saving.parts import sok_files, table_names
from sok_like.saving.parts.checkpointable import CheckpointPart, StagedContent
from sok_like.table import table_reader
from sok_like.table.content import TableContent, TableShard, nothing
from sok_like.table.variable import as_embedding_variable


def checked(variable: Any) -> Any:
    """The EmbeddingVariable; raises for anything else, and for one that only `sok2.dump` takes."""
    variable = as_embedding_variable(variable, "embedding_variable")
    if variable.home is not None and comm.current().world_size > 1:
        raise ValueError(
            "`embedding_variable` must have its keys on rank key % world_size. Received: table "
            f"'{variable.table_name}', all on rank {variable.home}; use sok_like.sok2.dump"
        )
    return variable


class HashTablePart(CheckpointPart):
    """An EmbeddingVariable, as a part."""

    step = -1  # of the optimizer, as the manifest has it
    following: Sequence[dict[str, Any]] | None = None  # deltas; None: none can follow

    def __init__(self, table: Any):
        self.table, self.name, self._staged = table, table.table_name, None

    # What it asks of its table, eagerly; `v1_saver` asks the same in a session.

    def _register(self, evict):
        return int(self.table.register_for_read(evict=evict))

    def _stage(self, staged_id, content):
        """Makes the new content; returns the problem, empty if there is none."""
        self._staged, problem = self.table.stage(staged_id, content)
        return text_of(problem)

    def commit_staged(self) -> None:
        """Replaces the table's content."""
        self.table.commit_staged(self._staged)
        self.drop_staged()

    def drop_staged(self) -> None:
        """Frees the new content."""
        self._staged = None

    # The part.

    def dump_id(self) -> str:
        """Part of the names of all files; all ranks know it: the end of the folder's name."""
        return os.path.basename(self.folder).rpartition(".")[2]

    def file(self, rank: int) -> str:
        """The name of one rank's file."""
        return manifest.shard_name(self.name, self.dump_id(), rank, comm.current().world_size)

    def begin(self) -> Any:
        checked(self.table)

    def write(self) -> Any:
        number = self.registered
        if number is None:
            number = self._register(evict=True)
        with table_reader.content(number, self.table.dim) as (shard, _):
            return self._write_shard(shard)

    def _write_shard(self, shard):
        name, call = self.file(comm.current().rank), f"dump of table '{self.name}'"
        with durable.explaining(self.name):
            return shard_file.write_shard(self.folder, name, shard, call)

    def finish(self, entries: Sequence[Any]) -> None:
        self._write_manifest(self.dump_id(), entries, self.step, self.following)

    def _write_manifest(self, dump_id, entries, step, following):
        head = manifest.Head(self.name, self.table.dim, self.table.key_dtype.name, dump_id)
        with durable.explaining(self.name):
            manifest.write_manifest(self.folder, head, entries, step, following)

    def remove(self) -> None:
        """Removes this rank's file, unless it is part of a complete dump."""
        manifest.remove_unlisted(self.folder, self.name, self.file(comm.current().rank))

    def prepare(self, folder: str) -> StagedContent:
        """Reads the keys that this rank owns; the dump may be that of a table of another name."""
        # Keras may have given the layer, and so its table, a new name.
        name = manifest.only_table(folder) or self.name
        registered = self._register(evict=False)
        try:
            staged_id, dump, _ = stage_dump(self.table, folder, registered, name)
        except MemoryError as error:
            raise tf.errors.ResourceExhaustedError(None, None, str(error)) from error
        return self._prepared(dump.identity, staged_id)

    def prepare_content(self, content: TableContent) -> StagedContent:
        """The same for content that was inside a file."""
        _check_keys(np.asarray(content.keys), self.table)
        chosen = table_names.width_choice(self.table, np.shape(content.rows)[1], "a file")
        if chosen:
            content = nothing() if chosen == "anew" else content
            content = table_names.fit(content, self.table.dim)
        _say_if_counts_begin(self.table, content.records, len(content.keys))
        return self._prepared("", 0, content)

    def _prepared(self, identity, staged_id, content=None):
        code, _, text = self._stage(staged_id, content).decode().partition(": ")
        if code == "RESOURCE_EXHAUSTED":
            raise tf.errors.ResourceExhaustedError(None, None, text)
        if code:
            raise tf.errors.InvalidArgumentError(None, None, text)
        commit, drop = self.commit_staged, self.drop_staged
        return StagedContent(commit, drop, identity=identity, target=self.table)


def stage_dump(
    variable: Any,
    folder: str,
    registered: int,
    name: str,
    rows_only: bool = False,
    until: str | int | None = None,
) -> tuple[int, manifest.Dump, bool]:
    """The staged content of the dump of table `name`, the dump, and whether deltas may follow."""
    # `rows_only` leaves out slot rows and the optimizer's step.

    def fitting(shard):
        _check_keys(shard.keys, variable)
        if resize:
            return table_names.fit(shard, variable.dim)
        if rows_only:
            shard.slot_rows, shard.slot_names, shard.slot_widths = shard.slot_rows[:, :0], [], []
            shard.optimizer_step = 0
        return shard

    dump = _dump_of(variable, folder, name)
    if until is not None:
        dump.deltas = manifest.chain_to(dump, until, "until", name)[1:]
        dump.identity = f"{dump.identity} with {len(dump.deltas)} deltas"
    ranks = comm.current().rank, comm.current().world_size
    what = f"restore of table '{variable.table_name}'"
    dim = dump.dim or variable.dim  # SOK 1.x stored none
    resize = table_names.width_choice(variable, dim, f"a dump in {folder}")
    content = deltas.content_of(dump, *ranks, dim, what)
    parts: Any = ()
    if resize == "anew":
        rest, num_keys = TableShard(**nothing().fields()), 0
    else:
        rest, num_keys = fitting(content.rest), content.num_keys
        parts = map(fitting, content.parts())
    _say_if_counts_begin(variable, rest.records, num_keys)
    staged_id = table_reader.stage_parts(registered, rest, num_keys, parts)
    # Deltas may follow unless state was left out, or the next dump has another name.
    may_grow = dump.may_grow and not rows_only and not resize and name == variable.table_name
    return staged_id, dump, may_grow


def _dump_of(variable, folder, name):
    """The dump of the table: one of this package, otherwise one of SOK 1.x."""
    try:
        return manifest.read_manifest(folder, name, None)
    except FileNotFoundError:
        # Files for SOK 1.x beside a dump, or a part of one, belong to it and have no slot rows.
        if manifest.manifests(folder) or manifest.has_shards(folder, name):
            raise
        of_sok1 = sok_files.find_dump(folder, name, variable.key_dtype.as_numpy_dtype)
        if of_sok1 is None:
            raise
        return of_sok1


def _say_if_counts_begin(table, records, num_keys):
    """Prints that a table with policies is read from a file of a table without; once for each."""
    is_new = table.keeps_records and records is None and num_keys > 0
    if is_new and comm.current().rank == 0 and "_counts_begin" not in vars(table):
        vars(table)["_counts_begin"] = True
        print(
            f"sok_like: table '{table.table_name}' is read from a file without frequencies and "
            "steps: its policies count from now.",
            file=sys.stderr,
            flush=True,
        )


def _check_keys(keys, variable):
    """Raises ValueError if lookups with the table's key dtype could not reach a key."""
    dtype = variable.key_dtype.as_numpy_dtype
    if np.dtype(dtype).itemsize == 8:
        return
    fit = keys.astype(dtype).astype(np.int64) == keys
    if not fit.all():
        raise ValueError(
            f"Table '{variable.table_name}' has keys of {variable.key_dtype.name}. Received: a "
            f"dump with key {int(keys[~fit][0])}"
        )
