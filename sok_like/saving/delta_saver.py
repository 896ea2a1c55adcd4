"""`sok.Saver().dump`: full dumps that deltas may follow, and the deltas.

    saver.dump(table, folder)                   all keys; from now on the table records changes
    saver.dump(table, folder, since="last")     keys touched and keys erased since; optimizer steps
    saver.begin_dump(table, folder)             all keys, while training goes on (`background.py`)
    saver.restore(table, folder)                base and deltas, in order
    saver.compact(table, folder)                merges base and deltas into one base

All calls are collective, in steps that all ranks take together
(`sok_like/runtime/ranks/graph_collectives.py`). A failure on one rank raises on all of them, before
anything was replaced.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.runtime.ranks.graph_collectives import Steps, text_of
from sok_like.saving import background
from sok_like.saving.format import deltas, durable, manifest, shard_file
from sok_like.saving.format.shard_reader import ShardFile
from sok_like.saving.parts import dump_checks
from sok_like.table import table_reader

_KEPT_NUMBERS = 256  # dumps that a table remembers; its log of changes is shorter


class DeltaSaver:
    """The methods of `sok.Saver` for deltas."""

    def dump(
        self, embedding_variable: Any, filepath: str | os.PathLike, *, since: Any = None
    ) -> tf.Tensor:
        """Writes the table, or what changed since an earlier dump, into folder `filepath`.

        After a full dump the table records which keys are touched, at 4 bytes per row and 8 per
        key touched. A delta holds the keys touched, and those erased or evicted since; its time
        and size grow with these. It replaces the dumps in the folder that came after `since`.

        Args:
            embedding_variable: EmbeddingVariable, in host memory.
            filepath: Folder, the same for a base and its deltas; created if it is missing.
            since: None for a full dump. For a delta, an earlier dump in this folder: `"last"`,
                the name that `dump` returned for it, or the optimizer's step when it was made.

        Returns:
            The name of this dump, a string scalar.

        Raises:
            TypeError: `embedding_variable` is not an EmbeddingVariable, or `since` is not one of
                the above.
            RuntimeError: a rank could not write, ranks dump different tables, there is no such
                dump, the table has not recorded the changes since, or is in device memory. It
                raises on all ranks and names the rank (in a graph `tf.errors.UnknownError`).
                Earlier dumps are unchanged.
        """
        variable = dump_checks.checked(embedding_variable)
        dump_checks.check_arguments(variable, filepath)
        dump_checks.finish_running(variable)
        work = _Dump(variable, filepath)
        given = _given(since, variable.table_name)
        (number,) = work.steps.take(work.agree, given, [tf.int64], verify=_same_start)
        (name,) = work.write([variable.register_for_read(), number], outputs=[tf.string])
        return work.steps.end(tf.ensure_shape(name, []))

    def begin_dump(
        self, embedding_variables: Any, filepath: str | os.PathLike
    ) -> background.BackgroundDump:
        """Begins a full dump that is written while training goes on.

        The dump is of the instant of this call, whatever changes afterwards. A thread of each rank
        writes the files. `finish()` makes them the dump in the folder, which until then is the
        earlier one. Other dumps and restores of the table by this class finish it first.

            dump = saver.begin_dump(tables, folder)   # all ranks, between the same two steps
            while not dump.done: ...                  # a training step of all ranks
            dump.finish()                             # all ranks

        Args:
            embedding_variables: EmbeddingVariable in host memory, or a list of them.
            filepath: Folder, as for `dump`.

        Returns:
            The dump: `done` says whether the files of all ranks are written, and `finish()`
            completes it. All ranks ask the one, and call the other.

        Raises:
            TypeError: as for `dump`.
            ValueError: no table, or two of the same name.
            RuntimeError: as for `dump`; also for the dump that it had to finish first.
            NotImplementedError: in a graph or a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise NotImplementedError(
                "`begin_dump` works eagerly; in a graph use `dump`. Received: a call in a graph"
            )
        several = isinstance(embedding_variables, (list, tuple))
        given = embedding_variables if several else [embedding_variables]
        variables = [dump_checks.checked(variable) for variable in given]
        names = [variable.table_name for variable in variables]
        if not names or len(set(names)) < len(names):
            required = "at least one table, each with a name of its own"
            raise wrong_argument("embedding_variables", required, names)
        for variable in variables:
            dump_checks.check_arguments(variable, filepath)
            dump_checks.finish_running(variable)
        folder = os.fspath(filepath)

        def start():
            for variable in variables:
                dump_checks.check_owner(folder, variable)
            return {"tables": names, "id": new_id()}

        told = agreed(start, comm.current(), "begin_dump")
        if any(each["tables"] != names for each in told):
            raise RuntimeError(
                "All ranks must dump the same tables. Received: "
                f"{[each['tables'] for each in told]}, by rank"
            )

        def publish(parts):
            background.publish(parts)
            for part in parts:
                dump_checks.mark_writer(folder, part.table)
                remember(part.table, part.id, part.instant)
            found = [tf.constant(part.id) for part in parts]
            return found if several else found[0]

        parts = [background.BackgroundPart(each, folder, told[0]["id"]) for each in variables]
        return background.BackgroundDump(parts, publish)

    def compact(self, embedding_variable: Any, filepath: str | os.PathLike) -> tf.Tensor:
        """Merges the deltas in folder `filepath` into their base; the table is unchanged.

        Each rank reads what it wrote before the deltas are removed. A new delta may follow the last
        one. Memory needed: some parts of 16 MiB, whatever the size of the dump.

        Args:
            embedding_variable: EmbeddingVariable with the name and `embedding_dim` of the dump.
            filepath: Folder.

        Returns:
            `'OK'`.

        Raises:
            TypeError: `embedding_variable` is not an EmbeddingVariable.
            RuntimeError: as for `restore_from_file`, or a rank could not write; on all ranks.
                The dump and its deltas are unchanged.
        """
        variable = dump_checks.checked(embedding_variable)
        dump_checks.check_arguments(variable, filepath)
        dump_checks.finish_running(variable)
        work = _Compaction(variable, filepath, "compact")
        work.steps.take(work.agree)
        work.write(verify=dump_checks.same_dump)
        return work.steps.end("OK")


