"""Exceptions at any moment of a call that writes or removes files: what was published stays whole.

    python -m tests.saving.crash --kills 0 --interrupts 200       (part of `make crash`)

Each case of `CASES` makes the same call again and again, each time with other content, and each
time something interrupts it: Ctrl-C before the n-th line of the package that the call runs, or an
error or Ctrl-C at its n-th operation on files, before it or after it. Then the content is read: for
each table it is whole, that of before or the new one. If the call returned, it is the new one.
"""

import builtins
import collections
import contextlib
import functools
import linecache
import os
import pathlib
import random
import sys
import threading

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management

import sok_like
from sok_like.saving import background
from sok_like.saving.format import deltas, manifest
from sok_like.table import table_reader
from tests.saving.in_memory import whole

# The package, and what deletes old checkpoints.
_TRACED = str(pathlib.Path(sok_like.__file__).parent), checkpoint_management.__file__
# What Ctrl-C cannot interrupt, as Python takes signals at calls only, or ignores there.
_NOT_TRACED = table_reader.TableReader.close.__code__, table_reader.TableReader.__del__.__code__
_OPERATIONS = [(builtins, "open")]
_OPERATIONS += [(os, name) for name in ("replace", "unlink", "rmdir", "fsync", "open", "mkdir")]
_OPERATIONS += [(tf.io.gfile, name) for name in ("rename", "remove", "rmtree", "makedirs", "copy")]


class Moment:
    """Counts what happens within its scope, and raises at a number of it; this one sees nothing."""

    def __init__(self, number=None):
        self.number, self.count = number, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def _happens(self, error=KeyboardInterrupt):
        self.count += 1
        if self.count == self.number:
            raise error


