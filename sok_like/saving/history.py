"""What there is to go back to: dumps with their deltas, backups, exports with their deltas."""

import datetime
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.runtime.checks import as_integer, require, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.saving.format import durable, folders, manifest

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
# The steps of an optimizer: of Keras 3 by attribute and by number, and of tf_keras.
_ITERATIONS = re.compile(rf"(.*/)?optimizer/(_iterations|iterations|_variables/0|iter){_VALUE}")


class Saved(NamedTuple):
    """Something that a folder holds."""

    kind: str  # "base", "delta", "backup", "export" or "export delta"
    table: str  # of a dump; "" for the others, which hold whole models
    name: str
    time: datetime.datetime  # when its last file was written
    step: int | None  # of the optimizer; None: not known
    bytes: int

    def __str__(self) -> str:
        table = f" of table '{self.table}'" if self.table else ""
        step = "" if self.step is None else f", step {self.step:,}"
        time = self.time.isoformat(" ", "seconds")
        return f"{time}  {self.kind} {self.name}{table}{step}, {self.bytes:,} bytes"


class History:
    """The methods of `sok.Saver` for earlier states."""

    def list(self, filepath: str | os.PathLike) -> Sequence[Saved]:
        """What folder `filepath` holds, oldest first within its kind. Any rank may ask alone.

        Args:
            filepath: Folder of dumps and deltas, of the backups of
                `sok.callbacks.BackupAndRestore` or a `tf.train.CheckpointManager`, or of exports
                with their deltas, as `sok.callbacks.ServeWhileTraining` writes them.

        Returns:
            One item per base, delta, backup, export and delta of an export: `kind`, `table`,
            `name`, `time`, `step` and `bytes`. A file that is copied may get another time.

        Raises:
            FileNotFoundError: there is no such folder, or files of a dump are missing.
            ValueError: a manifest is damaged.
        """
        folder = os.fspath(filepath)
        if not durable.is_folder(folder):
            raise FileNotFoundError(f"`filepath` must be a folder. Received: {folder!r}")
        saved = []
        for table, base in manifest.read_all(folder).items():
            for kind, dump in [("base", base), *(("delta", delta) for delta in base.deltas)]:
                saved.append(_saved(kind, table, dump.name, dump.step, dump.files))
        return [*saved, *_backups(folder), *_exports(folder)]

    def go_back(self, filepath: str | os.PathLike, until: str) -> None:
        """Makes an earlier backup of a model the latest one, and removes those after it.

        All ranks call it, while no job writes to the folder. The next `fit` with
        `sok.callbacks.BackupAndRestore` and this folder goes on there. A table's dump needs no such
        call: see `restore(until=...)`.

        Args:
            filepath: Folder of `BackupAndRestore(max_to_keep=...)` or a `CheckpointManager`.
            until: The name of a backup, which `list` shows.

        Raises:
            ValueError: there is no such backup; on several ranks RuntimeError, on all of them.
        """
        folder, communicator = os.fspath(filepath), comm.current_or_single()

        def go_back():
            state = tf.train.get_checkpoint_state(folder)
            paths = [] if state is None else list(state.all_model_checkpoint_paths)
            names = [os.path.basename(path) for path in paths]
            require(until in names, "until", f"a backup in {folder}: one of {names}", until)
            count = names.index(until) + 1
            state.model_checkpoint_path = until
            state.all_model_checkpoint_paths[:] = names[:count]
            del state.all_model_checkpoint_timestamps[count:]
            # First what names the backups: an interrupt leaves files that nothing names.
            durable.write(durable.join(folder, "checkpoint"), str(state).encode())
            for path in paths[count:]:
                for file in _files_of(path):
                    durable.remove(file)
                folders.remove_all(path)

        agreed(None if communicator.rank else go_back, communicator, "Saver.go_back")


def chosen_dump(argument: str, required: str, value: Any, table: str) -> str | int | None:
    """An argument that chooses a dump, by its name or step; or None."""
    chosen = value.numpy() if hasattr(value, "numpy") else value
    chosen = chosen.decode() if isinstance(chosen, bytes) else chosen
    if chosen is None or (isinstance(chosen, str) and chosen):
        return chosen
    step = as_integer(chosen)
    if step is None:
        raise wrong_argument(argument, required, value, f"table '{table}'", TypeError)
    return step


def _saved(kind, table, name, step, files):
    time = datetime.datetime.fromtimestamp(max(map(durable.modified, files))).astimezone()
    step = None if step is None or step < 0 else step
    return Saved(kind, table, name, time, step, sum(map(durable.size, files)))


def _backups(folder) -> Iterator[Saved]:
    state = tf.train.get_checkpoint_state(folder)
    for path in [] if state is None else state.all_model_checkpoint_paths:
        names = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        counts = [name for name in names if _ITERATIONS.fullmatch(name)]
        step = int(tf.train.load_variable(path, min(counts))) if counts else None
        yield _saved("backup", "", os.path.basename(path), step, _files_of(path))


def _exports(folder) -> Iterator[Saved]:
    inside = [durable.join(folder, name) for name in durable.names(folder)]
    for path in [folder, *inside]:
        if durable.exists(durable.join(path, "saved_model.pb")):
            name = os.path.basename(os.path.normpath(path))
            yield _saved("export", "", name, None, list(durable.files_below(path)))
            deltas = f"{path.rstrip('/')}.deltas"
            for file in durable.names(deltas):
                if file.endswith(".index"):
                    delta = file.removesuffix(".index")
                    files = _files_of(durable.join(deltas, delta))
                    yield _saved("export delta", "", delta, None, files)


def _files_of(prefix):
    """The files of a checkpoint, and those of tables beside it."""
    folder, stem = os.path.split(prefix)
    pattern = re.compile(re.escape(stem) + r"\.(index|data-\d+-of-\d+)")
    files = [durable.join(folder, n) for n in durable.names(folder) if pattern.fullmatch(n)]
    return [*files, *durable.files_below(f"{prefix}.tables")]
