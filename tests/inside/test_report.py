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
        assert table["name"] == "inside" and table["keys"] == len(inside.KEYS)
        assert table["keys_by_rank"] == tuple(
            sum(key % world_size == rank for key in inside.KEYS) for rank in range(world_size)
        )
        assert table["bytes"] == sum(table["bytes_by_rank"]) > 0 and 0 < table["load"] <= 1
        assert table["imbalance"] == max(table["keys_by_rank"]) * world_size / len(inside.KEYS)
        assert found["tables"] == ranks[0]["tables"]
        assert "needs a model with hash tables" in found["without"]
    assert ranks[0]["printed"].splitlines()[1].split()[:2] == ["inside", str(len(inside.KEYS))]
    assert all(rank["printed"] == "" for rank in ranks[1:])


@pytest.mark.parametrize("world_size", WORLDS)
def test_tensorboard_reads_the_metrics(rank_results, world_size):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ranks = rank_results(world_size, "inside.reported")
    folder = pathlib.Path(ranks[0]["folder"], "tables")
    assert len(list(folder.iterdir())) == 1  # rank 0 alone writes
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()

    def values(name):
        import tensorflow as tf

        found = events.Tensors(f"inside/{name}")
        return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in found]

    # 6 steps of 2 samples, then the epoch's end; key k comes in step k // 2.
    assert values("keys") == [(2, 4.0), (4, 8.0), (6, 12.0), (6, 12.0)]
    assert values("new_keys") == [(2, 4.0), (4, 4.0), (6, 4.0), (6, 0.0)]
    assert len(values(f"keys_rank_{world_size - 1}")) == 4
    assert [step for step, _ in values("bytes")] == [6] and values("load")[0][1] > 0
