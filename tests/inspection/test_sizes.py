"""What `sok.report` prints and `TableMetrics` writes, and estimates against what tables take."""

import contextlib
import io
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from benchmarks import workloads
from sok_like.optimizers import deeprec
from sok_like.runtime.native import libraries

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


@pytest.mark.keras
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


@pytest.mark.keras
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


# ---- estimates ----


def taken(keys, dim, rule, options=None, batch=65_536):
    """Bytes of a table with its slot rows, after one update of all keys."""
    core = libraries.core()
    table = core.Table("estimated", dim)
    for at in range(0, len(keys), batch):
        part = keys[at : at + batch]
        table.find_or_insert(part)
        if rule:
            grads = np.zeros([len(part), dim], np.float32)
            step = 1 + at // batch
            core.apply_gradients(table, rule, 0.1, step, part, grads, **(options or {}))
    return table.stats()


def close(found, estimated):
    assert estimated == pytest.approx(found, rel=0.1)


RULES = (None, "sgd", "adagrad", "ftrl", "adam", "lazy_adam", "momentum")
RULES += ("adagrad_decay", "rmsprop")  # of DeepRec


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim, num_keys", [(16, 300_000), (8, 120_000)])
def test_each_rule(sok, rule, dim, num_keys):
    momentum = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer, options = (momentum, {"momentum": 0.9}) if rule == "momentum" else (rule, {})
    stats = taken(workloads.mixed(np.arange(num_keys)), dim, rule, options)
    estimated = sok.estimate_memory(num_keys, dim, optimizer)
    close(stats["bytes"], estimated.bytes)
    close(stats["index_bytes"], estimated.index_bytes)


def test_slot_variables_of_all_rules(sok):
    """Derived ones included: a row that moves outside of the batch says which steps it owes."""
    core = libraries.core()
    assert core.slot_widths("sgd", 8) == {}
    assert core.slot_widths("sgd", 8, weight_decay=0.1) == {"last_step": 1}
    assert core.slot_widths("rowwise_adagrad", 8) == {"accumulator": 1}
    adam = {"momentum": 8, "velocity": 8}
    assert core.slot_widths("lazy_adam", 8) == adam
    widths = {**adam, "velocity_hat": 8, "last_step": 1}
    assert core.slot_widths("adam", 8, amsgrad=True) == widths
    for rule in ("adagrad_decay", "ftrl", "rmsprop"):
        assert sum(core.slot_widths(rule, 8).values()) == 16
    with pytest.raises(ValueError, match="must be one of sgd"):
        core.slot_widths("x", 8)


def test_ranks_records_and_optimizers(sok):
    whole = sok.estimate_memory(10**7, 16, "adam")
    assert whole.index_bytes / 1e7 == pytest.approx(26.8, rel=0.1)  # measured: docs/benchmarks.md
    assert whole.row_bytes / 1e7 == pytest.approx(208, rel=0.01)
    half = sok.estimate_memory(10**7, 16, "adam", world_size=2)
    assert half.bytes == pytest.approx(whole.bytes / 2, rel=0.1)
    assert sok.estimate_memory(100, 4, "sgd", keeps_records=True).record_bytes == 2400
    changes = sok.estimate_memory(1000, 4, "sgd", touched_keys=100)
    assert changes.change_bytes == 4000 + 8 * 128 and sok.estimate_memory(9, 4).change_bytes == 0
    assert changes.bytes - changes.change_bytes == sok.estimate_memory(1000, 4, "sgd").bytes
    adam = tf.keras.optimizers.Adam(0.1)
    lazy = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1), lazy=True)
    rules = {
        **{adam: "adam", sok.OptimizerWrapper(adam): "adam", lazy: "lazy_adam"},
        deeprec.AdagradDecayOptimizer(0.1, 0): "adagrad_decay",
        deeprec.AdamAsyncOptimizer(0.1, apply_sparse_rmsprop=True): "rmsprop",
        deeprec.AdamAsyncOptimizer(0.1): "lazy_adam",
    }
    for optimizer, rule in rules.items():
        of_rule = sok.estimate_memory(10**6, 16, rule)
        assert sok.estimate_memory(10**6, 16, optimizer) == of_rule
    assert sok.estimate_memory(0, 4).bytes == 0
    for *arguments, words in ((-1, 4, "num_keys"), (5, 0, "embedding_dim"), (5, 4, "x", "'x'")):
        with pytest.raises(ValueError, match=words):
            sok.estimate_memory(*arguments)