class Line(Moment):
    """The n-th line of the package that this thread runs."""

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _trace(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(_TRACED) or code in _NOT_TRACED:
            return None
        # A `with` is seen again before it calls `__exit__`, where Python takes no signal.
        line = linecache.getline(code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self._happens()
        return self._trace


class Operation(Moment):
    """The n-th operation on files: it fails, or is interrupted before or after it.

    Of this thread, as the order of others varies; or, in a graph, of those that run it in turn.
    """

    def __init__(self, number=None, kind="fails", in_graph=False):
        super().__init__(number)
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
            if self._kind != "after":
                error = OSError(5, "Input/output error", "somewhere")
                self._happens(error if self._kind == "fails" else KeyboardInterrupt)
                return own(*args, **kwargs)
            result = own(*args, **kwargs)
            self._happens()
            return result

        return counted


# ---- cases: what is interrupted, and what is in the files afterwards ----


class Dumps:
    """Dumps of some tables in one folder; the rows of each are all of one number."""

    num_tables, keys = 3, tf.range(20, dtype=tf.int64)

    def __init__(self, folder):
        self.folder, self.saver = folder, sok_like.Saver()
        names = [f"{type(self).__name__.lower()}_{n}" for n in range(self.num_tables)]
        self.tables = [sok_like.EmbeddingVariable(2, name=name) for name in names]

    def assign(self, number):
        for table in self.tables:
            sok_like.assign(table, self.keys, tf.fill([len(self.keys), 2], float(number)))

    def prepare(self, number):
        """Lets the next call write `number`."""
        self.assign(number)

    def call(self):
        for table in self.tables:
            self.saver.dump(table, self.folder)

    def read(self):
        """The number of each table; -1 if it has no dump."""
        return [self._number(table.table_name) for table in self.tables]

    def _number(self, name):
        if not (self.folder / f"{name}.json").exists():
            return -1
        dump = manifest.read_manifest(self.folder, name, 2)
        found = whole(deltas.content_of(dump, 0, 1, 2))
        assert sorted(found.keys) == self.keys.numpy().tolist(), "keys are missing"
        (number,) = np.unique(found.rows)
        return int(number)


class Finish(Dumps):
    def prepare(self, number):
        self.assign(number)
        self.dump = self.saver.begin_dump(self.tables, self.folder)

    def call(self):
        self.dump.finish()


class Begin(Finish):
    def prepare(self, number):
        self.assign(number)

    def call(self):
        self.dump = self.saver.begin_dump(self.tables, self.folder)
        self.dump.finish()


class Cancel(Finish):
    is_published = False

    def prepare(self, number):
        if hasattr(self, "dump"):
            self.dump._thread.join()  # interrupted before it waited for that
        super().prepare(number)

    def call(self):
        self.dump.cancel()


class AtExit(Cancel):
    def call(self):
        background.BackgroundDump._at_exit()


class Delta(Dumps):
    def prepare(self, number):
        for table in self.tables:
            self.saver.dump(table, self.folder)
        self.assign(number)

    def call(self):
        for table in self.tables:
            self.saver.dump(table, self.folder, since="last")


class Compact(Delta):
    def prepare(self, number):
        super().prepare(number)
        super().call()

    def call(self):
        for table in self.tables:
            self.saver.compact(table, self.folder)


class InGraph(Dumps):
    """One graph's dump, again and again."""

    in_graph = True

    def __init__(self, folder):
        super().__init__(folder)

        @tf.function
        def call():
            for table in self.tables:
                self.saver.dump_to_file(table, folder)

        self.call = call
        self.assign(0)
        call()


class Sok1(Dumps):
    """The files of SOK 1.x beside a dump."""

    num_tables = 1

    def call(self):
        self.saver.dump_to_file(self.tables[0], self.folder, sok1_files=True)

    def read(self):
        found = super().read()
        keys, rows = (self.folder / f"sok1_0_{kind}.file" for kind in ("keys", "values"))
        if found != [-1] and rows.exists():
            assert sorted(np.fromfile(keys, np.int64)) == self.keys.numpy().tolist()
            (number,) = np.unique(np.fromfile(rows, np.float32))
            found.append(int(number))
        return found


class Sok2(Dumps):
    """Files of `sok2.dump`, several for each table."""

    def call(self):
        from sok_like import sok2

        sok2.dump(self.folder, self.tables)

    def _number(self, name):
        from sok_like.sok2 import dump_files

        name = f"{name}_0"  # of the variable
        if not (self.folder / f"{name}-key").exists():
            assert not (self.folder / f"{name}-weight").exists()
            return -1
        keys = dump_files.read(self.folder / f"{name}-key", dump_files.KEY)
        assert sorted(keys) == self.keys.numpy().tolist()
        rows = dump_files.read(self.folder / f"{name}-weight", dump_files.WEIGHT, 2)
        (number,) = np.unique(rows[np.arange(len(keys))])
        return int(number)


class _Model(tf.keras.Model):
    def __init__(self, name):
        super().__init__(name=name)
        self.embedding = sok_like.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="e")
        self.last = tf.keras.layers.Dense(1, name="d")

    def call(self, ids):
        return self.last(self.embedding(ids))


class _OfModel:
    """A model whose table and whose dense layer have one number."""

    keys = tf.range(20, dtype=tf.int64)

    def __init__(self, folder):
        self.folder = folder
        self.model, self.other = self._made(), self._made()

    def _made(self):
        model = _Model("model")
        model(self.keys)
        model.compile(sok_like.tf.keras.optimizers.Adam())
        return model

    def prepare(self, number):
        rows = tf.fill([len(self.keys), 2], float(number))
        sok_like.assign(self.model.embedding.table, self.keys, rows)
        self.model.last.bias.assign([float(number)])

    def read(self):
        if not self.load():
            return [-1]
        rows = self.other.embedding.table.find(self.keys)[0].numpy()
        numbers = {*np.unique(rows).tolist(), *self.other.last.bias.numpy().tolist()}
        assert len(numbers) == 1, f"of several saves: {numbers}"
        return [int(numbers.pop())]


class Weights(_OfModel):
    def call(self):
        self.model.save_weights(self.folder / "model.weights.h5")

    def load(self):
        path = self.folder / "model.weights.h5"
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

    def load(self):
        path = tf.train.latest_checkpoint(str(self.folder))
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
        self.callback._back_up()

    def call(self):
        self.callback._finish()


class BackupEnds(Backup):
    """The removal of a backup at the end of a `fit`."""

    is_published = False
    removes = True

    def prepare(self, number):
        super().prepare(number)
        self.callback._finish()

    def call(self):
        self.callback.on_train_end()


class Export(_OfModel):
    """A SavedModel that is replaced."""

    def call(self):
        specs = tf.TensorSpec([None], tf.int64)
        path = self.folder / "served"
        sok_like.export_saved_model(self.model, path, signatures=specs)

    def read(self):
        path = str(self.folder / "served")
        if not os.path.exists(path):
            return [-1]
        served = tf.saved_model.load(path)
        found = served.signatures["serving_default"](self.keys)
        (answer,) = np.unique(next(iter(found.values())).numpy())
        number = float(answer) / (1 + float(self.model.last.kernel.numpy().sum()))
        assert abs(number - round(number)) < 1e-3, "of several exports"
        return [round(number)]


CASES = {
    "finish": Finish,
    "begin": Begin,
    "cancel": Cancel,
    "exit": AtExit,
    "dump": Dumps,
    "delta": Delta,
    "compact": Compact,
    "graph": InGraph,
    "sok1": Sok1,
    "sok2": Sok2,
    "weights": Weights,
    "manager": Manager,
    "backup": Backup,
    "backup ends": BackupEnds,
    "export": Export,
}


# ---- the run ----


def moments(case, limit, draw):
    """At most so many moments of each kind, out of all that a call has."""
    kinds, in_graph = {"line": Line}, getattr(case, "in_graph", False)
    for kind in ("fails", "before", "after"):
        kinds[kind] = functools.partial(Operation, kind=kind, in_graph=in_graph)
    for name, made in kinds.items():
        case.prepare(0)
        with made() as all_of_them:
            case.call()
        numbers = range(1, all_of_them.count + 1)
        chosen = numbers if len(numbers) <= limit else sorted(draw.sample(numbers, limit))
        for at, number in enumerate(chosen):
            if at % 10 == 0:
                yield "none", Moment()  # what was interrupted before hinders nobody
            yield name, made(number)
    yield "none", Moment()


def run(name, folder, limit, seed=0):
    """Counts of what was left, for at most `limit` moments of each kind; raises if any is wrong."""
    counts, number = collections.Counter(), 0
    folder.mkdir()
    case = CASES[name](folder)
    published = getattr(case, "is_published", True)
    for kind, moment in list(moments(case, limit, random.Random(seed))):
        number += 2
        try:
            case.prepare(number)
        except RuntimeError:  # of a dump whose end was interrupted
            case.prepare(number)
        before, error = case.read(), None
        where = f"{name}: {kind} {moment.number}"
        with contextlib.suppress(Exception), moment:
            try:
                case.call()
            except BaseException as raised:
                error = raised
        try:
            found = case.read()
        except Exception as lost:
            raise AssertionError(f"{where}: lost, after {error!r}") from lost
        allowed = {"old": before, "new": [number] * len(found)}
        if not published:
            allowed["new"] = [-1] if getattr(case, "removes", False) else before
        left = [
            [what for what, each in allowed.items() if each[at : at + 1] == found[at : at + 1]]
            for at in range(len(found))
        ]
        assert all(left), f"{where}: {found}, where {allowed} must be, after {error!r}"
        is_new = all("new" in each for each in left)
        assert is_new or error or not published, f"{where}: {found}, though it returned"
        assert is_new or kind != "none", f"{where}: {error!r}, though nothing interrupted it"
        counts[left[0][-1] if len(set(map(tuple, left))) == 1 else "some old, some new"] += 1
    return counts
