"""`tf.compat.v1.train.Saver` and `MonitoredTrainingSession` on any number of ranks.

    model.ckpt-100.index, .data-...            the ordinary variables, and the name of each dump
    model.ckpt-100.tables/user.3f2a9c0b/       a dump of table 'user', as `sok.Saver` writes it

A Saver sees a table as a string variable of the graph: the name of a dump. `Saver.save` writes the
dumps first, then that string with the rest. `restore` reads the string, then stages the dumps, and
compares the checksums of the rest. A graph may be finalized before it saves, so the ops that save
are made with the Saver. Savers without tables do what they did, but ranks raise if they would
overwrite each other's rows of a variable of which each rank has rows of its own (`de_local`).

A session that saves by time does so on all ranks at the same step: rank 0's clock decides. Asking
rank 0 at each step would cost an exchange each. So its answer says at which step to ask next: after
about a hundredth of the interval.
"""

import functools
import numbers
import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import Steps, agreed
from sok_like.saving import transaction
from sok_like.saving.parts import table_names
from sok_like.saving.parts.checkpointable import RankLocalVariables, StagedContent
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.table.variable import is_embedding_variable, unwrap

_SAVE, _RESTORE = "tf.compat.v1.train.Saver.save", "tf.compat.v1.train.Saver.restore"
_LOOKS = 100  # exchanges per interval of a session that saves by time


class TableInGraph:
    """The ops by which a v1 graph saves and restores one table."""

    def __init__(self, variable: Any):
        with variable.graph.as_default(), tf.control_dependencies(None), tf.device("/CPU:0"):
            # The table's name in checkpoints.
            name = f"{variable._shared_name}/dump"
            handle = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=name, name=name)
            self.element = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)
            self.key = handle.op.name  # under which a Saver writes the reference
            self.reference = tf.compat.v1.placeholder(tf.string, [])
            self.refer = tf.raw_ops.AssignVariableOp(resource=handle, value=self.reference)
            self.handed = {each: variable.register_for_read(evict=each) for each in (False, True)}
            self.staged_id = tf.compat.v1.placeholder(tf.int64, [])
            staged, self.problem = variable.stage(self.staged_id)
            # The staged content stays between two runs of the session.
            name = f"{variable._shared_name}/aside"
            aside = tf.raw_ops.VarHandleOp(dtype=tf.variant, shape=[], shared_name=name, name=name)
            self.read = tf.raw_ops.AssignVariableOp(resource=aside, value=staged)
            self.forget = tf.raw_ops.DestroyResourceOp(resource=aside)
            content = tf.raw_ops.ReadVariableOp(resource=aside, dtype=tf.variant)
            self.take = variable.commit_staged(content)


class _SessionPart(HashTablePart):
    """A table of a graph, as a part; it asks its table in a session."""

    def __init__(self, table, session):
        super().__init__(table)
        self._session, self._ops = session, in_graph(table)

    def _register(self, evict):
        return int(self._session.run(self._ops.handed[evict]))

    def _stage(self, staged_id, content):
        run = [self._ops.problem, self._ops.read]
        return self._session.run(run, {self._ops.staged_id: staged_id})[0]

    def commit_staged(self):
        self._session.run(self._ops.take)
        self.drop_staged()

    def drop_staged(self):
        self._session.run(self._ops.forget)


def in_graph(variable: Any) -> TableInGraph:
    """The ops of a table in its graph; they are made once."""
    if not hasattr(variable, "_table_in_graph"):
        variable._table_in_graph = TableInGraph(variable)
    return variable._table_in_graph


def _kinds_of(saver):
    """What a Saver was made for; its tables are in the same order on all ranks."""
    listed = saver._var_list
    listed = listed.values() if isinstance(listed, dict) else tf.nest.flatten(listed or [])
    kinds = RankLocalVariables(listed)
    kinds.tables.sort(key=lambda table: table._shared_name)
    return kinds


def _check_own_rows(local, path, tables):
    """Raises NotImplementedError if ranks would write their own rows of a variable to one file."""
    if not local or comm.current().world_size == 1:
        return
    paths = agreed(lambda: os.path.abspath(path), comm.current(), _SAVE)
    if tables or len(set(paths)) < len(paths):
        raise NotImplementedError(
            "Ranks must not overwrite each other's rows of a variable: give the "
            "tf.compat.v1.train.Saver a separate path on each rank and no hash table, or leave the "
            f"variable out (`var_list=`). Received: {os.fspath(path)!r} on {len(paths)} ranks, "
            f"variable {local[0].name!r}"
        )


