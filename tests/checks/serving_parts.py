"""Tables that the ranks export in parts: rows, memory, and what happens if a rank fails."""

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

from tests.checks.serving import message

CASES = ("shared", "narrow", "bytes", "follows", "sent_bytes", "sent_narrow", "one_key", "no_key")


def cases_on(world_size):
    """Those that so many ranks export: each on some number of ranks, SLOW=1 all on each."""
    few = {1: ("bytes", "no_key"), 2: ("shared", "follows", "sent_narrow", "one_key")}
    return CASES if os.environ.get("SLOW") else few.get(world_size, ("narrow", "sent_bytes"))


def checks(world_size):
    return {
        "in_parts": lambda: in_parts(world_size),
        "peak": lambda: peak(world_size),
        "cannot": lambda: cannot(world_size),
    }


class Rows(tf.Module):
    """Tables of several kinds, whose rows are returned beside each other."""

    def __init__(self, sok, number=2, dim=4):
        super().__init__()
        self.tables = [
            sok.EmbeddingVariable(dim, name="sharded_hash"),
            sok.EmbeddingVariable(dim, name="sharded_narrow", dtype="bfloat16"),
            sok.EmbeddingVariable(dim, name="sharded_plain", capacity=40, use_hashtable=False),
        ][:number]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "keys")])
    def __call__(self, keys):
        rows = [tf.nn.embedding_lookup(table, keys) for table in self.tables[:2]]
        rows += [tf.nn.embedding_lookup(table, keys % 40) for table in self.tables[2:]]
        return {"rows": tf.stack(rows)}


def _sharded_keys(number):
    """Keys of which 50,000 are more than one rank places, and 1 leaves other ranks without any."""
    return np.arange(number) * 12_345_678_901_234 - 2**58


def in_parts(world_size):
    """Rows that a SavedModel returns, and those of the tables, by case; of the rank that wrote it.

    `ram://` is another file system in each process. So ranks send their parts there.
    """
    import sok_like as sok
    from sok_like.runtime.ranks import comm
    from sok_like.serving import contents

    rank, found = comm.current().rank, {}
    base = pathlib.Path(tempfile.gettempdir()) / f"sok_parts_{os.getppid()}_{world_size}"
    chunk = contents.CHUNK_BYTES
    cases = {
        "shared": (base / "shared", 50_000, "float32", "initial", False),
        "narrow": (base / "narrow", 50_000, "bfloat16", "zeros", False),
        "bytes": (base / "bytes", 3_000, "int8", "initial", False),
        "follows": (base / "follows", 50_000, "int8", "zeros", True),
        "sent_bytes": (f"ram://sent_{world_size}/bytes", 20_000, "int8", "initial", True),
        "sent_narrow": (f"ram://sent_{world_size}/narrow", 3_000, "bfloat16", "initial", False),
        "one_key": (base / "one_key", 1, "float32", "zeros", False),
        "no_key": (base / "no_key", 0, "float32", "initial", True),
    }
    for case in cases_on(world_size):
        place, count, row_dtype, missing, follows = cases[case]
        model, keys = Rows(sok, 3), _sharded_keys(count)
        for table, ids in zip(model.tables, (keys, keys, np.arange(40)[:count]), strict=True):
            rows = np.random.default_rng(len(ids)).normal(size=[len(ids), 4]).astype(np.float32)
            sok.assign(table, ids, rows)
        contents.CHUNK_BYTES = 100_000  # so that there are several parts
        try:
            sok.export_saved_model(model, place, missing, row_dtype, refreshable=follows)
        finally:
            contents.CHUNK_BYTES = chunk
        asked = np.r_[keys, 5, -7]
        # What the rows are, by key: float32 of all ranks, by the model's own lookups.
        expected = model(asked)["rows"].numpy()
        absent = np.zeros(expected.shape[:2], bool)
        absent[:2, count:] = True
        if missing == "zeros":
            expected[absent] = 0
        if rank == 0:
            serve = tf.saved_model.load(str(place)).signatures["serving_default"]
            files = tf.io.gfile.listdir(f"{place}/variables")
            left = [n for n in tf.io.gfile.listdir(os.path.dirname(f"{place}")) if "." in n]
            computed = serve(keys=tf.constant(asked))["rows"].numpy()
            found[case] = {
                "rows": computed,
                "expected": expected,
                "row_dtype": row_dtype,
                "files": len(files),
                "missing": absent,
                "left": [name for name in left if ".deltas" not in name],
            }
    return found


def peak(world_size):
    """Bytes of a table, those that this rank writes, and by how much an export raises its peak."""
    import sok_like as sok

    base = pathlib.Path(tempfile.gettempdir()) / f"sok_peak_{os.getppid()}_{world_size}"
    model, dim, count = Rows(sok, 1, 128), 128, 300_000
    sok.export_saved_model(model, base, missing="zeros")  # what TensorFlow needs once
    for at in range(0, count, 20_000):
        keys = np.arange(at, at + 20_000)
        sok.assign(model.tables[0], keys, np.full([len(keys), dim], 0.5, np.float32))
    found = peak_of(lambda: sok.export_saved_model(model, base, missing="zeros"))
    return {"table": 4 * dim * count, **found}


def peak_of(call):
    """Bytes of rows that this rank writes in parts, and by how much the call raises its peak."""
    from sok_like.serving import contents, parts

    contents.CHUNK_BYTES //= 32
    save, written = parts._save, []

    def counted(prefix, slices):
        rows = [each.value for each in slices if list(each.shape[1:]) == [128]]
        written.extend(4 * np.prod(v.shape) for v in rows if v.dtype == np.float32)
        return save(prefix, slices)

    parts._save = counted
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        call()
    finally:
        contents.CHUNK_BYTES *= 32
        parts._save = save
    return {"peak": _status("VmHWM") - before, "written": int(sum(written))}


def _status(name):
    """Bytes from a line of /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def cannot(world_size):
    """What a rank raises if the last one fails: in reading rows, in writing; and what is left."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm
    from sok_like.serving import parts

    rank = comm.current().rank
    base = pathlib.Path(tempfile.gettempdir()) / f"sok_cannot_{os.getppid()}_{world_size}"
    model = Rows(sok, 1)
    sok.assign(model.tables[0], np.arange(50_000), np.ones([50_000, 4], np.float32))
    export = lambda **options: sok.export_saved_model(model, base / "model", "zeros", **options)  # noqa: E731
    export()
    messages, save = [], parts._save

    def fails(*args):
        if rank == world_size - 1:
            raise OSError("the disk is full")
        return save(*args)

    parts._save = fails
    try:
        messages.append(message(export))
    finally:
        parts._save = save
    mine = np.arange(50_000)[np.arange(50_000) % world_size == world_size - 1]
    sok.assign(model.tables[0], mine[:1], np.full([1, 4], np.nan, np.float32))
    messages.append(message(lambda: export(row_dtype="int8")))
    serve = tf.saved_model.load(str(base / "model")).signatures["serving_default"]
    rows = serve(keys=tf.constant(np.arange(-3, 50_000)))["rows"].numpy()
    return {"messages": messages, "left": os.listdir(base), "sum": float(rows.sum())}
