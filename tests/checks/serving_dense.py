"""Dense tables and variables of which ranks hold slices: exported in parts, and followed."""

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

from tests.checks.serving import message, model_parallel
from tests.checks.serving_parts import peak_of

ROWS, DIM = 300_000, 128  # of the table whose export is measured


def checks(world_size):
    if world_size == 4:
        return {"grid": lambda: grid(world_size)}
    return {
        "tables": lambda: tables(world_size),
        "parallel": lambda: parallel(world_size),
        "cannot": lambda: cannot(world_size),
        **{f"peak_{kind}": (lambda kind=kind: peak(world_size, kind)) for kind in PEAKS},
    }


# Rows and length of a row, and the dtype. The thresholds of `Tables` make: one by columns, one on
# a rank alone, three that share a variable, one by rows, one replicated, and one of each dtype.
TABLES = (
    *((40, 9, "float32"), (30, 4, "float32"), (31, 4, "float32"), (32, 4, "float32")),
    *((200, 5, "float32"), (3, 2, "float32"), (210, 4, "bfloat16"), (41, 10, "bfloat16")),
    *((220, 4, "float16"), (42, 9, "float16")),
)


class Tables(tf.Module):
    """Rows of a layer's tables, one of which has two inputs, and of a hash table."""

    def __init__(self, sok, sizes=TABLES, **options):
        super().__init__()
        options = options or {
            "column_slice_threshold": 350,
            "row_slice_threshold": 800,
            "data_parallel_threshold": 6,
        }
        self.sizes = [*sizes, sizes[0]]
        self.layer = sok.dist_model_parallel.DistributedEmbedding(
            [sok.Embedding(n, dim, dtype=dtype) for n, dim, dtype in sizes],
            input_table_map=[*range(len(sizes)), 0],
            **options,
        )
        self.hashed = sok.EmbeddingVariable(4, name="dense_beside")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
    def __call__(self, ids):
        found = self.layer([ids % n for n, *_ in self.sizes])
        rows = {f"rows_{n}": tf.cast(each, tf.float32) for n, each in enumerate(found)}
        return {**rows, "hashed": tf.nn.embedding_lookup(self.hashed, ids)}


def _values(sizes, seed):
    """Random rows of each table, and what they are in its dtype."""
    rng = np.random.default_rng(seed)
    return [
        tf.cast(rng.normal(size=[n, dim]), dtype).numpy().astype(np.float32)
        for n, dim, dtype in sizes
    ]


def _set(sok, model, seed):
    values = _values(TABLES, seed)
    model.layer.set_weights(values)
    keys = np.arange(300)
    rows = np.random.default_rng(seed + 1).normal(size=[300, 4]).astype(np.float32)
    sok.assign(model.hashed, keys, rows)
    expected = [values[n][keys % len(values[n])] for n in [*range(len(TABLES)), 0]]
    return {f"rows_{n}": each for n, each in enumerate(expected)} | {"hashed": rows}


def _equal(place, names, expected):
    """What differs in a SavedModel after some deltas; `None` if nothing does."""
    loaded = tf.saved_model.load(str(place))
    for name in names:
        loaded.signatures["refresh"](delta=tf.constant(name))
    found = loaded.signatures["serving_default"](ids=tf.range(300, dtype=tf.int64))
    same = {name: np.array_equal(found[name], value) for name, value in expected.items()}
    return [name for name in expected if not same[name]] if found.keys() == same.keys() else found


def cases_on(world_size):
    """File systems that so many ranks write to: each on some number of ranks, SLOW=1 on each."""
    few = {1: ("sent",), 2: ("shared",), 3: ("sent",)}
    return ("shared", "sent") if os.environ.get("SLOW") else few[world_size]


