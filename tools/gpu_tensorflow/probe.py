"""Questions about TensorFlow's ops over tables on a GPU, one each: `python probe.py QUESTION`.

From the checkout's root. PROBE_DEVICE=/CPU:0 rehearses a question without a GPU.
"""

import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

DEVICE = os.environ.get("PROBE_DEVICE", "/GPU:0")
REHEARSED = "CPU" in DEVICE


def devices():
    """The GPU that TensorFlow lists, and whether its own kernels run there."""
    print(tf.__version__, tf.config.list_physical_devices())
    assert REHEARSED or tf.config.list_physical_devices("GPU"), "TensorFlow lists no GPU"
    with tf.device(DEVICE):
        x = tf.range(12, dtype=tf.float32)
        np.testing.assert_array_equal(x * 2 + 1, np.arange(12) * 2 + 1)
        try:
            print("a matrix product", tf.matmul([x], [x], transpose_b=True).numpy())
        except tf.errors.OpError as error:  # without cuBLAS
            print("no matrix product:", str(error)[:300])


def library():
    """Whether the op library has kernels for the GPU, and a CUDA runtime of its own."""
    import sok_like as sok
    from sok_like.runtime.native import devices, libraries

    libraries.ops()
    for op in ["SokTableHandle", "SokLookup", "SokApplyGradients", "SokRoute", "SokMergeGrads"]:
        print(op, sorted(devices.kernel_devices(op)))
    file = next(pathlib.Path(sok.__file__).parent.glob("_ops*.so"))
    symbols = subprocess.run(["nm", "-D", "--undefined-only", file], capture_output=True, text=True)
    foreign = [
        name for name in symbols.stdout.split() if name.lower().startswith(("cuda", "__cuda"))
    ]
    assert not foreign, foreign
    assert REHEARSED or devices.gpu_in_use()


def _trained(device, rule):
    """Rows of lookups, and the table at the end, of six steps on a device."""
    import sok_like as sok

    rng = np.random.default_rng(3)
    with tf.device(device):
        table = sok.EmbeddingVariable(8, name=f"{rule}{device[1:4]}", initializer="ones")
    optimizer = sok.OptimizerWrapper(getattr(tf.keras.optimizers, rule)(0.05))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def step(values, splits):
        ids = tf.RaggedTensor.from_row_splits(values, splits)
        with tf.GradientTape() as tape:
            (rows,) = sok.group_embedding_lookup_sparse([table], [ids], combiners=["sum"])
            loss = tf.reduce_sum(rows * rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return rows

    looked_up = []
    for _ in range(6):
        splits = np.concatenate([[0], np.cumsum(rng.integers(0, 9, 64))])
        looked_up.append(step(rng.integers(-50, 50, splits[-1]), splits).numpy())
    keys, rows = (tensor.numpy() for tensor in sok.export(table))
    return looked_up, keys[np.argsort(keys)], rows[np.argsort(keys)]


def equal():
    """Lookups and updates have the bits of a table in host memory, or what differs."""
    import sok_like as sok

    sok.Init(global_batch_size=64)
    for rule in ["SGD", "Adagrad", "Adam"]:
        (on_host, keys, rows), (there, same_keys, same_rows) = (
            _trained("/CPU:0", rule),
            _trained(DEVICE, rule),
        )
        bits = rows.tobytes() == same_rows.tobytes()
        lookups = all(a.tobytes() == b.tobytes() for a, b in zip(on_host, there, strict=True))
        print(rule, len(keys), "keys; equal bits: rows", bits, "lookups", lookups)
        np.testing.assert_array_equal(keys, same_keys)
        np.testing.assert_allclose(same_rows, rows, rtol=1e-5, atol=1e-6)


def fit():
    """A Keras model whose table is on the device: fit, save, load, export."""
    import sok_like as sok

    sok.Init(global_batch_size=256)
    out = pathlib.Path(os.environ["OUT"]) / f"model{os.environ.get('TF_USE_LEGACY_KERAS', 0)}"
    keys = tf.keras.Input([4], dtype="int64", name="keys")
    with tf.device(DEVICE):
        rows = sok.GroupEmbedding({"k": 16}, combiners="sum", name="fit")({"k": keys})["k"]
    hidden = tf.keras.layers.Dense(32, "relu")(rows)
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(hidden))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.01)), "mse")
    x = np.random.default_rng(1).integers(0, 1000, [4096, 4])
    y = (x % 7).sum(1, keepdims=True).astype("float32") / 7
    losses = model.fit(x, y, batch_size=256, epochs=6, verbose=0).history["loss"]
    print("losses", [round(loss, 4) for loss in losses])
    assert losses[-1] < losses[0] / 2
    expected = model.predict(x[:256], verbose=0)
    model.save(f"{out}.keras")
    loaded = tf.keras.models.load_model(f"{out}.keras")
    np.testing.assert_allclose(loaded.predict(x[:256], verbose=0), expected, rtol=1e-4, atol=1e-4)
    sok.export_saved_model(model, f"{out}_exported")
    serve = tf.saved_model.load(f"{out}_exported").signatures["serving_default"]
    (served,) = serve(
        **{next(iter(serve.structured_input_signature[1])): tf.constant(x[:256])}
    ).values()
    np.testing.assert_allclose(served, expected, rtol=1e-4, atol=1e-4)


def _cases():
    """Names and steps: W1, W2, and tables of 8,192 and 65,536 keys each."""
    import sok_like as sok
    from benchmarks import steps

    sok.Init(global_batch_size=8192)
    for name, make in {"W1": steps.w1, "W2": steps.w2}.items():
        for rule in ("SGD", "Adam") if name == "W1" else ("Adagrad",):
            for which, contender in make(rule, REHEARSED)[0].items():
                if which.startswith("ours"):
                    yield f"{name} {rule}, {which}", contender.call
    for num_keys in (1024,) if REHEARSED else (8192, 65536):
        yield f"26 x {num_keys} keys, Adagrad", _many(num_keys)


def _many(num_keys):
    """A step of 26 tables; a quarter of the keys differ. Keys are on the device beforehand."""
    import sok_like as sok

    with tf.device(DEVICE):
        tables = [sok.EmbeddingVariable(16, name=f"t{i}_{num_keys}") for i in range(26)]
        rng = np.random.default_rng(0)
        keys = [tf.identity(rng.integers(0, num_keys // 4, num_keys)) for _ in tables]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.01))
    optimizer.build(tables)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            found = sok.group_embedding_lookup(tables, keys)
            loss = tf.add_n([tf.reduce_sum(rows) for rows in found])
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    return lambda _: step()


def steps():
    """Milliseconds of a step: until it is done, and until its call returns."""
    sync = tf.test.experimental.sync_devices if not REHEARSED else lambda: None
    for name, call in _cases():
        for i in range(20):
            call(i)
        sync()
        waited = []
        for i in range(30):
            begin = time.perf_counter()
            call(i)
            sync()
            waited.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for i in range(30):
            call(i)
        returned = (time.perf_counter() - begin) / 30
        sync()
        print(f"{name}: {1e3 * np.median(waited):.3f}, {1e3 * returned:.3f} ms", flush=True)


def profile():
    """A trace of 20 steps of each case: the share of TensorFlow, of copies and of our kernels."""
    for name, call in _cases():
        for i in range(20):
            call(i)
        with tf.profiler.experimental.Profile(f"{os.environ['OUT']}/{re.sub(r'[ ,]+', '_', name)}"):
            for i in range(20):
                call(i)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    globals()[sys.argv[1]]()
