"""`sok.Saver`: dumps whole tables to files and restores them, on any number of ranks.

Each rank writes its shard. On the way back each rank reads all shards and keeps the keys it owns,
so a dump of 4 ranks can be restored on 1, 3 or 64. `format/manifest.py` describes the files.

Both directions are collective, in steps that all ranks take together, at once or in a graph
(`sok_like/runtime/ranks/agreement.py`):

    dump      agree on call and dump | write the shards | see all shards             | manifest
    restore   agree on call          | read the shards  | stage the new content      | take it

A failure on one rank raises on all of them, before anything was replaced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import require
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks.agreement import GraphSteps, Steps, text_of
from sok_like.saving import delta_saver
from sok_like.saving.history import chosen_dump
from sok_like.saving.parts import dump_checks, hash_tables
from sok_like.saving.parts.dump_checks import checked, same_dump
from sok_like.saving.parts.table_dumps import Sok1Files, TableDump, remember
from sok_like.saving.parts.table_names import name_in_files
from sok_like.saving.transaction import Saving
from sok_like.table import table_reader
from sok_like.table.keys import as_rows
from sok_like.table.weights import assign


class Saver(delta_saver.DeltaSaver):
    """Dumps tables with their optimizer state, whole or as deltas; restores on any number of ranks.

    The methods work eagerly. In a graph `dump_to_file`, `restore`, `restore_from_file` and
    `load_embedding_values` return an op to run, and an `os.PathLike` is asked for its folder in
    each run; the others raise. What is no EmbeddingVariable raises TypeError. Other errors of one
    rank raise on all ranks and name the rank (in a graph as `tf.errors.UnknownError`).
    """

    def dump_to_file(
        self,
        embedding_variable: Any,
        filepath: str | os.PathLike,
        *,
        rows_only: bool = False,
        sok1_files: bool = True,
    ) -> tf.Tensor:
        """Writes keys, rows and slot rows of one instant into folder `filepath`.

        A table with policies adds its records. GlobalStepEvict and L2WeightEvict are applied first,
        as by `embedding_variable.evict()`.

        With several hosts the folder must be on a file system they share. An earlier dump in the
        folder stays valid until the new one is complete.

        Args:
            embedding_variable: EmbeddingVariable.
            filepath: Folder; created if it is missing.
            rows_only: Omits the optimizer's state: slot rows and number of steps.
            sok1_files: When the dump is complete, also writes keys and rows into the two files that
                SOK 1.x's Saver wrote, see `sok_like/saving/format/sok1_files.py`.

        Returns:
            `'OK'`.

        Raises:
            RuntimeError: a rank could not write, ranks dump different tables, the folder is not
                shared, or another table of the same name was dumped there. The earlier dump is
                unchanged.
        """
        flags = {"rows_only": rows_only, "sok1_files": sok1_files}
        variable = dump_checks.ready(embedding_variable, filepath, **flags)
        steps = _steps("dump_to_file", "dump", variable)
        dump = TableDump(variable, filepath, rows_only)
        saving = Saving(steps, [dump])
        saving.agree()
        saving.write([variable.register_for_read(not rows_only, evict=True)])
        if sok1_files:
            Saving(steps, [Sok1Files(dump)]).run()
        return steps.end("OK")

    def restore(
        self,
        embedding_variable: Any,
        filepath: str | os.PathLike,
        *,
        rows_only: bool = False,
        until: Any = None,
    ) -> tf.Tensor:
        """Replaces the table's content by the dump in folder `filepath`, with its deltas.

        Afterwards `dump(since="last")` may follow at once. Otherwise this is `restore_from_file`,
        which reads deltas, too; arguments and errors are the same.

        Args:
            until: Goes back to an earlier dump in the folder: the base, or a delta and those before
                it. A name that `dump` returned or `list` shows, or the optimizer's step of a dump.
                The files stay. A dump that goes on from there is a full one, or a delta with
                `since` the same dump, which replaces those after it.
        """
        variable = dump_checks.ready(embedding_variable, filepath, rows_only=rows_only)
        required = "None, a name that `dump` has returned, or a step"
        chosen = chosen_dump("until", required, until, variable.table_name)
        return _restore(variable, filepath, rows_only, chosen)

    def restore_from_file(
        self, embedding_variable: Any, filepath: str | os.PathLike, *, rows_only: bool = False
    ) -> tf.Tensor:
        """Replaces the table's content by the dump in folder `filepath`, with its deltas.

        In the scope of `sok.renamed_tables` the dump may be that of a table of another name.

        The optimizer continues from the dump's step, whatever it has counted itself: see
        docs/semantics.md.

        Args:
            embedding_variable: EmbeddingVariable with the name and `embedding_dim` of the dump.
            filepath: Folder. For a dump of SOK 1.x, its folder or the path of its file of keys: see
                `sok_like/saving/format/sok1_files.py`.
            rows_only: Ignores the optimizer's state: slot rows get their initial values, and steps
                count from 1.

        Returns:
            `'OK'`.

        Raises:
            RuntimeError: there is no dump, a file is damaged, `embedding_dim` differs, the table
                cannot have some of the keys, or ranks restore different tables or dumps.
            tf.errors.ResourceExhaustedError: a rank cannot hold its keys; on all ranks.
                After either error the table is unchanged on every rank.
        """
        return self.restore(embedding_variable, filepath, rows_only=rows_only)

    def load_embedding_values(self, embedding_variable: Any, tensors: Sequence[Any]) -> Any:
        """Writes rows of a dense table: row i becomes the row of key i.

        Args:
            embedding_variable: EmbeddingVariable.
            tensors: A tensor `[num_rows, embedding_dim]`, or a list of such tensors, which are
                concatenated. The same on all ranks; each rank takes the keys it owns.

        Returns:
            `'OK'`.

        Raises:
            TypeError: rows are not real numbers.
            ValueError: `tensors` is an empty list.
            tf.errors.InvalidArgumentError: the rows are not `[num_rows, embedding_dim]`.
        """
        variable = checked(embedding_variable)
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        of = f"table '{variable.table_name}'"
        require(bool(tensors), "tensors", "a tensor, or a list of at least one", tensors, of)
        parts = [as_rows(tensor, "tensors", variable.table_name) for tensor in tensors]
        rows = tf.concat(parts, axis=0)
        keys = tf.range(tf.shape(rows, tf.int64)[0], dtype=tf.int64)
        done = assign(variable, keys, rows)
        with tf.control_dependencies([done] if isinstance(done, tf.Operation) else []):
            return tf.constant("OK")


def _steps(call, name, variable):
    """The steps of a call of the Saver: at once, or in a graph."""
    call = f"{call} of table '{variable.table_name}'"
    if tf.executing_eagerly():
        return Steps(call, alone_alike=True)
    return GraphSteps(call, f"sok_{name}_{variable.table_name}", variable.mark)


def _restore(variable, filepath, rows_only, until):
    """Stages the table's new content on all ranks, which may fail, then takes it."""
    name = name_in_files(variable.table_name)
    steps = _steps("restore_from_file", "restore", variable)
    dumps: list[hash_tables.StagedDump] = []  # the one that is read at present

    def read(_, registered):
        folder = os.fspath(filepath)
        dump = hash_tables.stage_dump(variable, folder, int(registered), name, rows_only, until)
        dumps[:] = [dump]
        return {"dump": dump.identity}, np.int64(dump.staged_id), np.bool_(dump.may_grow)

    def drop():
        if dumps:
            table_reader.drop_staged(dumps.pop().staged_id)

    def see(_, problem):
        table_reader.see_problem(text_of(problem))

    def finished(_):
        dump_checks.mark_reader(os.fspath(filepath), variable)

    def note(_, number):
        if until is not None:  # the table has left the dumps that came later
            vars(variable).pop("_dump_numbers", None)
        if number > 0:
            remember(variable, dumps[0].last, int(number))

    steps.take(lambda: None)
    inputs, dtypes = [variable.register_for_read()], [tf.int64, tf.bool]
    staged_id, may_grow = steps.take(read, inputs, dtypes, verify=same_dump, undo=drop)
    staged, problem = variable.stage(staged_id, **hash_tables.NOTHING)
    steps.take(see, [problem], verify=finished)
    with steps.done():
        taken = variable.commit_staged(staged)
    with tf.control_dependencies([taken] if isinstance(taken, tf.Operation) else []):
        # Starts to record changes if deltas may follow.
        number = libraries.ops().sok_table_keep_changes(handle=variable.handle, keep=may_grow)
    steps.take(note, [number])
    return steps.end("OK")
