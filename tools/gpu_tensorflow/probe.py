"""Questions about TensorFlow's ops over tables on a GPU, one each: `python probe.py QUESTION`.

From the checkout's root. PROBE_DEVICE=/CPU:0 rehearses a question without a GPU.
"""

import ctypes
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
    """Names and steps: W1, W2, and 26 tables of 1,024, 8,192 and 65,536 keys each."""
    import sok_like as sok
    from benchmarks import steps, workloads

    sok.Init(global_batch_size=8192)
    w1, w2 = (make(REHEARSED, batches=8) for make in (workloads.w1, workloads.w2))
    keys = [(tf.constant(batch),) for batch in w1.keys]
    yield "W1 SGD, one layer", steps.w1_layer("SGD", w1, keys).call
    yield "W1 Adam, one layer", steps.w1_layer("Adam", w1, keys).call
    ragged = steps.w1_groups_of_ids("SGD", w1)[steps.RAGGED]
    yield "W1 SGD, 26 ragged tables", ragged.call
    yield "W1 SGD, 26 tables, ids in one tensor", _packed_w1(steps, w1)
    every_key = workloads.mixed(np.arange(w2.num_rows))
    ragged = steps._w2_groups_of_ids("Adagrad", w2, every_key)[steps.RAGGED]
    yield "W2 Adagrad, 4 ragged tables", ragged.call
    for num_keys in (1024,) if REHEARSED else (1024, 8192, 65536):
        batches = _batches(num_keys)
        yield f"26 x {num_keys} keys, Adagrad", _step_of_tensorflow(num_keys, batches)
        if not REHEARSED:
            yield f"26 x {num_keys} keys, Adagrad, the core's own", _step_of_core(batches)


def _packed_w1(steps, w1):
    """As the ragged group, but with one RaggedTensor `[26, batch, None]` from Python."""
    tables = steps._w1_tables(w1)
    call = steps._group_call("SGD", tables)
    num_batches, batch, features = w1.keys.shape
    splits = [np.arange(features + 1) * batch, np.arange(features * batch + 1)]
    packed = [
        tf.RaggedTensor.from_nested_row_splits(keys.T.reshape(-1), splits, validate=False)
        for keys in w1.keys
    ]
    return lambda i: call(packed[i % num_batches])


def _batches(num_keys):
    """Keys `[8, 26, num_keys]`; a quarter of a table's keys differ."""
    return np.random.default_rng(0).integers(0, num_keys // 4, (8, 26, num_keys))


def _step_of_tensorflow(num_keys, batches):
    """A step of 26 tables. Keys are on the device beforehand."""
    import sok_like as sok

    with tf.device(DEVICE):
        tables = [sok.EmbeddingVariable(16, name=f"t{i}_{num_keys}") for i in range(26)]
        keys = [[tf.identity(k) for k in batch] for batch in batches]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.01))
    optimizer.build(tables)

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            rows = sok.group_embedding_lookup(tables, keys)
        ones = [tf.ones([num_keys, 16])] * 26
        grads = tape.gradient(rows, tables, output_gradients=ones)
        optimizer.apply_gradients(zip(grads, tables, strict=True))

    return lambda i: step(keys[i % 8])


def _step_of_core(batches):
    """The same by the core alone, on a stream of its own."""
    from sok_like import _core as core

    tables = [core.CudaTable(f"core{i}", 16, initial_capacity=100_000) for i in range(26)]
    keys = [[core.CudaArray(k) for k in batch] for batch in batches]
    rows = [core.CudaArray(np.zeros((batches.shape[2], 16), np.float32)) for _ in tables]
    ones = core.CudaArray(np.ones((batches.shape[2], 16), np.float32))

    def step(i):
        core.cuda_group_lookup(tables, keys[i % 8], rows)
        core.cuda_group_apply_gradients(
            tables, "adagrad", 0.01, i + 1, keys[i % 8], [ones] * len(tables)
        )

    return step


def _synchronize():
    if not REHEARSED:
        from sok_like import _core as core

        tf.test.experimental.sync_devices()
        core.cuda_synchronize()


def steps():
    """Milliseconds of a step: alone until it is done, and one after the other without waiting."""
    for name, call in _cases():
        for i in range(80):  # Adam's replay must catch up rows with gaps
            call(i)
        _synchronize()
        alone = []
        for i in range(30):
            begin = time.perf_counter()
            call(i)
            _synchronize()
            alone.append(time.perf_counter() - begin)
        rounds = []
        for _ in range(5):
            begin = time.perf_counter()
            for i in range(30):
                call(i)
            returned = (time.perf_counter() - begin) / 30
            _synchronize()
            rounds.append((time.perf_counter() - begin) / 30)
        in_a_row = 1e3 * np.median(rounds)
        print(f"{name}: alone {1e3 * np.median(alone):.3f}, in a row {in_a_row:.3f}, "
              f"call returned after {1e3 * returned:.3f} ms", flush=True)  # fmt: skip


def profile():
    """What 20 steps of each case do on the device, by trace.cc."""
    trace = ctypes.CDLL(os.environ["TRACE"])  # before the first call of CUDA
    for name, call in _cases():
        for i in range(80):
            call(i)
        _synchronize()
        trace.trace_begin()
        begin = time.perf_counter()
        for i in range(20):
            call(i)
        _synchronize()
        wall = (time.perf_counter() - begin) / 20
        path = pathlib.Path(os.environ["OUT"]) / (re.sub(r"\W+", "_", name) + ".tsv")
        trace.trace_write(str(path).encode())
        print(f"{name}: {1e6 * wall:.0f} us a step while traced", flush=True)
        _print_shares([line.split("\t") for line in path.read_text().splitlines()])


def _print_shares(records, num_steps=20):
    """Launches and microseconds per step, by who launched what."""
    shares, kernels = {}, {}
    for what, begin, end, size, name in records:
        ours = "sok" in name and what == "kernel"
        group = "our kernels" if ours else "other kernels" if what == "kernel" else f"{what} {name}"
        name = re.sub(r"<.*|\(.*", "", name.replace("(anonymous namespace)::", ""))
        for sums, key in ((shares, group), (kernels, f"{group}: {name.split('::')[-1]}")):
            count, time_ns, num_bytes = sums.get(key, (0, 0, 0))
            sums[key] = (count + 1, time_ns + int(end) - int(begin), num_bytes + int(size))
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:16]
    for title, sums in (("", shares.items()), ("  ", longest)):
        for key, (count, time_ns, num_bytes) in sums:
            print(f"  {title}{key}: {count / num_steps:.1f} x, {time_ns / 1e3 / num_steps:.1f} us, "
                  f"{num_bytes / num_steps / 1024:.0f} KiB")  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    globals()[sys.argv[1]]()
