"""Measured steps train the keys that they say."""

import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.predict import steps
from benchmarks.predict.model import Workload


@pytest.fixture(autouse=True)
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


def test_a_step_updates_the_keys_of_all_tables():
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
def test_optimizers_have_the_asked_slot_rows(slots, floats):
    workload = Workload(tables=1, batch=20, dim=4, slots=slots)
    (table,) = steps.Tables(workload).tables
    assert table.stats().arena_bytes >= 600 * floats * 4


def test_prints_one_time_per_workload(capsys):
    workloads = [{"tables": t, "batch": 8, "dim": 4} for t in (1, 2, 2)]
    steps.main(json.dumps(workloads))
    told = json.loads(capsys.readouterr().out)
    assert len(told["seconds"]) == 3 and min(told["seconds"]) > 0
    assert told["cores"] >= 1


def test_three_slot_rows_have_no_optimizer():
    with pytest.raises(ValueError, match="`slots` must be 0, 1 or 2"):
        steps.main('[{"tables": 1, "batch": 8, "dim": 4, "slots": 3}]')
