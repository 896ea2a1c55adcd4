"""Models on meshes of ranks beside the same by Keras alone in one process."""

import math
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

from sok_like import distribution as dist
from sok_like.distribution.sharded_variable import path_of, shard_of
from sok_like.runtime.ranks import comm

TOLERANCE = 1e-5
LAYOUTS = {
    "wide/kernel": (None, "model"),
    "wide/bias": ("model",),
    "narrow/kernel": ("model", None),
    "rows/embeddings": ("model", None),
    "columns/embeddings": (None, "model"),
    "over_batch/kernel": ("batch", None),
}


def make_model(dtype=None, penalties=(None, None, None)):
    """Dense layers and embeddings, most of which `LAYOUTS` shards."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(3)
    of_wide, of_rows, of_last = penalties
    numbers, ids = layers.Input([6]), layers.Input([3], dtype="int64")
    hidden = layers.Dense(5, "tanh", kernel_regularizer=of_wide, name="wide", dtype=dtype)(numbers)
    hidden = layers.Dense(7, "tanh", name="narrow", dtype=dtype)(hidden)
    rows = layers.Embedding(9, 3, embeddings_regularizer=of_rows, name="rows", dtype=dtype)(ids)
    columns = layers.Embedding(9, 3, name="columns", dtype=dtype)(ids)
    flat = [layers.Flatten(dtype=dtype)(each) for each in (rows, columns)]
    hidden = layers.Concatenate(dtype=dtype)([hidden, *flat])
    hidden = layers.Dense(4, kernel_regularizer=of_last, name="over_batch", dtype=dtype)(hidden)
    return tf.keras.Model([numbers, ids], layers.Dense(1, name="head", dtype="float32")(hidden))


def data():
    """Inputs, in which the ids of a batch repeat, and targets."""
    rng = np.random.default_rng(8)
    numbers, ids = rng.normal(size=(10, 6)).astype("f"), rng.integers(0, 9, (10, 3))
    return (numbers, ids), rng.normal(size=(10, 1)).astype("f")


def layouts(shape, axes):
    mesh = dist.DeviceMesh(shape=shape, axis_names=("batch", "model"), devices=dist.list_devices())
    layout_map = dist.LayoutMap(mesh)
    for path, layout in axes.items():
        layout_map[path] = layout
    return mesh, layout_map


def under(shape, axes, body, *args):
    """`body(*args)` with layouts on a mesh."""
    mesh, layout_map = layouts(shape, axes)
    parallel = dist.ModelParallel(
        device_mesh=mesh, layout_map=layout_map, batch_dim_name=mesh.axis_names[0]
    )
    dist.set_distribution(parallel)
    try:
        return body(*args)
    finally:
        dist.set_distribution(None)


def check_as_alone(on_processes, shape, axes, body, *args):
    """What `body(*args)` returns on the ranks of a mesh is what it returns here, by Keras alone."""
    expected = body(*args)
    for rank, found in enumerate(on_processes(math.prod(shape), under, shape, axes, body, *args)):
        assert_close(found, expected, f"rank {rank}:")
    return expected


def assert_close(found, expected, what):
    """Equal within the tolerance: arrays, and dictionaries and lists of them."""
    if isinstance(expected, dict):
        assert set(found) >= set(expected), what
        for key in expected:
            assert_close(found[key], expected[key], f"{what} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), what
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{what} {i}")
    else:
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def of_loop(optimizer):
    """The optimizer of a program's own loop, which a distribution must wrap."""
    return dist.distribution().optimizer(optimizer) if dist.distribution() else optimizer


def weights_of(model):
    return {path_of(v): v.numpy() for v in model.variables}


def local_shapes(model):
    """By the end of the path: `kernel` of a layer has one shard shape."""
    cut = [v for v in model.variables if shard_of(v)]
    return {"/".join(path_of(v).split("/")[-2:]): tuple(v.local.shape) for v in cut}


def shared_folder():
    """A folder that rank 0 makes for all."""
    if dist.distribution() is None and comm.current().world_size == 1:
        return pathlib.Path(tempfile.mkdtemp())
    name = tempfile.mkdtemp() if comm.current().rank == 0 else ""
    sent = comm.current().all_gather(tf.constant(np.frombuffer(name.encode(), np.uint8)), "folder")
    return pathlib.Path(sent.numpy().tobytes().decode())