def new_id() -> str:
    """The id of a new dump."""
    return f"{secrets.randbits(62):016x}"


def remember(variable: Any, name: str, number: int) -> None:
    """Records, under `number`, that the table keeps what changes since the dump `name`."""
    known = variable.__dict__.setdefault("_dump_numbers", {})
    known[name] = number
    while len(known) > _KEPT_NUMBERS:
        known.pop(next(iter(known)))


class _Work:
    """The steps that ranks take in one call."""

    def __init__(self, variable, filepath, call, name=None):
        self._variable, self._filepath, self._table = variable, filepath, variable.table_name
        self._communicator = comm.current()
        self._written = ""  # this rank's file
        self.steps = Steps(
            self._communicator,
            f"sok_{name or call}_{self._table}",
            f"{call} of table '{self._table}'",
            variable.mark,
        )

    @property
    def _folder(self):
        return os.fspath(self._filepath)  # evaluated in each run

    def agree(self):
        """A new dump's id, drawn in each run: the op of a graph writes another dump each time."""
        return {"id": new_id()}

    def write(self, inputs=(), outputs=(), verify=None):
        """The steps from the shards to the manifest; they leave no file if a rank fails."""
        undo = self.remove_mine
        self.steps.take(self.write_mine, inputs, verify=verify, undo=undo)
        self.steps.take(self.see, undo=undo)
        return self.steps.take(self.write_manifest, (), outputs, verify=self.finished, undo=undo)

    def _read_manifest(self):
        return manifest.read_manifest(self._folder, self._table, self._variable.dim)

    def _write(self, dump_id, shard):
        communicator = self._communicator
        name = manifest.shard_name(self._table, dump_id, communicator.rank, communicator.world_size)
        self._written = name
        try:
            return shard_file.write_shard(
                self._folder, name, shard, f"dump of table '{self._table}'"
            )
        except OSError as error:
            raise durable.explained(error, self._table) from error

    def see(self, told):
        """Checks all shards of this dump before they are named."""
        dump_checks.see_shards(self._folder, [each["entry"] for each in told])
        return told[self._communicator.rank]

    def _write_manifest(self, name, entries, step=-1, following=None):
        variable = self._variable
        head = manifest.Head(self._table, variable.dim, variable.key_dtype.name, name)
        try:
            manifest.write_manifest(self._folder, head, entries, step, following)
        except OSError as error:
            raise durable.explained(error, self._table) from error

    def remove_mine(self):
        if self._written:
            manifest.remove_unlisted(self._folder, self._table, self._written)

    def finished(self, _):
        """The dump is complete, on all ranks."""


class WholeDump(_Work):
    """The steps of `dump_to_file`."""

    def __init__(self, variable, filepath, rows_only):
        super().__init__(variable, filepath, "dump_to_file", "dump")
        self._rows_only = rows_only
        self.latest: list[Any] = []  # path of this rank's shard, and its number of keys

    def agree(self):
        dump_checks.check_owner(self._folder, self._variable)
        return super().agree()

    def write_mine(self, told, handed):
        with table_reader.content(handed, self._variable.dim) as (shard, _):
            if self._rows_only:
                shard.optimizer_step = 0
            entry = self._write(told[0]["id"], shard)
            self.latest[:] = [durable.join(self._folder, entry["file"]), len(shard.keys)]
        return {"id": told[0]["id"], "entry": entry}

    def write_manifest(self, told):
        if self._communicator.rank == 0:
            self._write_manifest(told[0]["id"], [each["entry"] for each in told])

    def finished(self, _):
        dump_checks.mark_writer(self._folder, self._variable)


