"""What `sok.report` prints and `TableMetrics` writes, on one rank and on two."""

import pathlib

import pytest

from tests.checks import inspection

pytestmark = pytest.mark.keras
WORLDS = [1, pytest.param(2, marks=pytest.mark.ranks)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_report_counts_all_ranks(rank_results, world_size):
    ranks = rank_results(world_size, "inspection.reported")
    for found in ranks:
        (table,) = found["tables"]
        keys = set(inspection.SKEWED.tolist())
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
    import tensorflow as tf

    first, second = (sok.HashEmbedding(2, name=name) for name in ("first", "second"))
    model = tf.keras.Sequential([tf.keras.Input([], dtype="int64"), second])
    first(tf.constant([1, 2])), model(tf.constant([1]), training=True)
    listed = [first, (model, tf.Variable(1.0)), first.trainable_variables]
    found = sok.report(listed, print_table=False)
    assert [(table.name, table.keys) for table in found] == [("first", 2), ("second", 1)]
    for wrong in (None, {"model": model}, [first, "second"]):
        with pytest.raises(TypeError, match="`model` must be a Keras model.* Received: model="):
            sok.report(wrong)


@pytest.mark.parametrize("world_size", WORLDS)
def test_metrics_are_written_by_rank_0(rank_results, world_size):
    import tensorflow as tf

    ranks = rank_results(world_size, "inspection.reported")
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


def test_tensorboard_takes_the_metrics_for_scalars(rank_results):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (found,) = rank_results(1, "inspection.reported")
    events = accumulator.EventAccumulator(found["folder"] + "/tables")
    events.Reload()
    assert "inside/keys" in events.PluginTagToContent("scalars")
