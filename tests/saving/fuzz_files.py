"""Damages files of one rank that hold tables inside; each is refused, or its tables are right.

Keras' files and tf.train.Checkpoint, with the mutations of bytes of `fuzz.py`. Ordinary variables
are Keras' own: HDF5 does not check their bytes.
"""

import contextlib
import functools
import io
import pathlib
import warnings

import numpy as np
import tensorflow as tf

import sok_like as sok
from tests.checks import files
from tests.checks.files import is_same
from tests.saving import fuzz


class Files:
    """A model with two tables in a layer, its files, and the content that they hold."""

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        self._model = self._made()
        files.fit(self._model, 2)
        files.write(self._model, self._folder)
        self.expected = files.state(self._model)

    def of(self, kind):
        """The files of a kind."""
        pattern = {"weights": "w.weights.h5", "model": "m.keras", "checkpoint": "c.*"}[kind]
        return sorted(self._folder.glob(pattern))

    def outcome(self, kind):
        """'refused', 'right', or what is wrong."""
        tables = files.tables_of(self._model)
        for table in tables:
            table.clear()
            sok.assign(table, [5], np.full([1, table.dim], 7.0))
        before, model = files.state(self._model), self._model
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = self._read(kind)
        except Exception:
            same = is_same(files.state(self._model), before)
            return "refused" if same else "refused, but a table has changed"
        return "right" if is_same(files.state(model), self.expected) else "another content"

    def _made(self):
        tf.keras.utils.set_random_seed(3)
        keys = tf.keras.Input([2], dtype="int64")
        outputs = files.Pair(name="fuzzed")(keys)
        model = tf.keras.Model(keys, outputs)
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    def _read(self, kind):
        if kind == "model":
            return tf.keras.models.load_model(str(self._folder / "m.keras"))
        files.load(kind, self._model, self._folder)
        return self._model

    def run(self, kind, num_mutations, seed):
        """Damages the files of a kind."""
        assert self.outcome(kind) == "right"
        outcome = functools.partial(self.outcome, kind)
        return fuzz.damaged(self.of(kind), [fuzz.mutate_bytes], num_mutations, seed, outcome)
