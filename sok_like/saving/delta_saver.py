"""`sok.Saver().dump`: full dumps that deltas may follow, and the deltas.

    saver.dump(table, folder)                   all keys; from now on the table records changes
    saver.dump(table, folder, since="last")     keys touched and keys erased since; optimizer steps
    saver.begin_dump(table, folder)             all keys, while training goes on (`background.py`)
    saver.restore(table, folder)                base and deltas, in order
    saver.compact(table, folder)                merges base and deltas into one base

All calls are collective and eager, in the steps of `transaction.Saving`. A failure on one rank
raises on all of them, before anything was replaced.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import wrong_argument
from sok_like.runtime.ranks.agreement import Steps
from sok_like.saving import background
from sok_like.saving.history import History, chosen_dump
from sok_like.saving.parts import dump_checks
from sok_like.saving.parts.table_dumps import CompactedDump, GrowingDump
from sok_like.saving.transaction import Saving


class DeltaSaver(History):
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
            TypeError: `since` is not one of the above.
            RuntimeError: a rank could not write, ranks dump different tables, there is no such
                dump, the table has not recorded the changes since, or is in device memory. Earlier
                dumps are unchanged.
            NotImplementedError: in a graph or a `tf.function`.
        """
        variable = _checked("dump", embedding_variable, filepath)
        required = 'None, "last", what `dump` has returned, or a step'
        chosen = chosen_dump("since", required, since, variable.table_name)
        dump = GrowingDump(variable, filepath, chosen)
        Saving(Steps(f"dump of table '{dump.name}'", alone_alike=True), [dump]).run()
        return tf.constant(dump.dump_id())

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
            ValueError: no table, or two of the same name.
            RuntimeError: as for `dump`; also for the dump that it had to finish first.
            NotImplementedError: in a graph or a `tf.function`.
        """
        several = isinstance(embedding_variables, (list, tuple))
        given = embedding_variables if several else [embedding_variables]
        variables = [_checked("begin_dump", variable, filepath) for variable in given]
        names = [variable.table_name for variable in variables]
        if not names or len(set(names)) < len(names):
            required = "at least one table, each with a name of its own"
            raise wrong_argument("embedding_variables", required, names)
        dumps = [background.BackgroundTableDump(each, filepath) for each in variables]
        Saving(Steps("begin_dump"), dumps).agree()
        saving = Saving(Steps(background.CALL, alone_alike=True), dumps)

        def publish():
            saving.write()
            ids = [tf.constant(dump.dump_id()) for dump in dumps]
            return ids if several else ids[0]

        return background.BackgroundDump(dumps, publish)

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
            RuntimeError: as for `restore_from_file`, or a rank could not write. The dump and its
                deltas are unchanged.
            NotImplementedError: in a graph or a `tf.function`.
        """
        variable = _checked("compact", embedding_variable, filepath)
        dump = CompactedDump(variable, filepath)
        Saving(Steps(f"compact of table '{dump.name}'", alone_alike=True), [dump]).run()
        return tf.constant("OK")


def _checked(call, variable, filepath):
    """The table of a call, which writes nothing else at the moment."""
    if not tf.executing_eagerly():
        raise NotImplementedError(
            f"`{call}` works eagerly; in a graph use `dump_to_file`. Received: a call in a graph"
        )
    return dump_checks.ready(variable, filepath)
