"""What `sok.report` prints and `TableMetrics` writes, on one rank and on two."""

import pathlib

import pytest

from tests.checks import inside

pytestmark = pytest.mark.keras
WORLDS = [1, pytest.param(2, marks=pytest.mark.ranks)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_report_counts_all_ranks(rank_results, world_size):
    ranks = rank_results(world_size, "inside.reported")
    for found in ranks:
        (table,) = found["tables"]
        keys = set(inside.SKEWED.tolist())
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
    head, line = ranks[0]["printed"].splitlines()
    assert head.endswith("unique  hottest 1 %") and line.split()[0] == "inside"
    assert line.split()[1] == str(len(keys)) and line.split()[-2:] == ["0.50", "0.50"]
    assert all(rank["printed"] == "" for rank in ranks[1:])


@pytest.mark.parametrize("world_size", WORLDS)
def test_tensorboard_reads_the_metrics(rank_results, world_size):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ranks = rank_results(world_size, "inside.reported")
    folder = pathlib.Path(ranks[0]["folder"], "tables")
    assert len(list(folder.iterdir())) == 1  # rank 0 alone writes
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()

    def values(name, table="inside"):
        import tensorflow as tf

        found = events.Tensors(f"{table}/{name}")
        return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in found]

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
