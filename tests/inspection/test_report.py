"""What `sok.report` prints and `TableMetrics` writes, on one rank and on two."""

import contextlib
import io
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

pytestmark = pytest.mark.keras

KEYS = list(range(12))
# The last of 3 steps of 398 keys has key 0 199 times, and 199 others once.
SKEWED = np.concatenate([np.arange(796), np.zeros(199, np.int64), np.arange(800, 999)])


def reported(folder):
    """The same samples on every rank; what rank 0 prints."""
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
        (table,) = sok.report(model)
    check_table(table)
    options["callbacks"] = [sok.callbacks.TableMetrics(log_dir=__file__)]
    of_rank = "rank 0: .*" if sok.size() > 1 else ""
    with pytest.raises(Exception, match=f"(?s){of_rank}not a directory"):
        model.fit(keys, np.zeros([12, 4]), **options)
    options["callbacks"] = [metrics]
    plain = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match="needs a model with hash tables"):
        plain.fit(np.zeros([2, 1]), np.zeros([2, 1]), **options)
    return printed.getvalue()


def check_table(table):
    keys, ranks = set(SKEWED.tolist()), range(sok.size())
    assert table.name == "inside" and table.keys == len(keys)
    assert table.keys_by_rank == tuple(sum(key % len(ranks) == r for key in keys) for r in ranks)
    assert table.bytes == sum(table.bytes_by_rank) > 0 and 0 < table.load <= 1
    assert table.imbalance == max(table.keys_by_rank) * len(ranks) / len(keys)
    # Of 398 keys 200 are different; the most frequent 2 of these come 199 times and once.
    assert table.unique_ratio == table.hottest_share == 200 / 398


def check_metrics(folder, world_size):
    (file,) = (folder / "tables").iterdir()  # rank 0 alone writes
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


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_reports_and_metrics_count_all_ranks(on_processes, tmp_path, world_size):
    printed, *others = on_processes(world_size, reported, tmp_path / "metrics")
    head, line = printed.splitlines()
    assert head.endswith("unique  hottest 1 %") and line.split()[0] == "inside"
    assert line.split()[1] == str(len(set(SKEWED))) and line.split()[-2:] == ["0.50", "0.50"]
    assert set(others) <= {""}
    check_metrics(tmp_path / "metrics", world_size)
    if world_size == 1:
        check_tensorboard(tmp_path / "metrics")


def check_tensorboard(folder):
    """TensorBoard takes the metrics for scalars, where it is installed."""
    with contextlib.suppress(ModuleNotFoundError):
        from tensorboard.backend.event_processing import event_accumulator

        events = event_accumulator.EventAccumulator(str(folder / "tables"))
        events.Reload()
        assert "inside/keys" in events.PluginTagToContent("scalars")


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
