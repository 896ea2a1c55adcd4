"""The model of a step, against numbers computed by hand, and the steps that are measured."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.predict import steps
from benchmarks.predict.model import Machine, Workload, counts, predict

# One unit of each constant is one second, so that a prediction shows what was counted.
ONES = Machine(4, **dict.fromkeys([f.name for f in dataclasses.fields(Machine)][1:], 1.0))
WORKLOAD = Workload(tables=2, batch=4096, dim=8, hotness=2, distinct=0.5)


def test_one_rank_exchanges_nothing():
    # 16,384 keys of which 8,192 differ, on 4 threads. A row of 8 floats is copied to the batch, has
    # a gradient, and is updated with 8 more of Adagrad: 4 * 8 floats.
    found = predict(WORKLOAD, ONES, 1)
    assert found == (1 + 2, (16_384 + 8_192 + 8_192 * 32) / 4, 0, 0, 0, 0)
    assert found.total == sum(found)
    assert found.largest == "tables"


def test_two_hosts():
    # 8 ranks, 4 per host with 4 cores: one thread per rank. A rank's messages hold 8,192 keys of 8
    # bytes, and twice as many rows of 32 bytes; 4 of 8 ranks are on the other host.
    sent = 8_192 * (8 + 2 * 32)
    found = predict(WORKLOAD, ONES, 8, ranks_per_host=4)
    tables = 16_384 + 8_192 + 8_192 * 32
    assert found == (3, tables, 3, 8_192 + sent, 3 * 4, 4 * sent * 4 / 8)


def test_more_ranks_than_cores_take_turns():
    two, four = (predict(WORKLOAD, dataclasses.replace(ONES, cores=2), n) for n in (2, 4))
    assert four == tuple(2 * seconds for seconds in two)


@pytest.mark.parametrize("batch, threads", [(100, 1), (1536, 3), (100_000, 4)])
def test_a_thread_gets_1024_keys_at_least(batch, threads):
    workload = Workload(tables=2, batch=batch, dim=8)
    assert counts(workload, 4, 1)["key"] == pytest.approx(2 * batch / threads)


def test_many_ranks_wait_for_messages():
    machine = Machine(4, **{**dict.fromkeys(ONES.constants(), 1e-9), "message": 20e-6})
    few, many = (predict(WORKLOAD, machine, n, 8) for n in (16, 1024))
    assert few.largest != "messages" and many.largest == "messages"
    assert many.messages == pytest.approx(3 * (1024 - 8) * 20e-6)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: Workload(0, 1, 1), "`tables` must be a positive integer. Received: tables=0"),
        (lambda: Workload(1, 2.5, 1), "`batch` must be a positive integer. Received: batch=2.5"),
        (lambda: Workload(1, 1, 1, slots=-1), "`slots` must be an integer >= 0"),
        (lambda: Workload(1, 1, 1, distinct=0), r"`distinct` must be in \(0, 1\]"),
        (lambda: Workload(1, 1, 1, distinct=float("nan")), "Received: distinct=nan"),
        (lambda: dataclasses.replace(ONES, cores=0), "`cores` must be a positive integer"),
        (lambda: dataclasses.replace(ONES, key=-1e-9), "`key` must be a finite number"),
        (lambda: dataclasses.replace(ONES, key="fast"), "Received: key='fast'"),
        (lambda: dataclasses.replace(ONES, network=float("inf")), "Received: network=inf"),
        (lambda: predict(WORKLOAD, ONES, 0), "`ranks` must be a positive integer"),
        (lambda: predict(WORKLOAD, ONES, 2, 0), "`ranks_per_host` must be a positive integer"),
    ],
)
def test_errors(call, error):
    with pytest.raises(ValueError, match=error):
        call()


@pytest.fixture
def small(monkeypatch, sok):
    monkeypatch.setattr(steps, "_NUM_ROWS", 600)
    monkeypatch.setattr(steps, "_SECONDS", 0.0)


def test_batches_have_the_asked_number_of_different_keys():
    workload = Workload(tables=3, batch=20, dim=4, hotness=2, distinct=0.25)
    batches = [keys.numpy() for keys in steps.batches(workload, 200, rank=0)]
    assert all(keys.shape == (3, 40) for keys in batches)
    assert {len(np.unique(keys[t])) for keys in batches for t in range(3)} == {10}
    other = next(steps.batches(workload, 200, rank=1)).numpy()
    assert (other != batches[0]).any()


def test_a_step_updates_the_keys_of_all_tables(small):
    workload = Workload(tables=3, batch=20, dim=4, hotness=2, distinct=0.25, slots=0)
    tables = steps.Tables(workload)
    assert [table.stats().size for table in tables.tables] == [200] * 3  # no key is new below
    keys = next(steps.batches(workload, tables.num_rows, rank=0))
    before = [table.sparse_read(k) for table, k in zip(tables.tables, keys, strict=True)]
    tables.step(keys, tf.range(0, 41, 2, tf.int64))
    after = [table.sparse_read(k) for table, k in zip(tables.tables, keys, strict=True)]
    for old, new, of_table in zip(before, after, keys.numpy(), strict=True):
        counts = (of_table[:, np.newaxis] == of_table).sum(1)
        expected = old - 0.01 * counts[:, np.newaxis]  # SGD; each key's gradient is 1
        np.testing.assert_allclose(new, expected, rtol=1e-5)
    assert [table.stats().size for table in tables.tables] == [200] * 3


@pytest.mark.parametrize("slots, floats", [(0, 4), (1, 8), (2, 12)])
def test_optimizers_have_the_asked_slot_rows(small, slots, floats):
    workload = Workload(tables=1, batch=20, dim=4, slots=slots)
    (table,) = steps.Tables(workload).tables
    assert table.stats().arena_bytes >= 600 * floats * 4


def test_prints_one_time_per_workload(small, capsys):
    workloads = [{"tables": t, "batch": 8, "dim": 4} for t in (1, 2, 2)]
    steps.main(json.dumps(workloads))
    told = json.loads(capsys.readouterr().out)
    assert len(told["seconds"]) == 3 and min(told["seconds"]) > 0
    assert told["cores"] >= 1
    with pytest.raises(ValueError, match="`slots` must be 0, 1 or 2"):
        steps.main('[{"tables": 1, "batch": 8, "dim": 4, "slots": 3}]')
