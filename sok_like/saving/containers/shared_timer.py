"""Saving by time on several ranks. All must save at the same step, so rank 0's clock decides.

Asking rank 0 at each step would cost an exchange each. So its answer says at which step to ask
next: after about a hundredth of the interval.
"""

from __future__ import annotations

import time
from typing import Any

from sok_like.runtime.ranks.agreement import agreed
from sok_like.runtime.ranks.comm import Communicator

_LOOKS = 100  # exchanges per interval


class SharedTimer:
    """Decides at which steps all ranks save, as a `CheckpointSaverHook` or another caller."""

    def __init__(
        self, every_secs: float, communicator: Communicator, call: str = "CheckpointSaverHook"
    ):
        self._every_secs, self._communicator, self._call = every_secs, communicator, call
        self._saved = self._looked = time.monotonic()
        self._looked_at: int | None = None
        self._next = 0

    def after_run(self, hook: Any, run_context: Any, run_values: Any) -> None:
        """Replaces the hook's `after_run`: all ranks save if it is time, or none does."""
        # The step was read while the training op ran: it may be the one before that op or after it.
        if run_values.results + hook._steps_per_run < self._next:
            return
        step = int(run_context.session.run(hook._global_step_tensor))
        if step >= self._next and step != hook._timer.last_triggered_step() and self.is_due(step):
            hook._timer.update_last_triggered_step(step)
            if hook._save(run_context.session, step):
                run_context.request_stop()

    def is_due(self, step: int) -> bool:
        """Whether the interval is over, by the clock of rank 0; all ranks ask at the same steps."""
        if step < self._next:
            return False
        answers = agreed(lambda: self._answer(step), self._communicator, self._call)
        due, self._next = answers[0]
        return due

    def _answer(self, step):
        now = time.monotonic()
        steps = 1 if self._looked_at is None else max(1, step - self._looked_at)
        pace = max(1e-9, (now - self._looked) / steps)
        self._looked, self._looked_at = now, step
        due = now >= self._saved + self._every_secs
        if due:
            self._saved = now
        return [due, step + max(1, round(self._every_secs / _LOOKS / pace))]
