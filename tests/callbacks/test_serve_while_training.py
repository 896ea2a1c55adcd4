"""`sok.callbacks.ServeWhileTraining`, and a reader with stock TensorFlow that follows it."""

import datetime

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests import emulated
from tests.checks import live

pytestmark = [pytest.mark.keras]


@pytest.fixture(autouse=True)
def on_host():
    if emulated.asked_for():
        pytest.skip("deltas are of tables in host memory")


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stock_reader_follows_and_ends_with_the_answers_of_a_fresh_export(rank_results, ranks):
    found = rank_results(ranks, "live.followed")
    first = found[0]
    fresh = tf.saved_model.load(str(first["folder"] / "fresh")).signatures["serving_default"]
    (expected,) = fresh(keys=tf.constant(np.stack([live.ASKED, live.ASKED], 1))).values()
    answers = first["answers"]
    np.testing.assert_array_equal(answers[-1]["answer"], expected)
    assert len(answers) >= 4 and len({str(each["answer"]) for each in answers}) >= 4
    # The first SavedModel has no room for the keys of three batches; the next ones fill up, too.
    newest = answers[-1]["version"]
    assert newest >= 3 and {each["version"] for each in answers} > {1}
    models = {str(newest - 1), str(newest)}
    assert models <= set(first["places"]) <= models | {f"{newest}.deltas"}
    assert first["by_time"] >= 1


@pytest.mark.parametrize("every", [0, -1, 1.5, True, datetime.timedelta(0), "epoch"])
def test_an_interval_that_makes_no_sense_raises(every, tmp_path):
    with pytest.raises(ValueError, match="`every` must be a number of batches"):
        sok.callbacks.ServeWhileTraining(tmp_path, every=every)


def test_what_cannot_be_written_raises(tmp_path, monkeypatch):
    sok.Init(global_batch_size=64, seed=7)
    model = live.made("live_failing")
    (tmp_path / "models").write_text("a file")
    serve = sok.callbacks.ServeWhileTraining(tmp_path / "models", every=1)
    with pytest.raises(Exception, match="models"):
        model.fit(live.data().take(2), verbose=0, callbacks=[serve])
    serve = sok.callbacks.ServeWhileTraining(tmp_path / "others", every=1)

    def fail(model, path):
        raise ValueError(f"{path} could not be written: No space left on device")

    monkeypatch.setattr("sok_like.callbacks.serve_while_training.export_delta", fail)
    with pytest.raises(ValueError, match="No space left"):
        model.fit(live.data().take(2), verbose=0, callbacks=[serve])


def test_each_fit_begins_with_a_model_and_keeps_two(tmp_path):
    sok.Init(global_batch_size=64, seed=7)
    model = live.made("live_days")
    for day in range(3):
        serve = sok.callbacks.ServeWhileTraining(tmp_path, every=100, headroom=8.0)
        model.fit(live.data().skip(day).take(1), verbose=0, callbacks=[serve])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "3.deltas"]
