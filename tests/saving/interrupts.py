"""Exceptions and kills at any moment of a call that writes or removes files: what was published
stays whole.

    python -m tests.saving.interrupts --moments 200       (`make crash`)

Each case of `CASES` makes the same call again and again, each time with other content, and each
time something interrupts it: an error or Ctrl-C at its n-th operation on files, before it or after
it. Then the content is read: for each table it is whole, that of before or the new one. If the call
returned, it is the new one. The same holds for copies of the folder before and after each
operation: what `kill -9` leaves there.
"""

import argparse
import builtins
import collections
import contextlib
import functools
import os
import pathlib
import random
import shutil
import tempfile
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import file_io

import sok_like
from sok_like import sok2
from sok_like.saving.format import deltas, manifest
from sok_like.sok2 import dump_files
from tests.saving.in_memory import whole

_OPERATIONS = [(builtins, "open")]
_OPERATIONS += [(os, name) for name in ("replace", "unlink", "rmdir", "fsync", "open", "mkdir")]
_OPERATIONS += [(tf.io.gfile, name) for name in ("rename", "remove", "rmtree", "makedirs", "copy")]
_OPERATIONS += [(file_io, name) for name in ("delete_file", "atomic_write_string_to_file")]


class Operation:
    """The n-th operation on files: it fails, or is interrupted before or after it.

    Of this thread, as the order of others varies; or, in a graph, of those that run it in turn.
    """

    def __init__(self, number=None, kind="fails", in_graph=False):
        self.number, self.count = number, 0
        self._kind, self._thread = kind, None if in_graph else threading.get_ident()

    def __enter__(self):
        self._own = [(owner, name, getattr(owner, name)) for owner, name in _OPERATIONS]
        for owner, name, own in self._own:
            setattr(owner, name, self._counted(own))
        return self

    def __exit__(self, *_):
        for owner, name, own in self._own:
            setattr(owner, name, own)

    def _counted(self, own):
        def counted(*args, **kwargs):
            if self._thread not in (None, threading.get_ident()):
                return own(*args, **kwargs)
            return self._done(functools.partial(own, *args, **kwargs))

        return counted

    def _done(self, operation):
        self.count += 1
        result = operation() if self._kind == "after" else None
        if self.count == self.number:
            is_error = self._kind == "fails"
            raise OSError(5, "Input/output error", "somewhere") if is_error else KeyboardInterrupt
        return result if self._kind == "after" else operation()


class Copies(Operation):
    """Copies a folder before and after each operation of any thread."""

    def __init__(self, folder, place):
        super().__init__(in_graph=True)
        self._folder, self._place = folder, place
        self._lock, self._is_copying, self.made = threading.RLock(), False, []

    def _done(self, operation):
        with self._lock:  # nothing else happens meanwhile
            if self._is_copying:
                return operation()
            self._copy()
            result = operation()
            self._copy()
        return result

    def _copy(self):
        self._is_copying = True
        self.made.append(self._place / str(len(self.made)))
        shutil.copytree(self._folder, self.made[-1])
        self._is_copying = False


# ---- cases: what is interrupted, and what is in the files afterwards ----

KEYS = tf.range(20, dtype=tf.int64)


class Tables:
    """Dumps of tables in one folder, `call`; keys and rows of each table are of one number."""

    removes = False  # what the call does

    def __init__(self, folder, call, **options):
        self.folder, self.saver, self.call = folder, sok_like.Saver(), lambda: call(self)
        nothing = lambda case: None  # noqa: E731
        self._before = options.get("before", nothing)
        self._after = options.get("after", nothing)  # the tables have their new number
        self._readers = options.get("readers", [number_of_dump])
        # Whether a kill leaves the old files of a table, the new ones, or not all of either.
        self.may_vanish = options.get("may_vanish", False)
        self.in_graph = options.get("in_graph", False)
        self.tables = [sok_like.EmbeddingVariable(2, name=f"table_{n}") for n in range(2)]

    def each(self, call, **options):
        for table in self.tables:
            call(table, self.folder, **options)

    def prepare(self, number):
        """Lets the next call write `number`."""
        self._before(self)
        for table in self.tables:
            table.erase(sok_like.export(table)[0])
            sok_like.assign(table, KEYS + number, tf.fill([len(KEYS), 2], float(number)))
        self._after(self)

    def read(self, folder):
        """The number of each table, by each reader; -1 if it is not there."""
        names = [table.table_name for table in self.tables]
        return [reader(folder, name) for name in names for reader in self._readers]


