"""Random programs of steps, dumps, deltas and restores, against dictionaries of NumPy rows.

Whatever comes between two dumps (another optimizer, a rollback, content from a checkpoint), a
restore must give the table as it was at the last dump, or that dump must raise.
"""

import copy
import random

import numpy as np
import pytest
import tensorflow as tf

from tests.emulated import on_host
from tests.training import apply_gradient

pytestmark = on_host
DIM, KEYS, RATE = 3, 12, 0.25
RULES = {
    "sgd": lambda: tf.keras.optimizers.SGD(RATE),
    "momentum": lambda: tf.keras.optimizers.SGD(RATE, momentum=0.5),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(RATE, initial_accumulator_value=0.5),
}


class Oracle:
    """Rows and slot rows by key, as the stock optimizers compute them; a new row holds ones."""

    def __init__(self, rows=(), slots=()):
        self.rows, self.slots, self.trained_by = dict(rows), copy.deepcopy(dict(slots)), None

    def assign(self, keys, value):
        for key in keys:
            self.rows[key] = np.full(DIM, value)

    def erase(self, keys):
        for key in keys:
            self.rows.pop(key, None)
            self.slots.pop(key, None)

    def step(self, optimizer, rule, gradients, is_first):
        if is_first:  # slot variables of other rules go once the table has a rule
            for slots in self.slots.values():
                for name in set(slots) - {{"adagrad": "accumulator"}.get(rule, rule)}:
                    del slots[name]
        if self.trained_by not in (None, optimizer):
            self.slots = {}  # another optimizer takes the table over
        self.trained_by = optimizer
        for key in gradients:
            self.rows.setdefault(key, np.ones(DIM))
        for key in self.rows if rule == "momentum" else gradients:
            gradient, slots = gradients.get(key, 0.0), self.slots.setdefault(key, {})
            if rule == "adagrad":
                slots["accumulator"] = slots.get("accumulator", 0.5) + gradient**2
                self.rows[key] = self.rows[key] - RATE * gradient / np.sqrt(slots["accumulator"])
            elif rule == "momentum":
                slots["momentum"] = 0.5 * slots.get("momentum", 0.0) - RATE * gradient
                self.rows[key] = self.rows[key] + slots["momentum"]
            else:
                self.rows[key] = self.rows[key] - RATE * gradient

    def restored(self):
        """A copy of what a restore of this content gives."""
        return Oracle(self.rows, self.slots)


class Program:
    """A table, its oracle, and the oracle at the last dump and at the last checkpoint."""

    def __init__(self, sok, folder, seed):
        self.sok, self.folder, self.draw, self.done = sok, folder, random.Random(seed), []
        self.saver, self.oracle = sok.Saver(), Oracle()
        self.dumped = self.checkpoint = None
        self.make()

    def make(self):
        """A table with its rule, which it keeps."""
        self.table = self.sok.EmbeddingVariable(DIM, name="programmed", initializer="ones")
        self.rule, self.is_untrained = self.draw.choice(list(RULES)), True
        self.new_optimizer()

    def run(self, length):
        for _ in range(length):
            weights = {"assign": 2, "step": 6, "erase": 1, "clear": 0.3, "new_optimizer": 1}
            weights |= {"dump": 1, "delta": 4, "restore": 2, "restore_anew": 1}
            weights |= {"save": 0.7, "load": 0.7, "compact": 0.5}
            (call,) = self.draw.choices(list(weights), weights.values())
            self.do(call)
        self.do("restore_anew")

    def do(self, call):
        """A call, unless it needs a dump or a checkpoint that is not there."""
        needed = {"load": self.checkpoint}.get(call, self.dumped)
        if needed is None and call in ("delta", "compact", "restore", "restore_anew", "load"):
            return
        self.done.append(call)
        getattr(self, call)()
        self.check()

    def check(self):
        keys, rows = (np.asarray(tensor) for tensor in self.sok.export(self.table))
        assert sorted(keys) == sorted(self.oracle.rows), self.done
        for key, row in zip(keys, rows, strict=True):
            np.testing.assert_allclose(row, self.oracle.rows[key], 1e-5, 1e-5, err_msg=self.done)

    def some_keys(self):
        return self.draw.sample(range(KEYS), self.draw.randrange(1, 5))

    def assign(self):
        keys, value = self.some_keys(), self.draw.randrange(9)
        self.oracle.assign(keys, value)
        self.sok.assign(self.table, keys, tf.fill([len(keys), DIM], float(value)))

    def step(self):
        gradients = {key: float(self.draw.randrange(-2, 3)) for key in self.some_keys()}
        self.oracle.step(self.optimizer, self.rule, gradients, self.is_untrained)
        self.is_untrained = False
        values = [[gradient] for gradient in gradients.values()]
        apply_gradient(self.optimizer, self.table, list(gradients), values)

    def erase(self):
        keys = self.some_keys()
        self.oracle.erase(keys)
        self.table.erase(keys)

    def clear(self):
        self.oracle.erase(range(KEYS))
        self.table.clear()

    def new_optimizer(self):
        self.optimizer = self.sok.OptimizerWrapper(RULES[self.rule]())

    def dump(self):
        self.saver.dump(self.table, self.folder / "chain")
        self.dumped = self.oracle.restored()

    def dump_elsewhere(self):
        self.saver.dump(self.table, self.folder / "other")

    def delta(self):
        self.saver.dump(self.table, self.folder / "chain", since="last")
        self.dumped = self.oracle.restored()

    def compact(self):
        self.saver.compact(self.table, self.folder / "chain")

    def restore(self):
        self.saver.restore(self.table, self.folder / "chain")
        self.oracle = self.dumped.restored()

    def restore_anew(self):
        self.make()
        self.restore()

    def save(self):
        path = str(self.folder / "checkpoint")
        tf.train.Checkpoint(table=self.table).write(path)
        self.checkpoint = path, self.oracle.restored()

    def load(self):
        path, oracle = self.checkpoint
        tf.train.Checkpoint(table=self.table).read(path)
        self.oracle = oracle.restored()


@pytest.mark.parametrize("seed", [0, 1, 2, 6, 9, 43, 50, 119])
def test_a_restore_gives_the_table_of_the_last_dump(sok, tmp_path, seed):
    Program(sok, tmp_path, seed).run(40)


@pytest.mark.parametrize(
    "calls",
    [
        # Rows of the delta have slot variables, all others do not.
        "assign dump step restore step delta step restore",
        "assign dump step delta restore clear step delta step delta",
        # Each dump begins an interval of changes, also one into another folder.
        "step dump clear step dump_elsewhere step dump_elsewhere delta",
        "step dump step dump_elsewhere clear step dump_elsewhere delta",
    ],
)
def test_a_delta_of_more_than_keys_is_whole(sok, tmp_path, calls):
    program = Program(sok, tmp_path, 0)
    program.rule, program.optimizer = "adagrad", sok.OptimizerWrapper(RULES["adagrad"]())
    for call in [*calls.split(), "restore", "step", "step", "restore_anew"]:
        program.do(call)
