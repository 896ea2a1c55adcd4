"""Damaged dumps: each is refused with an error that names a file, or read as what was written.

    python -m tests.saving.fuzz --mutations 50000       (`make fuzz`)

Each mutation changes bytes of one file or the structure of the dump (members of a shard, headers,
the manifest's fields, files exchanged), or writes what no table can have, with right checksums. It
is undone before the next. Never may a row differ, nor reading take more than twice the memory of
the files. Then bytes of files of Keras and TensorFlow that hold tables inside are damaged.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import pathlib
import random
import tempfile
import tracemalloc
import warnings
import zipfile

import numpy as np
import tensorflow as tf

import sok_like as sok
from sok_like.table.content import TableShard
from tests.checks import files as models
from tests.saving import in_memory, wrong_content
from tests.saving.in_memory import whole

DIM, SIZE = 4, 600
TABLE = "items/of one"
_SPARE_BYTES = 2**15  # beside the arrays; less than half of the smallest dump
_KEYS_BYTES = 2**14  # of a dump with deltas, whose files are merged: the keys of all of them


def make_shard(rank, world_size, with_policy):
    """Contents that depend on the rank alone."""
    random_state = np.random.default_rng(rank)
    keys = np.arange(SIZE, dtype=np.int64) * world_size + rank
    floats = random_state.standard_normal((SIZE, 3 * DIM)).astype(np.float32)
    shard = TableShard(
        *(keys, floats[:, :DIM], floats[:, DIM:], ["momentum", "velocity"], [DIM, DIM]),
        optimizer_step=7,
    )
    if with_policy:
        shard.records = random_state.integers(0, 9, (SIZE, 3))
        shard.waiting = np.stack([keys + 2000, keys % 5, keys % 3], axis=1)
        shard.counters, shard.step = np.arange(64, dtype=np.int64), 11
    return shard


def deltas_of(folder, with_policy):
    """Deltas, one of one rank and one of two, as a manifest lists them."""
    random_state, chain = np.random.default_rng(7), []
    for number, world_size in ((1, 1), (2, 2)):
        shards = []
        for rank in range(world_size):
            delta = make_shard(rank, world_size, with_policy)
            chosen = random_state.permutation(SIZE)[:40]
            for field in ("keys", "rows", "slot_rows", "records"):
                if getattr(delta, field) is not None:
                    setattr(delta, field, getattr(delta, field)[np.sort(chosen)])
            delta.erased = np.setdiff1d(np.arange(7, 60, 9) * world_size + rank, delta.keys)
            delta.steps = np.array([[3, 0.1, 8.0], [0, 0, 0], [2, 0.05, 11]])
            delta.optimizer = "adam(beta_1=0.9, beta_2=0.999, epsilon=1e-07, amsgrad=false)"
            shards.append(delta)
        entries = in_memory.write_shards(folder, shards, TABLE, f"de{number}")
        since = chain[-1]["dump"] if chain else "5eed"
        chain.append({"dump": f"de{number}", "since": since, "step": 9, "shards": entries})
    return chain


def write_dump(folder, shards, with_deltas=False):
    chain = deltas_of(folder, shards[0].step >= 0) if with_deltas else None
    in_memory.write_dump(folder, shards, TABLE, DIM, "5eed", 7, chain)


def read_dump(folder):
    """All keys with their rows and whatever else the dump holds of them."""
    return whole(in_memory.read_dump(folder, TABLE, DIM))


def together(shards):
    """Shards of one dump as one, the keys of one behind those of the other."""
    names = *shards[0].by_key(), "waiting"
    arrays = {name: np.concatenate([getattr(shard, name) for shard in shards]) for name in names}
    return dataclasses.replace(shards[0], **arrays)


def contents(shard):
    """What must not differ, as bytes."""
    fields = (shard.keys, shard.rows, shard.slot_rows, shard.waiting, shard.counters, shard.records)
    arrays = tuple(b"" if a is None else np.ascontiguousarray(a).tobytes() for a in fields)
    return (*arrays, shard.slot_names, shard.slot_widths, shard.step)


# ---- mutations of bytes: of the file, given another file's bytes to take from ----


def mutate_bytes(files, draw):
    path, other = draw.choice(files), draw.choice(files).read_bytes()
    data = path.read_bytes()
    at, size = draw.randrange(len(data)), draw.randrange(1, draw.choice([2, 9, 200]))
    filler = draw.choice([draw.randbytes(size), bytes(size), b"\xff" * size, other[at : at + size]])
    changes = {
        "flip": data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
        "set": data[:at] + filler[: len(data) - at] + data[at + size :],
        "insert": data[:at] + filler + data[at:],
        "repeat": data[: at + size] + data[at:],
        "remove": data[:at] + data[at + size :],
        "cut": data[:at],
    }
    kind = draw.choice(list(changes))
    return {path: changes[kind]}, kind


# ---- mutations of the structure ----


def _repacked(members, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    warnings.simplefilter("ignore", UserWarning)  # of a name that comes twice
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


def _mutate_members(files, draw):
    path = draw.choice([file for file in files if file.suffix == ".npz"])
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at = draw.randrange(len(members))
    name, data = members[at]
    kind = draw.choice(["rename", "drop", "double", "header", "compress", "cut", "bomb"])
    if kind == "rename":
        members[at] = (draw.choice(["keys.npy", "x.npy", name[:-1], "../" + name]), data)
    elif kind == "drop":
        members.pop(at)
    elif kind == "double":
        members.append((name, data))
    elif kind == "header":
        old = f"{draw.choice([SIZE, DIM, 2 * DIM, 2])}".encode()
        new = draw.choice([b"0", b"1", b"-1", b"9" * 18, b"9" * 40, b"1,1", b"(2**40"])
        members[at] = (name, data[:10] + data[10:128].replace(old, new, 1) + data[128:])
    elif kind == "cut":
        members[at] = (name, data[: draw.randrange(len(data))])
    elif kind == "bomb":
        members[at] = (name, data + bytes(2**22))
    packed = zipfile.ZIP_DEFLATED if kind in ("compress", "bomb") else zipfile.ZIP_STORED
    return {path: _repacked(members, packed)}, f"member {kind}"


def _mutate_manifest(files, draw):
    (path,) = (file for file in files if file.suffix == ".json")
    manifest = json.loads(path.read_text())
    kind = draw.choice(["drop", "value", "shards", "deep"])
    field = draw.choice(sorted(manifest))
    if kind == "drop":
        del manifest[field]
    elif kind == "value":
        manifest[field] = draw.choice([None, 0, -1, 1, 2, 3, 4, "", "x", [], {}, True, 1e9, [[1]]])
    elif kind == "shards":
        shards = manifest["shards"]
        edits = [[], shards[:1], shards[1:], shards[::-1], shards * 2, [shards[0]] * 2]
        edits += [["../x.npz", "/etc/passwd"], [path.name, path.name]]
        manifest["shards"] = draw.choice(edits)
    text = json.dumps(manifest)
    if kind == "deep":
        text = "[" * 100_000
    return {path: text.encode()}, f"manifest {kind}"


def _mutate_files(files, draw):
    a, b = draw.sample(files, 2)
    if draw.random() < 0.5:
        return {a: b.read_bytes(), b: a.read_bytes()}, "files exchanged"
    return {a: b.read_bytes()}, "file copied"


_KINDS = [mutate_bytes] * 6 + [_mutate_members] * 2 + [_mutate_manifest] * 2 + [_mutate_files]
_KINDS += [wrong_content.in_shard] * 2 + [wrong_content.in_manifest]


# ---- the run ----


def read_measured(folder):
    """What a dump holds, None where it is refused, or what is wrong; and the bytes it took."""
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    try:
        result = read_dump(folder)
    except (ValueError, OSError) as error:
        result = None if str(folder) in str(error) else f"names no file: {error!r}"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return result, tracemalloc.get_traced_memory()[1] - before


def outcome(folder, expected, limit):
    """'refused', 'right', or what is wrong."""
    result, taken = read_measured(folder)
    if taken > limit:  # perhaps a table of Python's own has grown, which it does once
        result, again = read_measured(folder)
        taken = min(taken, again)
    if isinstance(result, str):
        return result
    if taken > limit:
        return f"took {taken} bytes where {limit} are allowed"
    if result is None:
        return "refused"
    return "right" if contents(result) == expected else "another content"


def damaged(files, kinds, num_mutations, seed, outcome):
    """Counts of outcomes, and descriptions of those that must not be."""
    draw, counts, wrong = random.Random(seed), collections.Counter(), []
    originals = {file: file.read_bytes() for file in files}
    for number in range(num_mutations):
        changed, kind = draw.choice(kinds)(files, draw)
        for file, data in changed.items():
            file.write_bytes(data)
        found = outcome()
        allowed = ("refused",) if kind.startswith("content") else ("refused", "right")
        counts[kind.split()[0], found if found in allowed else "wrong"] += 1
        if found not in allowed:
            wrong.append(f"{kind} (mutation {number} of seed {seed}): {found}")
        for file in changed:
            file.write_bytes(originals[file])
    return counts, wrong


def run(num_mutations, seed, with_deltas, with_policy):
    """Damages a dump."""
    with tempfile.TemporaryDirectory() as folder:
        shards = [make_shard(rank, 2, with_policy) for rank in range(2)]
        write_dump(folder, shards, with_deltas)
        files, written = sorted(pathlib.Path(folder).iterdir()), read_dump(folder)
        expected, total = contents(written), sum(file.stat().st_size for file in files)
        assert with_deltas or expected == contents(together(shards))
        assert with_deltas or written.optimizer_step == 7

        def outcome_now():
            largest = max(total, sum(file.stat().st_size for file in files))
            return outcome(folder, expected, 2 * largest + _SPARE_BYTES + with_deltas * _KEYS_BYTES)

        tracemalloc.start()
        try:
            return damaged(files, _KINDS, num_mutations, seed, outcome_now)
        finally:
            tracemalloc.stop()


class Files:
    """A model with two tables in a layer, its files on one rank, and the content that they hold."""

    # Ordinary variables are Keras' own: HDF5 does not check their bytes.

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        self._model = self._made()
        models.fit(self._model, 2)
        models.write(self._model, self._folder)
        self.expected = models.state(self._model)

    def of(self, kind):
        """The files of a kind."""
        pattern = {"weights": "w.weights.h5", "model": "m.keras", "checkpoint": "c.*"}[kind]
        return sorted(self._folder.glob(pattern))

    def outcome(self, kind):
        """'refused', 'right', or what is wrong."""
        tables = models.tables_of(self._model)
        for table in tables:
            table.clear()
            sok.assign(table, [5], np.full([1, table.dim], 7.0))
        before, model = models.state(self._model), self._model
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = self._read(kind)
        except Exception:
            same = models.is_same(models.state(self._model), before)
            return "refused" if same else "refused, but a table has changed"
        return "right" if models.is_same(models.state(model), self.expected) else "another content"

    def _made(self):
        tf.keras.utils.set_random_seed(3)
        keys = tf.keras.Input([2], dtype="int64")
        outputs = models.Pair(name="fuzzed")(keys)
        model = tf.keras.Model(keys, outputs)
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    def _read(self, kind):
        if kind == "model":
            return tf.keras.models.load_model(str(self._folder / "m.keras"))
        models.load(kind, self._model, self._folder)
        return self._model

    def run(self, kind, num_mutations, seed):
        """Damages the files of a kind."""
        assert self.outcome(kind) == "right"
        outcome = functools.partial(self.outcome, kind)
        return damaged(self.of(kind), [mutate_bytes], num_mutations, seed, outcome)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    each, failed = options.mutations // 4, 0
    for with_deltas, with_policy in itertools.product((False, True), repeat=2):
        found = run(each, options.seed, with_deltas, with_policy)
        what = f"dumps{' with deltas' * with_deltas}{', with policies' * with_policy}"
        failed += told(what, *found)
    sok.Init(global_batch_size=12, seed=7)
    with tempfile.TemporaryDirectory() as folder:
        of_model = Files(folder)
        for kind in models.KINDS:  # whose files take longer
            failed += told(kind, *of_model.run(kind, each // 5, options.seed))
    raise SystemExit(failed > 0)


def told(what, counts, wrong):
    """Prints outcomes; returns how many are wrong."""
    print(what, dict(counts), *(f"\n  WRONG {text}" for text in wrong[:20]), flush=True)
    return len(wrong)


if __name__ == "__main__":
    main()