def number_of_dump(folder, name):
    if not (folder / f"{name}.json").exists():
        return -1
    dump = manifest.read_manifest(folder, name, 2)
    found = whole(deltas.content_of(dump, 0, 1, 2))
    return number_of(found.keys, found.rows)


def number_of(keys, rows):
    (number,) = np.unique(rows)
    assert sorted(keys) == (KEYS.numpy() + int(number)).tolist(), "keys of other rows"
    return int(number)


def number_of_sok1(folder, name):
    keys, rows = (folder / f"{name}_{kind}.file" for kind in ("keys", "values"))
    if not keys.exists() or not rows.exists():
        return -1
    return number_of(np.fromfile(keys, np.int64), np.fromfile(rows, np.float32))


def number_of_sok2(folder, name):
    keys, rows = (folder / f"{name}_0-{kind}" for kind in ("key", "weight"))  # of the variable
    if not keys.exists() or not rows.exists():
        return -1
    keys = dump_files.read_integers(keys, dump_files.KEY)
    shape, every = (len(keys), 2), np.arange(len(keys))
    return number_of(keys, dump_files.read_rows(rows, dump_files.WEIGHT, shape, every))


def dump(case, since=None):
    case.each(case.saver.dump, since=since)


def begin(case):
    case.running = case.saver.begin_dump(case.tables, case.folder)


def dump_in_graph(case):
    """One graph's dump, again and again."""
    if not hasattr(case, "function"):
        case.function = tf.function(lambda: case.each(case.saver.dump_to_file))
    case.function()


class _OfModel:
    """A model whose table and whose dense layer have one number."""

    removes = may_vanish = in_graph = False

    def __init__(self, folder):
        self.folder = folder
        self.model, self.other = self._made(), self._made()

    def _made(self):
        embedding = sok_like.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="e")
        ids = tf.keras.Input([], dtype="int64")
        model = tf.keras.Model(ids, tf.keras.layers.Dense(1, name="d")(embedding(ids)))
        model.compile(sok_like.tf.keras.optimizers.Adam())
        return model

    def prepare(self, number):
        rows = tf.fill([len(KEYS), 2], float(number))
        _, embedding, last = self.model.layers
        sok_like.assign(embedding.table, KEYS, rows)
        last.bias.assign([float(number)])

    def read(self, folder):
        if not self.load(folder):
            return [-1]
        _, embedding, last = self.other.layers
        rows = embedding.table.find(KEYS)[0].numpy()
        numbers = {*np.unique(rows).tolist(), *last.bias.numpy().tolist()}
        assert len(numbers) == 1, f"of several saves: {numbers}"
        return [int(numbers.pop())]


class Weights(_OfModel):
    def call(self):
        self.model.save_weights(self.folder / "model.weights.h5")

    def load(self, folder):
        path = folder / "model.weights.h5"
        if path.exists():
            self.other.load_weights(path)
        return path.exists()


class Manager(_OfModel):
    def __init__(self, folder):
        super().__init__(folder)
        checkpoint = tf.train.Checkpoint(model=self.model)
        self.manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=1)

    def call(self):
        self.manager.save()

    def load(self, folder):
        path = tf.train.latest_checkpoint(str(folder))
        if path is not None:
            tf.train.Checkpoint(model=self.other).restore(path).assert_existing_objects_matched()
        return path is not None


class Backup(Manager):
    """`BackupAndRestore(background=True)`."""

    def __init__(self, folder):
        super().__init__(folder)
        self.callback = sok_like.callbacks.BackupAndRestore(folder, background=True)
        self.callback.set_model(self.model)

    def prepare(self, number):
        self.callback.on_train_begin()  # as the next `fit` after the exception
        self.callback._stop_listening()
        super().prepare(number)
        self.callback._back_up(self.callback._background)

    def call(self):
        self.callback._finish()