def save(
    own: Callable,
    self: Any,
    sess: Any,
    save_path: Any,
    global_step: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`tf.compat.v1.train.Saver.save`: writes tables beside the file."""
    kinds = _kinds_of(self)
    tables = [] if tf.executing_eagerly() else kinds.tables
    _check_own_rows(kinds.own, save_path, tables)
    if not tables:
        return own(self, sess, save_path, global_step, *args, **kwargs)
    if global_step is not None and not isinstance(global_step, numbers.Integral):
        global_step = int(tf.compat.v1.train.global_step(sess, global_step))
    number = f"{global_step:08d}" if self._pad_step_number else str(global_step)
    path = os.fspath(save_path) if global_step is None else f"{os.fspath(save_path)}-{number}"

    def common(references):
        if comm.current().rank != 0:
            return
        for table, reference in zip(tables, references, strict=True):
            ops = in_graph(table)
            sess.run(ops.refer, {ops.reference: reference})
        own(self, sess, save_path, global_step, *args, **kwargs)

    parts = [_SessionPart(table, sess) for table in tables]
    transaction.Saving(Steps(_SAVE, own_error=True), parts, path, common).run()
    return path


def restore(own: Callable, self: Any, sess: Any, save_path: Any) -> Any:
    """`tf.compat.v1.train.Saver.restore`: reads tables from beside the file."""
    tables = [] if tf.executing_eagerly() or save_path is None else _kinds_of(self).tables
    if not tables:
        return own(self, sess, save_path)
    if table_names.renames():
        raise ValueError(
            "tf.compat.v1.train.Saver must be made with names in files as keys, Saver({'old/dump': "
            f"table}}), to rename tables. Received: sok.renamed_tables({table_names.renames()})"
        )
    path, known = os.fspath(save_path), {table._shared_name: table for table in tables}
    keys = {name: in_graph(table).key for name, table in known.items()}
    if isinstance(self._var_list, dict):
        of_tables = [pair for pair in self._var_list.items() if is_embedding_variable(pair[1])]
        keys |= {unwrap(variable)._shared_name: key for key, variable in of_tables}

    def read():
        reader = tf.train.load_checkpoint(path)
        for name, key in keys.items():
            if reader.has_tensor(key):  # else the Saver itself raises
                folder = transaction.folder_read(reader.get_tensor(key).decode())
                transaction.prepare(_SessionPart(known[name], sess).prepare(folder))
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)  # compares its checksum
        # TensorFlow reads and assigns the ordinary variables by one op.
        assign = functools.partial(own, self, sess, save_path)
        transaction.prepare(StagedContent(assign, may_fail=True))

    return transaction.load(_RESTORE, path, read, compared=f"{path}.index")


class SharedTimer:
    """Decides at which steps all ranks save."""

    def __init__(self, every_secs: float, communicator: comm.Communicator, call: str):
        self._every_secs, self._communicator, self._call = every_secs, communicator, call
        self._saved = self._looked = time.monotonic()
        self._looked_at: int | None = None
        self.next = 0  # the step at which to ask next

    def is_due(self, step: int) -> bool:
        """Whether the interval is over, by the clock of rank 0; all ranks ask at the same steps."""
        if step < self.next:
            return False

        def answer():
            now = time.monotonic()
            steps = 1 if self._looked_at is None else max(1, step - self._looked_at)
            pace = max(1e-9, (now - self._looked) / steps)
            self._looked, self._looked_at = now, step
            due = now >= self._saved + self._every_secs
            if due:
                self._saved = now
            return [due, step + max(1, round(self._every_secs / _LOOKS / pace))]

        due, self.next = agreed(answer, self._communicator, self._call)[0]
        return due


def begin(own: Callable, self: Any) -> None:
    """`CheckpointSaverHook.begin`: ranks save at the same step, by rank 0's clock."""
    own(self)
    seconds = self._timer._every_secs
    if seconds is None or comm.current_or_single().world_size == 1:
        return
    if any(map(is_embedding_variable, tf.compat.v1.global_variables())):
        self._shared_timer = SharedTimer(seconds, comm.current(), "CheckpointSaverHook")


def after_run(own: Callable, self: Any, run_context: Any, run_values: Any) -> None:
    """`CheckpointSaverHook.after_run`: all ranks save if that clock says so, or none does."""
    timer = getattr(self, "_shared_timer", None)
    if timer is None:
        return own(self, run_context, run_values)
    # The step was read while the training op ran: it may be the one before that op or after it.
    if run_values.results + self._steps_per_run >= timer.next:
        step = int(run_context.session.run(self._global_step_tensor))
        if step != self._timer.last_triggered_step() and timer.is_due(step):
            self._timer.update_last_triggered_step(step)
            if self._save(run_context.session, step):
                run_context.request_stop()
    return None
