"""What `sok.report` prints and `TableMetrics` writes, on one rank and on two."""

import contextlib
import io
import os
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.checks.files import message_of

pytestmark = pytest.mark.keras

KEYS = list(range(12))
# The last of 3 steps of 398 keys has key 0 199 times, and 199 others once.
SKEWED = np.concatenate([np.arange(796), np.zeros(199, np.int64), np.arange(800, 999)])


def reported(world_size):
    """The same samples on every rank."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"sok_inside_{os.getppid()}_{world_size}"
    inputs = tf.keras.Input([1], dtype="int64")
    rows = sok.DistributedEmbedding("sum", None, 4, slot_num=1, max_nnz=1, name="inside")(inputs)
    model = tf.keras.Model(inputs, tf.keras.layers.Flatten()(rows))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    metrics = sok.callbacks.TableMetrics(every=2, log_dir=folder)
    keys = np.array(KEYS)[:, np.newaxis]
    options = {"batch_size": 2, "shuffle": False, "verbose": 0, "callbacks": [metrics]}
    # A part of TensorBoard, which need not be there.
    with mock.patch.object(tf.summary, "scalar", side_effect=ModuleNotFoundError("tensorboard")):
        model.fit(keys, np.zeros([12, 4]), **options)
    skewed = sok.callbacks.TableMetrics(every=3, log_dir=f"{folder}_skewed")
    of_skewed = {**options, "batch_size": 398, "callbacks": [skewed]}
    model.fit(SKEWED[:, np.newaxis], np.zeros([len(SKEWED), 4]), **of_skewed)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tables = sok.report(model)
    unwritable = sok.callbacks.TableMetrics(log_dir=__file__)
    plain = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    try:
        plain.fit(np.zeros([2, 1]), np.zeros([2, 1]), **options)
        without = ""
    except ValueError as error:
        without = str(error)
    return {
        "tables": [{**t._asdict(), "imbalance": t.imbalance} for t in tables],
        "printed": printed.getvalue(),
        "without": without,
        "unwritable": message_of(
            model.fit, keys, np.zeros([12, 4]), **{**options, "callbacks": [unwritable]}
        ),
        "folder": str(folder),
    }


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_report_counts_all_ranks(on_processes, world_size):
    ranks = on_processes(world_size, reported, world_size)
    for found in ranks:
        (table,) = found["tables"]
        keys = set(SKEWED.tolist())
        assert table["name"] == "inside" and table["keys"] == len(keys)
        assert table["keys_by_rank"] == tuple(
            sum(key % world_size == rank for key in keys) for rank in range(world_size)
        )
        assert table["bytes"] == sum(table["bytes_by_rank"]) > 0 and 0 < table["load"] <= 1
        assert table["imbalance"] == max(table["keys_by_rank"]) * world_size / len(keys)
        # Of 398 keys 200 are different; the most frequent 2 of these come 199 times and once.
        assert table["unique_ratio"] == table["hottest_share"] == 200 / 398
        assert found["tables"] == ranks[0]["tables"]
        assert "needs a model with hash tables" in found["without"]
        assert "not a directory" in found["unwritable"]
        assert world_size == 1 or found["unwritable"].startswith("RuntimeError: rank 0: ")
    head, line = ranks[0]["printed"].splitlines()
    assert head.endswith("unique  hottest 1 %") and line.split()[0] == "inside"
    assert line.split()[1] == str(len(keys)) and line.split()[-2:] == ["0.50", "0.50"]
    assert all(rank["printed"] == "" for rank in ranks[1:])


def test_lists_of_models_and_what_is_no_model(sok):
    first, second = (sok.HashEmbedding(2, name=name) for name in ("first", "second"))
    model = tf.keras.Sequential([tf.keras.Input([], dtype="int64"), second])
    first(tf.constant([1, 2])), model(tf.constant([1]), training=True)
    listed = [first, (model, tf.Variable(1.0)), first.trainable_variables]
    found = sok.report(listed, print_table=False)
    assert [(table.name, table.keys) for table in found] == [("first", 2), ("second", 1)]
    for wrong in (None, {"model": model}, [first, "second"]):
        with pytest.raises(TypeError, match="`model` must be a Keras model.* Received: model="):
            sok.report(wrong)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_metrics_are_written_by_rank_0(on_processes, world_size):
    ranks = on_processes(world_size, reported, world_size)
    (file,) = pathlib.Path(ranks[0]["folder"], "tables").iterdir()  # rank 0 alone writes
    written = [
        (value.tag, event.step, tf.make_ndarray(value.tensor).item())
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]

    def values(name, table="inside"):
        return [(step, value) for tag, step, value in written if tag == f"{table}/{name}"]

    # 6 steps of 2 samples, then the epoch's end; key k comes in step k // 2.
    assert values("keys") == [(2, 4.0), (4, 8.0), (6, 12.0), (6, 12.0)]
    assert values("new_keys") == [(2, 4.0), (4, 4.0), (6, 4.0), (6, 0.0)]
    assert values("unique_ratio") == [(2, 1.0), (4, 1.0), (6, 1.0)]
    assert values("hottest_share") == [(2, 0.5), (4, 0.5), (6, 0.5)]
    assert len(values(f"keys_rank_{world_size - 1}")) == 4
    if world_size > 1:
        times = values("ms_per_step", "exchange")
        assert [step for step, _ in times] == [2, 4, 6] and all(ms > 0 for _, ms in times)
    assert [step for step, _ in values("bytes")] == [6] and values("load")[0][1] > 0


def test_tensorboard_takes_the_metrics_for_scalars(on_processes):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (found,) = on_processes(1, reported, 1)
    events = accumulator.EventAccumulator(found["folder"] + "/tables")
    events.Reload()
    assert "inside/keys" in events.PluginTagToContent("scalars")