def tables(world_size):
    """What differs from the rows that were set, by case; files, and what is left beside them."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm
    from sok_like.serving import contents

    rank, found, chunk = comm.current().rank, {}, contents.CHUNK_BYTES
    base = pathlib.Path(tempfile.gettempdir()) / f"sok_dense_{os.getppid()}_{world_size}"
    places = {"shared": f"{base}/tables", "sent": f"ram://dense_{world_size}/tables"}
    for case in cases_on(world_size):
        place = places[case]
        model = Tables(sok)
        kinds = {int(kind) for kind in model.layer.strategy.plan.kinds}
        contents.CHUNK_BYTES = 2500  # so that there are several parts
        differs = []
        try:
            for number in range(3):
                expected = _set(sok, model, 7 * number)
                if number == 1:
                    sok.export_delta(model, f"{place}.deltas/1")
                else:  # the second export replaces the first
                    sok.export_saved_model(model, place, "zeros", refreshable=True)
                if rank == 0:
                    differs.append(_equal(place, ["1"] * (number == 1), expected))
        finally:
            contents.CHUNK_BYTES = chunk
        if rank == 0:
            files = len(tf.io.gfile.listdir(f"{place}/variables"))
            left = sorted(tf.io.gfile.listdir(os.path.dirname(place)))
            found[case] = {"differs": differs, "files": files, "left": left, "kinds": kinds}
    return found


def _parallel(sok, shape, layouts, dtype="float32"):
    """A model with a table, a convolution, a product and a bias under a mesh."""
    with model_parallel(sok, layouts, shape).scope():
        ids = tf.keras.Input([5], dtype="int64", name="ids")
        rows = tf.keras.layers.Embedding(50, 7, name="dense_items", dtype=dtype)(ids)
        hidden = tf.keras.layers.Conv1D(6, 3, name="dense_conv")(rows)
        hidden = tf.keras.layers.Flatten()(hidden)
        model = tf.keras.Model(ids, tf.keras.layers.Dense(4, name="dense_top")(hidden))
        if layouts is LAYOUTS["rows"] and dtype == "float32":
            model.compile(tf.keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
            data = np.random.default_rng(0).integers(0, 50, [12, 5])
            model.fit(data, np.ones([12, 4]), batch_size=12, verbose=0)
        for variable in model.trainable_variables:  # biases are not 0
            variable.assign(tf.cast(variable + 0.5, variable.dtype))
    return model


def _stored(place):
    """Shape and sum of bits of each variable of a SavedModel, and their values."""
    reader = tf.train.load_checkpoint(f"{place}/variables/variables")
    names = [name for name in reader.get_variable_to_shape_map() if "VARIABLE_VALUE" in name]
    return {name: reader.get_tensor(name) for name in names}


LAYOUTS = {
    "rows": {
        "dense_items/embeddings": ("model", None),
        "dense_conv.*kernel": ("model", None, None),
    },
    "columns": {
        "dense_items/embeddings": (None, "model"),
        "dense_conv.*kernel": (None, None, "model"),
        "dense_top.*bias": ("model",),
    },
    "middle": {"dense_conv.*kernel": (None, "model", None), "dense_top.*kernel": (None, "model")},
}


def _by_layout(sok, base, shape, cases):
    """Whether a SavedModel, and one with a delta, hold exactly the variables of the model."""
    from sok_like.runtime.ranks import comm

    found = {}
    for case, layouts, dtype in cases:
        model, place = _parallel(sok, shape, layouts, dtype), f"{base}/{case}"
        expected = []
        for step in range(2):
            values = [np.asarray(tf.convert_to_tensor(v)) for v in model.trainable_variables]
            if step == 0:
                sok.export_saved_model(model, place, refreshable=True)
            else:
                sok.export_delta(model, f"{place}.deltas/1")
            expected.append(values)
            for variable in model.trainable_variables:
                variable.assign(tf.cast(variable * 3, variable.dtype) - 1)
        if comm.current().rank == 0:
            stored = list(_stored(place).values())
            loaded = tf.saved_model.load(place)
            before = [v.numpy() for v in loaded.captured]
            loaded.signatures["refresh"](delta=tf.constant("1"))
            after = [v.numpy() for v in loaded.captured]
            found[case] = {
                "stored": _holds(stored, expected[0]),
                "before": _holds(before, expected[0]) and len(before) == len(expected[0]),
                "after": _holds(after, expected[1]),
                # Beside these: the sequence, the versions and TensorFlow's own.
                "floats": sum(v.dtype.kind != "O" and v.ndim > 0 for v in stored),
            }
    return found


def _holds(values, expected):
    """Whether each of `expected` is among the values, bit for bit."""
    same = [
        any(v.dtype == e.dtype and v.shape == e.shape and (v == e).all() for v in values)
        for e in expected
    ]
    return all(same) and all(np.abs(e.astype(np.float32)).max() > 0 for e in expected)


def parallel(world_size):
    import sok_like as sok

    base = f"{tempfile.gettempdir()}/sok_parallel_{os.getppid()}_{world_size}"
    cases = [(name, layouts, "float32") for name, layouts in LAYOUTS.items()]
    cases += [(f"{d}_rows", LAYOUTS["rows"], d) for d in ("bfloat16", "float16")]
    found = _by_layout(sok, base, (1, world_size), cases)
    batch = {"dense_items/embeddings": ("batch", None)}
    return found | _by_layout(sok, base, (world_size, 1), [("batch", batch, "float32")])


def grid(world_size):
    """On a grid of ranks several hold the same shard."""
    import sok_like as sok

    base = f"{tempfile.gettempdir()}/sok_grid_{os.getppid()}_{world_size}"
    both = {"dense_items/embeddings": ("batch", "model"), "dense_top.*kernel": ("model", None)}
    return _by_layout(sok, base, (2, 2), [("grid", both, "float32")])


def _one_table(sok, **options):
    model = Tables(sok, [(ROWS, DIM, "float32")], **options)
    # After a sparse update, a read copies.
    model.layer.set_weights([np.zeros([ROWS, DIM], np.float32)], chunk=1000 * DIM)
    return model


def _one_parallel(sok):
    with model_parallel(sok, {"dense_large/embeddings": ("model", None)}).scope():
        ids = tf.keras.Input([2], dtype="int64", name="ids")
        return tf.keras.Model(ids, tf.keras.layers.Embedding(ROWS, DIM, name="dense_large")(ids))


PEAKS = {
    "rows": lambda sok: _one_table(sok, row_slice_threshold=1),
    "columns": lambda sok: _one_table(sok, column_slice_threshold=ROWS * DIM // 2),
    "parallel": _one_parallel,
}


def peak(world_size, kind):
    """Bytes of a table, those that this rank writes, and by how much calls raise its peak."""
    import sok_like as sok

    place = f"{tempfile.gettempdir()}/sok_dense_peak_{kind}_{os.getppid()}_{world_size}"
    model = PEAKS[kind](sok)
    found = peak_of(lambda: sok.export_saved_model(model, place, "zeros", refreshable=True))
    delta = peak_of(lambda: sok.export_delta(model, f"{place}.deltas/1"))
    return {"table": 4 * ROWS * DIM, "export": found, "delta": delta}


def cannot(world_size):
    """What is raised and left if the last rank fails: in an export, and in a delta."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm
    from sok_like.serving import parts

    rank, save = comm.current().rank, parts._save
    base = pathlib.Path(tempfile.gettempdir()) / f"sok_dense_cannot_{os.getppid()}_{world_size}"
    model, place = Tables(sok), base / "model"
    _set(sok, model, 1)
    export = lambda: sok.export_saved_model(model, place, "zeros", refreshable=True)  # noqa: E731
    export()

    def fails(prefix, slices):
        if rank == world_size - 1 and (
            world_size == 1 or any(each.name.startswith("spread") for each in slices)
        ):
            raise OSError("the disk is full")
        return save(prefix, slices)

    expected, messages = _set(sok, model, 2), []
    parts._save = fails
    try:
        messages.append(message(lambda: sok.export_delta(model, f"{place}.deltas/1")))
        left = sorted(os.listdir(f"{place}.deltas")) if rank == 0 else []
        messages.append(message(export))
    finally:
        parts._save = save
    delta = sok.export_delta(model, f"{place}.deltas/1")
    differs = _equal(place, ["1"], expected) if rank == 0 else []
    other = Tables(sok, TABLES[: 2 + (rank == 0)], row_slice_threshold=1)
    messages.append(message(lambda: sok.export_saved_model(other, place, "zeros")))
    return {
        "messages": messages,
        "left": [left, sorted(os.listdir(base))],
        "differs": differs,
        "num_rows": delta.num_rows,
    }
