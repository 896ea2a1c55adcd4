"""`sok.Saver`: dumps tables to files, whole or as deltas, and restores them on any number of ranks.

Each rank writes its shard. On the way back each rank reads all shards and keeps the keys it owns,
so a dump of 4 ranks can be restored on 1, 3 or 64. All calls are collective (`transaction.Saving`),
at once or, for `dump_to_file` and `restore`, in a graph.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import require, wrong_argument
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks.agreement import GraphSteps, Steps, text_of
from sok_like.saving import background
from sok_like.saving.history import History, chosen_dump
from sok_like.saving.parts import hash_tables, table_dumps
from sok_like.saving.parts.table_names import name_in_files
from sok_like.saving.transaction import Saving
from sok_like.table import table_reader
from sok_like.table.keys import as_rows
from sok_like.table.snapshots import assign


class Saver(History):
    """Dumps tables with their optimizer state, whole or as deltas; restores on any number of ranks.

    The methods work eagerly. In a graph `dump_to_file`, `restore`, `restore_from_file` and
    `load_embedding_values` return an op to run, and an `os.PathLike` is asked for its folder in
    each run; the others raise NotImplementedError. What is no EmbeddingVariable raises TypeError.
    Other errors of one rank raise on all ranks and name the rank (in a graph as
    `tf.errors.UnknownError`).

    `embedding_variable` is an EmbeddingVariable. `filepath` is a folder, the same for a base and
    its deltas; it is created if it is missing. With several hosts it must be on a file system they
    share. A dump in it stays valid until the new one is complete, and after an error is unchanged.
    Methods return `'OK'` if nothing else is said.
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

        Args:
            rows_only: Omits the optimizer's state: slot rows and number of steps.
            sok1_files: When the dump is complete, also writes keys and rows into the two files that
                SOK 1.x's Saver wrote, see `sok_like/saving/parts/sok_files.py`.

        Raises:
            RuntimeError: a rank could not write, ranks dump different tables, the folder is not
                shared, or another table of the same name was dumped there.
        """
        variable = _ready(embedding_variable, filepath, rows_only=rows_only, sok1_files=sok1_files)
        steps = _steps("dump_to_file", "dump", variable)
        dump = table_dumps.TableDump(variable, filepath, rows_only)
        saving = Saving(steps, [dump])
        saving.agree()
        saving.write([variable.register_for_read(not rows_only, evict=True)])
        if sok1_files:
            Saving(steps, [table_dumps.sok1_files(dump)]).run()
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

        In the scope of `sok.renamed_tables` the dump may be that of a table of another name. The
        optimizer continues from the dump's step, whatever it has counted itself: see
        docs/semantics.md. `dump(since="last")` may follow at once.

        Args:
            embedding_variable: EmbeddingVariable with the name and `embedding_dim` of the dump.
            filepath: Folder. For a dump of SOK 1.x, its folder or the path of its file of keys: see
                `sok_like/saving/parts/sok_files.py`.
            rows_only: Ignores the optimizer's state: slot rows get their initial values, and steps
                count from 1.
            until: Goes back to an earlier dump in the folder: the base, or a delta and those before
                it. A name that `dump` returned or `list` shows, or the optimizer's step of a dump.
                The files stay. A dump that goes on from there is a full one, or a delta with
                `since` the same dump, which replaces those after it.

        Raises:
            RuntimeError: there is no dump, a file is damaged, `embedding_dim` differs, the table
                cannot have some of the keys, or ranks restore different tables or dumps.
            tf.errors.ResourceExhaustedError: a rank cannot hold its keys; on all ranks.
                After either error the table is unchanged on every rank.
        """
        variable = _ready(embedding_variable, filepath, rows_only=rows_only)
        required = "None, a name that `dump` has returned, or a step"
        chosen = chosen_dump("until", required, until, variable.table_name)
        name = name_in_files(variable.table_name)
        steps = _steps("restore_from_file", "restore", variable)
        present: list[Any] = []  # the content that is staged at present, and its dump

        def read(_, registered):
            folder = os.fspath(filepath)
            staged_id, dump, may_grow = hash_tables.stage_dump(
                variable, folder, int(registered), name, rows_only, chosen
            )
            present[:] = staged_id, dump
            return {"dump": dump.identity}, np.int64(staged_id), np.bool_(may_grow)

        def drop():
            if present:
                table_reader.drop_staged(present[0])
                present.clear()

        def note(_, number):
            table_dumps.add_owner(os.fspath(filepath), variable)
            if chosen is not None:  # the table has left the dumps that came later
                vars(variable).pop("_dump_numbers", None)
            if number > 0:
                last = (present[1].deltas or [present[1]])[-1]
                table_dumps.remember(variable, last.name, int(number))

        # First all ranks stage the table's new content, which may fail; then they take it.
        steps.take(lambda: None)
        inputs, dtypes = [variable.register_for_read()], [tf.int64, tf.bool]
        verify = table_dumps.same_dump
        staged_id, may_grow = steps.take(read, inputs, dtypes, verify=verify, undo=drop)
        staged, problem = variable.stage(staged_id)
        steps.take(lambda _, text: table_reader.see_problem(text_of(text)), [problem])
        with steps.done():
            taken = variable.commit_staged(staged)
        with tf.control_dependencies([taken] if isinstance(taken, tf.Operation) else []):
            # Starts to record changes if deltas may follow.
            keep_changes = libraries.ops().sok_table_keep_changes
            number = keep_changes(handle=variable.handle, keep=may_grow)
        steps.take(note, [number])
        return steps.end("OK")

    def restore_from_file(
        self, embedding_variable: Any, filepath: str | os.PathLike, *, rows_only: bool = False
    ) -> tf.Tensor:
        """`restore` without `until`, under SOK 1.x's name."""
        return self.restore(embedding_variable, filepath, rows_only=rows_only)

    def dump(
        self, embedding_variable: Any, filepath: str | os.PathLike, *, since: Any = None
    ) -> tf.Tensor:
        """Writes the table, or what changed since an earlier dump, into folder `filepath`.

        After a full dump the table records which keys are touched, at 4 bytes per row and 8 per
        key touched. A delta holds the keys touched, and those erased or evicted since; its time
        and size grow with these. It replaces the dumps in the folder that came after `since`.

        Args:
            embedding_variable: EmbeddingVariable, in host memory.
            since: None for a full dump. For a delta, an earlier dump in this folder: `"last"`,
                the name that `dump` returned for it, or the optimizer's step when it was made.

        Returns:
            The name of this dump, a string scalar.

        Raises:
            TypeError: `since` is not one of the above.
            RuntimeError: a rank could not write, ranks dump different tables, there is no such
                dump, the table has not recorded the changes since, or is in device memory.
        """
        variable = _ready(embedding_variable, filepath, "dump")
        required = 'None, "last", what `dump` has returned, or a step'
        chosen = chosen_dump("since", required, since, variable.table_name)
        dump = table_dumps.GrowingDump(variable, filepath, chosen)
        Saving(Steps(f"dump of table '{dump.name}'"), [dump]).run()
        return tf.constant(dump.dump_id())

    def begin_dump(
        self, embedding_variables: Any, filepath: str | os.PathLike
    ) -> background.BackgroundDump:
        """Begins a full dump that is written while training goes on.

        All ranks call it between the same two steps. The dump is of that instant, whatever changes
        afterwards. A thread of each rank writes the files. `finish()` makes them the dump in the
        folder, which until then is the earlier one. Other dumps and restores of the table by this
        class finish it first.

        Args:
            embedding_variables: EmbeddingVariable in host memory, or a list of them.

        Returns:
            The dump: `done` says whether the files of all ranks are written, and `finish()`
            completes it. All ranks ask the one, and call the other.

        Raises:
            ValueError: no table, or two of the same name.
            RuntimeError: as for `dump`; also for the dump that it had to finish first.
        """
        several = isinstance(embedding_variables, (list, tuple))
        given = embedding_variables if several else [embedding_variables]
        variables = [_ready(variable, filepath, "begin_dump") for variable in given]
        names = [variable.table_name for variable in variables]
        required = "at least one table, each with a name of its own"
        require(0 < len(names) == len(set(names)), "embedding_variables", required, names)
        dumps = [background.BackgroundTableDump(variable, filepath) for variable in variables]
        Saving(Steps("begin_dump", own_error=True), dumps).agree()
        saving = Saving(Steps(background.CALL), dumps)

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

        Raises:
            RuntimeError: as for `restore`, or a rank could not write.
        """
        variable = _ready(embedding_variable, filepath, "compact")
        dump = table_dumps.CompactedDump(variable, filepath)
        Saving(Steps(f"compact of table '{dump.name}'"), [dump]).run()
        return tf.constant("OK")

    def load_embedding_values(self, embedding_variable: Any, tensors: Sequence[Any]) -> Any:
        """Writes rows of a dense table: row i becomes the row of key i.

        Args:
            tensors: A tensor `[num_rows, embedding_dim]`, or a list of such tensors, which are
                concatenated. The same on all ranks; each rank takes the keys it owns.

        Raises:
            TypeError: rows are not real numbers.
            ValueError: `tensors` is an empty list.
            tf.errors.InvalidArgumentError: the rows are not `[num_rows, embedding_dim]`.
        """
        variable = hash_tables.checked(embedding_variable)
        tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        of = f"table '{variable.table_name}'"
        require(bool(tensors), "tensors", "a tensor, or a list of at least one", tensors, of)
        rows = tf.concat([as_rows(each, "tensors", variable.table_name) for each in tensors], 0)
        keys = tf.range(tf.shape(rows, tf.int64)[0], dtype=tf.int64)
        done = assign(variable, keys, rows)
        with tf.control_dependencies([done] if isinstance(done, tf.Operation) else []):
            return tf.constant("OK")


def _ready(variable, filepath, eager_call="", **flags):
    """The table of a call, which writes nothing else now; checks its other arguments."""
    if eager_call and not tf.executing_eagerly():
        raise NotImplementedError(
            f"`{eager_call}` works eagerly; in a graph use `dump_to_file`. Received: a call in a "
            "graph"
        )
    variable = hash_tables.checked(variable)
    of = f"table '{variable.table_name}'"
    if not isinstance(filepath, (str, os.PathLike)) or isinstance(os.fspath(filepath), bytes):
        required = "a folder, as a str or an os.PathLike"
        raise wrong_argument("filepath", required, filepath, of, TypeError)
    required = "a folder; '.' is the working directory"
    require(filepath != "", "filepath", required, filepath, of)
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise wrong_argument(name, "True or False", value, of, TypeError)
    background.finish_running(variable)
    return variable


def _steps(call, name, variable):
    """The steps of a call of the Saver: at once, or in a graph."""
    call = f"{call} of table '{variable.table_name}'"
    if tf.executing_eagerly():
        return Steps(call)
    return GraphSteps(call, f"sok_{name}_{variable.table_name}", variable.mark)
