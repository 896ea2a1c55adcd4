"""Models exported on 1 and 2 ranks, loaded by a process that cannot import the package."""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import serving
from tests.checks.serving import following
from tests.ranks import HANG_LIMIT

pytestmark = pytest.mark.keras
WORLDS = [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.ranks)]
DOORS = ("group", "columns", "sok1", "sharded", "parallel", "module")
FOLLOWING = [make.__name__ for make, _ in following()]


@pytest.fixture(params=WORLDS)
def served(request, on_processes):
    """The number of ranks, and what each found: each folder has what stock TensorFlow computed."""
    found = on_processes(request.param, serving.exported, request.param)
    compute(tuple(found[0][door] for door in DOORS))
    return request.param, found


@functools.cache
def compute(folders):
    """One process for all models of one launch."""
    script = pathlib.Path(__file__).with_name("stock_process.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), *folders],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("door", DOORS)
def test_stock_tensorflow_computes_what_the_model_does(served, door):
    world_size, found = served
    folder = pathlib.Path(found[0][door])
    expected = np.load(folder / "expected.npz")["output"]
    outputs = np.load(folder / "outputs.npz")
    assert np.abs(expected).max() > 0 and len(np.unique(expected)) > 6
    for loader in ("v1", "v2"):
        if door == "parallel" and world_size > 1:  # a product in parts rounds in another way
            np.testing.assert_allclose(outputs[loader], expected, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(outputs[loader], expected, loader)


@pytest.fixture(params=WORLDS)
def refreshed(request, on_processes):
    """The number of ranks, and what each found; each folder has what stock TensorFlow computed."""
    found = on_processes(request.param, serving.refreshed, request.param)
    compute(tuple(folder for door in FOLLOWING for folder in found[0][door]["folders"]))
    return request.param, found


@pytest.mark.parametrize("door", FOLLOWING)
def test_a_server_that_follows_computes_what_a_full_export_computes(refreshed, door):
    world_size, found = refreshed
    followed, full = (pathlib.Path(folder) for folder in found[0][door]["folders"])
    outputs = np.load(followed / "outputs.npz")
    expected = np.load(full / "outputs.npz")["v2"]
    for loader in ("v1", "v2"):
        np.testing.assert_array_equal(outputs[loader], expected, loader)
    computed = np.load(full / "expected.npz")
    assert np.abs(computed["output"] - computed["before"]).max() > 0.01
    if door == "group":
        np.testing.assert_array_equal(outputs["v2"], computed["output"])
    assert all(rank[door]["deltas"] == found[0][door]["deltas"] for rank in found)
    if door != "parallel":  # without tables
        assert found[0][door]["deltas"][0]["num_new"] > 0
    for rank in found:
        refused = rank[door]["refused"]
        assert "The name of a delta must" in refused[0]
        assert world_size == 1 or "with the same path" in refused[1]
        assert "could not be written" in refused[-1]


WORDS = {
    "saved_model": ("NotImplementedError", "sok.export_saved_model", "served_group"),
    "export": ("NotImplementedError", "sok.export_saved_model", "served_group"),
    "missing": ("ValueError", "`missing`", "'none'"),
    "row_dtype": ("ValueError", "`row_dtype`", "'float16'"),
    "kind": ("TypeError", "`model` must be a Keras model"),
    "not_built": ("ValueError", "must be built"),
    "signatures": ("ValueError", "`signatures` must say what", "Module"),
    "python": ("ValueError", "EagerPyFunc|PyFunc", "serving_default"),
    "unheld": ("ValueError", "served_unheld", "not among its variables"),
    "path": ("ValueError", "`path` must be a new folder"),
}
ON_RANKS = {
    "sharded": ("NotImplementedError", "sok.export_saved_model", "served_"),
    "under_mesh": ("ValueError", "sok.export_saved_model"),
    "ranks": ("ValueError", "missing=initial", "missing=zeros"),
}


@pytest.mark.parametrize("case", [*WORDS, *ON_RANKS])
def test_what_cannot_be_exported_says_so(served, case):
    world_size, found = served
    if case in ON_RANKS and world_size == 1:
        pytest.skip("on several ranks only")
    for rank in found:
        message = rank["refused"][case] or ""
        for words in {**WORDS, **ON_RANKS}[case]:
            assert any(word in message for word in words.split("|")), message


def test_a_file_system_of_tensorflow(sok):
    """`ram://` cannot rename folders; a second export replaces the first."""
    keys = tf.keras.Input([2], dtype="int64")
    layer = sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1, name="served_in_ram")
    model = tf.keras.Model(keys, tf.keras.layers.Flatten()(layer(keys)))
    path = "ram://served/model"
    for value in (1.0, 2.0):
        sok.assign(layer.table, [1, 2], tf.fill([2, 4], value))
        sok.export_saved_model(model, path, missing="zeros")
        (output,) = (
            tf.saved_model.load(path)
            .signatures["serving_default"](tf.constant([[1, 9]], tf.int64))
            .values()
        )
        np.testing.assert_array_equal(output, [[value] * 4 + [0.0] * 4])
    assert tf.io.gfile.listdir("ram://served") == ["model"]
    with pytest.raises(ValueError, match="no file system is registered for 'nowhere'"):
        sok.export_saved_model(model, "nowhere://bucket/model")