class BackupEnds(Backup):
    """The removal of a backup at the end of a `fit`."""

    removes = True

    def prepare(self, number):
        super().prepare(number)
        self.callback._finish()

    def call(self):
        self.callback.on_train_end()


delta = functools.partial(dump, since="last")
OF_SOK1 = {"readers": [number_of_dump, number_of_sok1], "may_vanish": True}
OF_SOK2 = {"readers": [number_of_sok2], "may_vanish": True}
OF_TABLES = {
    "finish": {"call": lambda case: case.running.finish(), "after": begin},
    "begin": {"call": lambda case: (begin(case), case.running.finish())},
    "dump": {"call": dump},
    "delta": {"call": delta, "before": dump},
    "compact": {"call": lambda c: c.each(c.saver.compact), "before": dump, "after": delta},
    "graph": {"call": dump_in_graph, "in_graph": True},
    "sok1": {"call": lambda c: c.each(c.saver.dump_to_file, sok1_files=True), **OF_SOK1},
    "sok2": {"call": lambda case: sok2.dump(case.folder, case.tables), **OF_SOK2},
}
CASES = {
    **{name: functools.partial(Tables, **options) for name, options in OF_TABLES.items()},
    **{"weights": Weights, "manager": Manager, "backup": Backup, "backup ends": BackupEnds},
}


# ---- the run ----


def moments(case, limit, draw):
    """At most so many moments of each kind, out of all that a call has."""
    case.prepare(0)
    case.call()  # what the first one does once
    for kind in ("fails", "before", "after"):
        made = functools.partial(Operation, kind=kind, in_graph=case.in_graph)
        case.prepare(0)
        with made() as all_of_them:
            case.call()
        numbers = range(1, all_of_them.count + 1)
        chosen = numbers if len(numbers) <= limit else sorted(draw.sample(numbers, limit))
        for at, number in enumerate(chosen):
            if at % 10 == 0:
                yield "none", made()  # what was interrupted before hinders nobody
            yield kind, made(number)
    yield "none", made()


def run(name, folder, limit, seed=0):
    """Counts of what was left, for at most `limit` moments of each kind; raises if any is wrong."""
    counts, number = collections.Counter(), 0
    (folder / "files").mkdir(parents=True)
    case = CASES[name](folder / "files")
    for kind, moment in list(moments(case, limit, random.Random(seed))):
        number += 2
        before, error = prepared(case, number), None
        with contextlib.suppress(Exception), moment:
            try:
                case.call()
            except BaseException as raised:
                error = raised
        what = f"{name}: {kind} {moment.number}, after {error!r}"
        is_new = check(case, case.folder, before, number, counts, what)
        assert is_new or error or case.removes, f"{what}: old, though it returned"
        assert is_new or kind != "none", f"{what}: nothing interrupted it"
    before = prepared(case, number := number + 2)
    with Copies(case.folder, folder / "copies") as copies:
        case.call()
    for place in copies.made:
        check(case, place, before, number, counts, f"{name}: killed, {place}", case.may_vanish)
    assert check(case, case.folder, before, number, counts, name)
    return counts


def prepared(case, number):
    """What is there before a call that writes `number`."""
    try:
        case.prepare(number)
    except RuntimeError:  # of a dump whose end was interrupted
        case.prepare(number)
    return case.read(case.folder)


def check(case, folder, before, number, counts, what, may_vanish=False):
    """Whether all of a folder is new; raises unless each table is old or new."""
    try:
        found = case.read(folder)
    except Exception as lost:
        raise AssertionError(f"{what}: lost") from lost
    allowed = {"old": before, "new": [-1 if case.removes else number] * len(found)}
    if may_vanish:
        allowed["gone"] = [-1] * len(found)
    left = [
        [kind for kind, each in allowed.items() if each[at : at + 1] == found[at : at + 1]]
        for at in range(len(found))
    ]
    assert all(left), f"{what}: {found}, where {allowed} must be"
    counts[left[0][-1] if len(set(map(tuple, left))) == 1 else "some old, some new"] += 1
    return all("new" in each for each in left)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sok_like.Init(global_batch_size=1)
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            counts = run(name, pathlib.Path(folder), options.moments, options.seed)
        print(f"{sum(counts.values())} moments of {name}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
