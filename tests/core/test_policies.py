"""Admission and eviction against a model in dicts, over many random steps."""

import os

import numpy as np
import pytest

from sok_like import _core
from tests.core.policy_model import Full, Model

DIM = 2
STEPS = 100_000 if os.environ.get("SLOW") else 12_000
INITIAL = np.random.default_rng(1).normal(size=(7, DIM)).astype(np.float32)
EXTREMES = [-1, -(2**63), 2**63 - 1, 0]
KEYS = np.array([*EXTREMES, *range(100, 136)], np.int64)

OCCURRENCES = {"filter_freq": 5, "no_permission": 0.25, "count_occurrences": True}
STEPS_TO_LIVE = {"steps_to_live": 20, "evicted_buffer": 5}
POLICIES = {
    "filter": (0, {"filter_freq": 3, "no_permission": -2.5}),
    "bounded": (0, {"filter_freq": 4, "max_waiting": 8}),
    "steps": (0, STEPS_TO_LIVE),
    "weight": (0, {"l2_threshold": 0.7, "evicted_buffer": 1000}),
    "lru": (12, {"score": "lru", "evicted_buffer": 3}),
    "lfu": (12, {"score": "lfu"}),
    "custom": (12, {"score": "custom", "evicted_buffer": 30}),
    "occurrences": (0, OCCURRENCES),
    "occurrences_lfu": (12, {**OCCURRENCES, "filter_freq": 3, "score": "lfu"}),
    "all": (12, {**STEPS_TO_LIVE, "filter_freq": 2, "l2_threshold": 0.3, "score": "lfu"}),
}


def make(core, capacity=0, policy=None, **kwargs):
    initial = {"initializer": "default_rows", "default_rows": INITIAL}
    return core.Table("t", DIM, max_capacity=capacity, policy=policy or {}, **initial, **kwargs)


class Runner:
    """One table and its model, which get the same random calls."""

    def __init__(self, core, name):
        capacity, policy = POLICIES[name]
        self.table, self.model = make(core, capacity, policy), Model(INITIAL, capacity, policy)
        self.rng = np.random.default_rng(len(name))
        # Some keys are common, some rare.
        self.weights = 1.0 / np.arange(1, len(KEYS) + 1)
        self.weights /= self.weights.sum()
        self.failures = 0

    def batch(self, most=6):
        return self.rng.choice(KEYS, self.rng.integers(0, most), p=self.weights)

    def lookup(self):
        keys = self.batch(18 if self.rng.random() < 0.05 else 6)
        before = set(self.model.rows)
        try:
            expected = self.model.lookup(keys.tolist())
        except Full:
            self.failures += 1
            with pytest.raises(ValueError, match="max_capacity=12"):
                self.table.find_or_insert(keys)
            return
        rows, inserted = self.table.find_or_insert(keys)
        assert (rows == expected.reshape(rows.shape)).all()
        new = set(keys[inserted].tolist())
        assert new == (set(keys.tolist()) & self.model.rows.keys()) - before
        assert inserted.sum() == len(new)

    def find(self):
        keys = self.batch()
        rows, found = self.table.find(keys)
        assert found.tolist() == [k in self.model.rows for k in keys.tolist()]
        for key, row in zip(keys.tolist(), rows, strict=True):
            assert (row == self.model.read(key)).all()

    def assign(self):
        keys = self.batch(40 if self.rng.random() < 0.4 else 4)  # or more than have room
        rows = self.rng.normal(size=(len(keys), DIM)).astype(np.float32)
        self.model.assign(keys.tolist(), rows)
        self.table.assign(keys, rows)

    def erase(self):
        keys = self.batch(3)
        assert self.table.erase(keys) == self.model.erase(keys.tolist())

    def evict(self):
        assert self.table.evict() == self.model.evict()

    def scores(self):
        keys = np.unique(self.batch())
        scores = self.rng.integers(-5, 6, len(keys))
        if self.model.score == "custom":
            self.model.assign_scores(keys.tolist(), scores.tolist())
            present = len(set(keys.tolist()) & self.model.rows.keys())
            assert self.table.assign_scores(keys, scores) == present

    def set_step(self):
        step = max(0, self.model.step + int(self.rng.integers(-3, 8)))
        self.model.step = step
        self.table.set_step(step)

    def pop(self):
        popped, expected = self.table.pop_evicted(), self.model.pop()
        assert popped["keys"].tolist() == [key for key, *_ in expected]
        assert popped["frequencies"].tolist() == [f for _, _, f, _ in expected]
        assert popped["last_steps"].tolist() == [s for _, _, _, s in expected]
        if expected:
            assert (popped["rows"] == np.array([row for _, row, *_ in expected])).all()

    def run(self, steps, compare_every=500):
        calls = [
            *[(self.find, 0.04), (self.assign, 0.02), (self.erase, 0.01), (self.evict, 0.01)],
            *[(self.scores, 0.05), (self.set_step, 0.003), (self.pop, 0.004)],
        ]
        calls.append((self.lookup, 1 - sum(p for _, p in calls)))
        order = self.rng.choice(len(calls), steps, p=[p for _, p in calls])
        for number, call in enumerate(order.tolist()):
            calls[call][0]()
            if number % compare_every == 0:
                self.compare()
        self.compare()

    def compare(self):
        keys, rows, _ = self.table.export()
        assert set(keys.tolist()) == self.model.rows.keys()
        for key, row in zip(keys.tolist(), rows, strict=True):
            assert (row == self.model.rows[key]).all()
        found = zip(*(array.tolist() for array in self.table.key_statistics(KEYS)), strict=True)
        assert list(found) == [self.model.seen(key) for key in KEYS.tolist()]
        check_counts(self.table.statistics(), self.model)


def check_counts(statistics, model):
    for name, count in model.counts.items():
        assert statistics[name] == count, name
    assert statistics["size"] == len(model.rows)
    assert statistics["step"] == model.step
    assert statistics["waiting"] == len(model.waiting)
    assert statistics["buffered"] == len(model.buffer)
    add_up(statistics)


def add_up(statistics):
    """Every key is counted."""
    s = statistics
    assert s["seen"] == s["found"] + s["admitted"] + s["refused"]
    assert s["size"] == s["admitted"] + s["written"] - s["evicted"] - s["erased"]
    assert s["evicted"] == s["popped"] + s["buffered"] + s["dropped"]


def run(core, name, steps, compare_every):
    runner = Runner(core, name)
    runner.run(steps, compare_every)
    counts = runner.model.counts
    assert counts["admitted"] > 10
    assert bool(counts["refused"]) == ("filter_freq" in POLICIES[name][1])
    assert bool(counts["evicted"]) == (name not in ("filter", "bounded", "occurrences"))
    assert bool(counts["forgotten"]) == (name == "bounded")
    return runner


@pytest.mark.parametrize("name", POLICIES)
def test_against_the_model(core, name):
    if core is not _core:
        if POLICIES[name][1].get("count_occurrences"):
            with pytest.raises(ValueError, match="`count` must be 'lookups' for a table in device"):
                make(core, *POLICIES[name])
            return
        run(core, name, 250, compare_every=50)
        return
    core.set_num_threads(1)
    runner = run(core, name, STEPS if name == "all" else STEPS // 4, compare_every=500)
    if name not in ("all", "occurrences_lfu"):  # whose filter lets few in at once
        assert bool(runner.failures) == (runner.model.capacity > 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_against_the_model_for_longer(core, name):
    if core is _core or POLICIES[name][1].get("count_occurrences"):
        pytest.skip("of a device")
    run(core, name, 25_000, compare_every=100)