class _Dump(_Work):
    def __init__(self, variable, filepath):
        super().__init__(variable, filepath, "dump")
        self._number = 0

    def agree(self, *given):
        """The dump to follow, and its number in this rank's table (0: a full dump)."""
        dump_checks.check_owner(self._folder, self._variable)
        said, number = {**super().agree(), "since": None}, 0
        if given:
            before = _dump_since(self._read_manifest(), given[0], self._table)
            number = self._variable.__dict__.get("_dump_numbers", {}).get(before.name, 0)
            if not number:
                raise ValueError(
                    "A delta must follow a dump that this table has written by `dump`, or was "
                    f"restored from. Received: since={before.name!r} (table '{self._table}'); "
                    "begin with a full dump, `since=None`"
                )
            said["since"] = before.name
        return said, np.int64(number)

    def write_mine(self, told, handed, since):
        with table_reader.content(handed, self._variable.dim, since) as (shard, self._number):
            if told[0]["since"] is None:
                shard.erased = None
            entry = self._write(told[0]["id"], shard)
        return {"start": told[0], "entry": entry, "step": shard.optimizer_step}

    def write_manifest(self, told):
        start, entries, step = told[0]["start"], [t["entry"] for t in told], told[0]["step"]
        name = start["id"]
        if self._communicator.rank == 0 and start["since"] is None:
            self._write_manifest(name, entries, step, [])
        elif self._communicator.rank == 0:
            base = self._read_manifest()
            _dump_since(base, start["since"].encode(), self._table)
            following, before = [], base
            while before.name != start["since"]:
                delta = base.deltas[len(following)]
                about = {"dump": delta.name, "since": before.name, "step": delta.step}
                following.append({**about, "shards": delta.entries})
                before = delta
            following.append({"dump": name, "since": before.name, "step": step, "shards": entries})
            self._write_manifest(base.name, base.entries, base.step, following)
        return {"name": name}, name.encode()

    def finished(self, told):
        dump_checks.mark_writer(self._folder, self._variable)
        remember(self._variable, told[0]["name"], self._number)


class _Compaction(_Work):
    def write_mine(self, told):
        dump, communicator = self._read_manifest(), self._communicator
        if not dump.deltas:
            return {"dump": dump.identity, "entry": None}
        mine = communicator.rank, communicator.world_size, self._variable.dim
        content = deltas.content_of(dump, *mine, f"compact of table '{self._table}'")
        entry = self._write(told[0]["id"], content.sorted())
        self._written_rest = content.rest
        return {"dump": dump.identity, "entry": entry}

    def see(self, told):
        mine = super().see(told)
        if mine["entry"] is not None:
            self._check_readable(mine["entry"])
        return mine

    def _check_readable(self, entry):
        """Reads this rank's file as a restore will: the dump that it replaces is removed next."""
        path, communicator = durable.join(self._folder, entry["file"]), self._communicator
        mine, dim = (communicator.rank, communicator.world_size), self._variable.dim
        file, wrote = ShardFile(path, dim, entry, owner=mine), self._written_rest
        content = deltas.MergedDump([[file]], *mine, dim)
        for _ in content.parts():  # checks the order of keys, and every row
            pass
        found = [content.num_keys, content.rest.slot_names, content.rest.records is None]
        required = [entry["keys"], wrote.slot_names, wrote.records is None]
        if found != required:
            raise ValueError(
                f"{path} must have as many keys of this rank, slot variables and records as were "
                f"written: {required}. Received: {found}; the dump and its deltas are unchanged"
            )

    def write_manifest(self, told):
        entries = [each["entry"] for each in told]
        if self._communicator.rank == 0 and entries[0] is not None:
            # The base takes the name of the last delta, which the next delta follows.
            last = self._read_manifest().deltas[-1]
            self._write_manifest(last.name, entries, last.step, [])


def _given(since, table):
    """`since` as inputs of a step: none, or one tensor."""
    if since is None:
        return []
    if tf.is_tensor(since) and (since.dtype == tf.string or since.dtype.is_integer):
        return [since if since.dtype == tf.string else tf.cast(since, tf.int64)]
    if isinstance(since, (str, bytes)):
        return [tf.constant(since)]
    if isinstance(since, (int, np.integer)) and not isinstance(since, bool):
        return [tf.constant(int(since), tf.int64)]
    required = 'None, "last", what `dump` has returned, or a step'
    raise wrong_argument("since", required, since, f"table '{table}'", TypeError)


def _same_start(told):
    if len({each["since"] for each in told}) > 1:
        raise RuntimeError(
            "All ranks must write a delta since the same dump, in a folder that they share. "
            f"Received: since={[each['since'] for each in told]}"
        )


def _dump_since(base, since, table):
    """The dump of the chain that the delta `since` follows."""
    if not base.may_grow:
        raise ValueError(
            f"A delta must follow a dump that `dump` has written. Received: a dump of "
            f"table '{table}' that `dump_to_file` has written; begin with a full dump, `since=None`"
        )
    chain = [base, *base.deltas]
    if np.issubdtype(np.asarray(since).dtype, np.integer):
        wanted: Any = int(since)
        found = [each for each in chain if each.step == wanted and wanted >= 0]
    else:
        wanted = text_of(since).decode()
        found = chain if wanted == "last" else [each for each in chain if each.name == wanted]
    if not found:
        raise ValueError(
            f"`since` must be a dump of table '{table}' in this folder: "
            f"{', '.join(f'{each.name!r} at step {each.step}' for each in chain)}. "
            f"Received: since={wanted!r}"
        )
    return found[-1]
