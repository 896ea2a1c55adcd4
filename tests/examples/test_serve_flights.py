"""`examples/serve_flights.py`: trained on 2 ranks, served by a process without the package."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests import cores
from tests.examples.conftest import SERVED
from tests.ranks import HANG_LIMIT, ROOT

PROGRAM = pathlib.Path(ROOT, "examples", "serve_flights.py")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

pytestmark = pytest.mark.ranks

# Runs the program where importing the package fails.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sok_like", "flights_data", "flights_model"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(on_two_ranks):
    first, _ = on_two_ranks("serve_flights")
    assert "served from" in first
    # Deltas come later, as if training took longer than the start of the server.
    (cores.folder() / SERVED / "model" / "1.deltas").rename(cores.folder() / SERVED / "later")
    return cores.folder() / SERVED


@pytest.fixture(scope="module")
def address(folder):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(PROGRAM), "--folder", str(folder), "--port", "0"]
    server = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        line = server.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", line), line
        yield line
    finally:
        server.kill()
        server.wait()


def get(url):
    with urllib.request.urlopen(url, timeout=HANG_LIMIT) as reply:
        return reply.read().decode()


def test_requests(folder, address):
    names = json.loads(get(f"{address}/flights"))
    assert len(names) == 200 and all(" to " in name for name in names)
    answers = [json.loads(get(f"{address}/predict?flight={i}")) for i in range(0, 200, 20)]
    found = np.array([answer["probability"] for answer in answers])
    assert [answer["flight"] for answer in answers] == names[::20]
    assert ((found > 0) & (found < 1)).all() and len(set(found)) == len(found)
    assert "<select" in get(f"{address}/")
    for path, status in (("predict?flight=200", 400), ("predict?flight=-1", 400), ("x", 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{address}/{path}")
        assert refused.value.code == status


def test_the_page_shows_a_probability(address):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    page = subprocess.run(
        [*command, "--virtual-time-budget=20000", f"{address}/"],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    ).stdout
    answer = json.loads(get(f"{address}/predict?flight=0"))
    assert f"{round(100 * answer['probability'])} % over 15 minutes late" in page
    assert page.count("<option") == 200


def test_the_answers_change_while_the_model_is_trained_on(folder, address):
    """Last, for it lets the server have the deltas."""
    answers = [[probability_of(address, i) for i in range(0, 200, 20)]]
    names = sorted(file.stem for file in (folder / "later").glob("*.index"))
    assert len(names) >= 2
    (folder / "model" / "1.deltas").mkdir()
    for name in names:
        for file in sorted((folder / "later").glob(f"{name}.*")):  # the index last
            file.rename(folder / "model" / "1.deltas" / file.name)
        until = time.monotonic() + HANG_LIMIT
        while (now := [probability_of(address, i) for i in range(0, 200, 20)]) == answers[-1]:
            assert time.monotonic() < until, f"delta {name} changes no answer"
            time.sleep(0.05)
        answers.append(now)


def probability_of(address, flight):
    return json.loads(get(f"{address}/predict?flight={flight}"))["probability"]


def auc(labels, scores):
    """The share of pairs of a late and a punctual flight that are in order; ties count half."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    late = labels.astype(bool)
    above = ranks[late].sum() - late.sum() * (late.sum() + 1) / 2
    return above / (late.sum() * (~late).sum())


@pytest.mark.parametrize("row_dtype, bytes_per_row", [("int8", 10), ("bfloat16", 16)])
def test_the_auc_survives_smaller_rows(exported, row_dtype, bytes_per_row):
    labels, scores, of_rows = exported
    before, after = (auc(labels, scores[dtype]) for dtype in ("float32", row_dtype))
    assert before > 0.55 and 0 < np.abs(scores[row_dtype] - scores["float32"]).max()
    assert abs(after - before) < 1e-3, (before, after)
    # A row of 8 numbers takes 32 bytes; or one byte for each and 2 for the scale, or 2 for each.
    assert of_rows[row_dtype] / of_rows["float32"] == bytes_per_row / 32


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Labels, logits and bytes of rows by `row_dtype`, of one model trained on one rank."""
    import tensorflow as tf

    import sok_like as sok
    from sok_like.runtime.ranks import initialize

    sys.path.insert(0, str(PROGRAM.parent))
    import flights_data
    import flights_model

    initialize.reset()
    sok.Init(global_batch_size=512, seed=42)
    tf.keras.utils.set_random_seed(42)
    train, test = flights_data.load(20_000)
    model = flights_model.FlightsModel(train.keys.shape[1], 8, train.keys.size)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.005))
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    for part in flights_data.train_batches(train, 512, 42, 1, 0, 1):
        model.train_on_batch((part.keys, part.dense), part.labels)
    inputs = (
        tf.TensorSpec([None, train.keys.shape[1]], tf.int64, "keys"),
        tf.TensorSpec([None, train.dense.shape[1]], tf.float32, "dense"),
    )
    scores, of_rows = {}, {}
    for row_dtype in ("float32", "bfloat16", "int8"):
        path = str(tmp_path_factory.mktemp(row_dtype) / "model")
        sok.export_saved_model(model, path, row_dtype=row_dtype, signatures=inputs)
        serve = tf.saved_model.load(path).signatures["serving_default"]
        given = {"keys": tf.constant(test.keys), "dense": tf.constant(test.dense, tf.float32)}
        scores[row_dtype] = serve(**given)["output_0"].numpy().reshape(-1)
        of_rows[row_dtype] = bytes_of_rows(tf, path, 8)
    initialize.reset()
    return np.asarray(test.labels).reshape(-1), scores, of_rows


def bytes_of_rows(tf, path, dim):
    """Of the table's rows in a SavedModel, with what scales them; its index is buckets of keys."""
    reader = tf.train.load_checkpoint(f"{path}/variables/variables")
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    rows = max(
        shape[0]
        for name, shape in shapes.items()
        if shape[1:] == [dim] and dtypes[name] != tf.int64
    )
    whole = [name for name, shape in shapes.items() if shape[:1] == [rows]]
    return sum(int(np.prod(shapes[name])) * dtypes[name].size for name in whole)
