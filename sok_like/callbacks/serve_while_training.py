"""`sok.callbacks.ServeWhileTraining`: servers that follow a `fit`."""

import contextlib
import datetime
import os
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import as_integer, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, check_same
from sok_like.saving.containers.v1_saver import SharedTimer
from sok_like.saving.format import durable
from sok_like.serving.delta import NEARLY_FULL, FullExportDue, export_delta
from sok_like.serving.export import HEADROOM, export_saved_model

_CALL = "sok.callbacks.ServeWhileTraining"


class ServeWhileTraining(tf.keras.callbacks.Callback):
    """Exports the model when training begins, and then what has changed, for servers that follow.

    Every rank needs this callback, with the same arguments. Rank 0 writes SavedModels, `path/1`,
    `path/2` and so on, each with its deltas in `path/1.deltas/000001` and so on. The last delta is
    of the end of `fit`. A new SavedModel is made by each `fit`, and when the room for new keys is
    nearly taken; it replaces the deltas of the one before, and the SavedModels before that.
    Training waits while an export or a delta is written. `docs/serving.md` has the server.

    Args:
        path: Folder of the SavedModels; used for nothing else.
        every: A number of batches, or a `datetime.timedelta`, between two deltas. After about a
            hundredth of such a time ranks ask rank 0 whether it is over.
        missing, row_dtype, signatures, headroom: As for `sok.export_saved_model`.

    Raises:
        ValueError: `every` is out of range; in training, what `sok.export_saved_model` and
            `sok.export_delta` raise, on all ranks.
        RuntimeError: ranks have different arguments.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        every: int | datetime.timedelta = 1000,
        *,
        missing: str = "initial",
        row_dtype: str = "float32",
        signatures: Any = None,
        headroom: float = HEADROOM,
    ):
        super().__init__()
        batches = as_integer(every)
        seconds = every.total_seconds() if isinstance(every, datetime.timedelta) else None
        if (seconds or 0) <= 0 and (batches or 0) < 1:
            raise wrong_argument("every", "a number of batches >= 1, or a positive time", every)
        self.path = os.fspath(path)
        self._every, self._seconds, self._batches = every, seconds, batches
        self._options: dict[str, Any] = {"missing": missing, "row_dtype": row_dtype}
        self._options |= {"signatures": signatures, "headroom": headroom}
        self._model_number = self._delta_number = self._seen = 0
        self._is_begun = self._is_full = False
        self._timer: Any = None

    def on_train_begin(self, logs=None):
        self._is_begun, self._seen = False, 0

    def on_epoch_begin(self, epoch, logs=None):
        if not self._is_begun:  # now every other callback has restored what it restores
            self._export()
            self._is_begun = True
            if self._seconds is not None:
                self._timer = SharedTimer(self._seconds, comm.current(), _CALL)

    def on_train_batch_end(self, batch, logs=None):
        self._seen += 1
        if self._seconds is None:
            is_due = self._seen % self._batches == 0
        else:
            is_due = self._timer.is_due(self._seen)
        if is_due:
            self._follow()

    def on_train_end(self, logs=None):
        if self._is_begun:
            self._follow()

    def _follow(self):
        """Writes a delta, or a SavedModel where none fits."""
        if not self._is_full:
            with contextlib.suppress(FullExportDue):
                name = f"{self._delta_number + 1:06}"
                delta = export_delta(self.model, f"{self._newest()}.deltas/{name}")
                self._delta_number += 1
                self._is_full = delta.fullness >= NEARLY_FULL
                return
        self._export()

    def _export(self):
        def state():  # the numbers of the SavedModels in the folder, and arguments
            numbers = [int(name) for name in durable.names(self.path) if name.isdigit()]
            return [sorted(numbers), self.path, str(self._every)]

        ranks = agreed(state, comm.current(), _CALL)
        check_same([arguments for _, *arguments in ranks], "All ranks must have the same arguments")
        numbers = ranks[0][0]  # other ranks may have another file system
        self._model_number, self._delta_number = max(numbers, default=0) + 1, 0
        export_saved_model(self.model, self._newest(), refreshable=True, **self._options)
        self._is_full = False
        if comm.current().rank == 0:
            for number in numbers:
                durable.remove_folder(f"{self._newest(number)}.deltas")
                if number < self._model_number - 1:
                    durable.remove_folder(self._newest(number))

    def _newest(self, number=None):
        return durable.join(self.path, str(number or self._model_number))
