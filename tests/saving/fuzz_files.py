"""Damages files of one rank that hold tables inside; each is refused, or its tables are right.

    python -m tests.saving.fuzz_files --mutations 3000

Keras' files and tf.train.Checkpoint, with the mutations of bytes of `fuzz.py`. Ordinary variables
are Keras' own: HDF5 does not check their bytes.
"""

import argparse
import collections
import contextlib
import io
import pathlib
import random
import tempfile
import warnings

import numpy as np

from tests.saving import fuzz

KINDS = ("weights", "model", "checkpoint")


class Files:
    """A model with two tables in a layer, its files, and the content that they hold."""

    def __init__(self, folder):
        import tensorflow as tf

        from tests.checks import own_layers

        self._own, self._folder = own_layers, pathlib.Path(folder)
        self._model = self._made()
        own_layers.files.fit(self._model, 2)
        own_layers.write(self._model, self._folder)
        self.expected = self._tables(self._model)
        self._checkpoint = tf.train.Checkpoint(model=self._model)

    def of(self, kind):
        """The files of a kind."""
        pattern = {"weights": "w.weights.h5", "model": "m.keras", "checkpoint": "c.*"}[kind]
        return sorted(self._folder.glob(pattern))

    def outcome(self, kind):
        """'refused', 'right', or what is wrong."""
        import sok_like as sok

        tables = self._own.tables_of(self._model)
        for table in tables:
            table.clear()
            sok.assign(table, [5], np.full([1, table.dim], 7.0))
        before, model = self._tables(self._model), self._model
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = self._read(kind)
        except Exception:
            same = _same(self._tables(self._model), before)
            return "refused" if same else "refused, but a table has changed"
        return "right" if _same(self._tables(model), self.expected) else "another content"

    def _made(self):
        import tensorflow as tf

        import sok_like as sok

        tf.keras.utils.set_random_seed(3)
        keys = tf.keras.Input([2], dtype="int64")
        outputs = self._own.Pair(name="fuzzed")(keys)
        model = tf.keras.Model(keys, outputs)
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    def _read(self, kind):
        import tensorflow as tf

        if kind == "weights":
            self._model.load_weights(str(self._folder / "w.weights.h5"))
        elif kind == "checkpoint":
            self._checkpoint.read(str(self._folder / "c")).assert_existing_objects_matched()
        else:
            return tf.keras.models.load_model(str(self._folder / "m.keras"))
        return self._model

    def _tables(self, model):
        return list(self._own.state(model).values())


def _same(one, other):
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def run(files, kind, num_mutations, seed):
    """Counts of outcomes, and descriptions of those that must not be."""
    draw, counts, wrong = random.Random(seed), collections.Counter(), []
    originals = {file: file.read_bytes() for file in files.of(kind)}
    assert files.outcome(kind) == "right"
    for number in range(num_mutations):
        changed, what = fuzz.mutate_bytes(list(originals), draw)
        for file, data in changed.items():
            file.write_bytes(data)
        found = files.outcome(kind)
        counts[found if found in ("refused", "right") else "wrong"] += 1
        if found not in ("refused", "right"):
            wrong.append(f"{what} (mutation {number} of seed {seed}): {found}")
        for file in changed:
            file.write_bytes(originals[file])
    return counts, wrong


def main():
    import sok_like as sok

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sok.Init(global_batch_size=12, seed=7)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        for kind in KINDS:
            counts, wrong = run(files, kind, options.mutations // len(KINDS), options.seed)
            print(f"{kind:10} {dict(counts)}")
            for text in wrong[:20]:
                print(f"  WRONG {text}")
            failed += len(wrong)
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
