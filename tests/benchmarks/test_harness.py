"""The benchmarks' harness and data, with given clocks and numbers."""

import json

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import harness, scale, workloads
from benchmarks.harness import Contender, Match


class Clock:
    """A clock that moves only when contenders add time."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, *seconds):
        def call(i):
            self.now += seconds[i % len(seconds)]

        return call


def test_turns_alternate_and_every_call_has_its_own_number():
    clock, seen = Clock(), []
    contenders = {
        name: Contender(lambda i, name=name: seen.append((name, i)), warm_up=1) for name in "ab"
    }
    times = harness.interleave(contenders, rounds=2, burst=2, clock=clock)
    assert seen == [
        *[("a", 0), ("b", 0)],
        *[("a", 1), ("a", 2), ("b", 1), ("b", 2)],
        *[("b", 3), ("b", 4), ("a", 3), ("a", 4)],
    ]
    assert {name: len(t) for name, t in times.items()} == {"a": 2, "b": 2}


def test_a_turn_is_the_median_of_its_burst_in_milliseconds():
    clock = Clock()
    contender = Contender(clock.takes(0.001, 0.5, 0.002), prepare=clock.takes(7.0), warm_up=0)
    times = harness.interleave({"a": contender}, rounds=1, burst=3, clock=clock)
    assert times["a"] == [pytest.approx(2.0)]  # without preparation


def test_ratio_is_the_median_of_the_rounds_ratios():
    # The ratio of the medians would be 4 / 4: here the machine slowed down in the second round.
    times = {"ours": [1.0, 40.0, 4.0], "peer": [2.0, 80.0, 4.0]}
    (result,) = harness.judge(times, [Match("step", "ours", "peer", 0.6)])
    assert result.ratio == pytest.approx(0.5)
    assert (result.ours_ms, result.peer_ms) == (4.0, 4.0)
    assert (result.ratio_low, result.ratio_high) == (pytest.approx(0.5), pytest.approx(0.75))
    assert result.met is True


@pytest.mark.parametrize("target, met", [(0.5, True), (0.49, False), (None, None)])
def test_target_is_met_up_to_and_including_itself(target, met):
    (result,) = harness.judge({"a": [1.0], "b": [2.0]}, [Match("m", "a", "b", target)])
    assert result.met is met


def test_table_lines_up_and_names_what_is_against_what():
    times = {"ours": [1.0], "ours, other": [6.0], "peer": [4.0]}
    results = harness.judge(
        times, [Match("step", "ours", "peer", 0.3), Match("step", "ours, other", "peer", 1.0)]
    )
    lines = harness.table(results).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][1:] == ["ours ms", "theirs ms", "ratio", "target", "met"]
    assert cells[2] == ["step / peer", "1.00", "4.00", "0.250 (0.250-0.250)", "<= 0.3", "yes"]
    assert cells[3][0] == "step / peer (ours: ours, other)"
    assert cells[3][4:] == ["<= 1", "NO"]
    assert json.loads(json.dumps(harness.machine(3)))["threads"] == 3


def test_zipf_has_the_laws_frequencies():
    rng = np.random.default_rng(0)
    drawn = workloads.zipf(rng, 1.05, 1000, 400_000)
    assert drawn.min() >= 0 and drawn.max() < 1000
    weights = np.arange(1, 1001) ** -1.05
    expected = weights / weights.sum()
    counts = np.bincount(drawn, minlength=1000) / drawn.size
    for k in (0, 1, 9, 99):
        # Five standard deviations of a binomial.
        bound = 5 * np.sqrt(expected[k] / drawn.size)
        assert abs(counts[k] - expected[k]) < bound


def test_mixed_keys_are_one_to_one_and_spread():
    keys = workloads.mixed(np.arange(100_000))
    assert keys.dtype == np.int64 and len(np.unique(keys)) == 100_000
    ones = np.unpackbits(keys.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.005


def test_w1_as_described():
    data = workloads.w1(batches=2)
    assert data.positions.shape == data.keys.shape == (2, 8192, 26)
    assert (data.num_rows, data.dim) == (2_600_000, 16)
    features = data.positions // 100_000
    assert (features == np.arange(26)).all()
    np.testing.assert_array_equal(data.keys, workloads.mixed(data.positions))
    # Zipf over 100k: a batch repeats its keys, yet most of the rows seen are rare ones.
    unique = len(np.unique(data.positions[0]))
    assert 0.2 * data.positions[0].size < unique < 0.6 * data.positions[0].size


def test_the_other_workloads_as_described():
    data = workloads.w2(batches=2)
    assert (len(data.tables), data.batch, data.num_rows, data.dim) == (4, 4096, 1_000_000, 64)
    for table in data.tables:
        for positions, keys, splits in zip(*table, strict=True):
            hotness = np.diff(splits)
            assert splits.shape == (4097,) and splits[0] == 0 and splits[-1] == len(positions)
            assert (hotness.min(), hotness.max()) == (1, 20)
            assert positions.min() >= 0 and positions.max() < 1_000_000
            np.testing.assert_array_equal(keys, workloads.mixed(positions))
    data = workloads.w3()
    assert len(np.unique(data.keys)) == 2_000_000 and (data.batch, data.dim) == (65_536, 16)
    (picks,) = workloads.w4(batches=1)
    assert picks.shape == (65_536,) and picks.min() >= 0 and picks.max() < 2_000_000


def test_command_line_knows_what_there_is():
    args = command.parse(["--only", "w1", "--quick", "--threads", "2"])
    assert (args.only, args.quick, args.threads) == ("w1", True, 2)
    assert {name.split("-")[0] for name in command.suites()} == {
        *("w1", "w2", "w3", "w4", "strings", "groups", "served", "predict"),
    }


@pytest.mark.parametrize(
    "text, count", [("1M", 10**6), ("100m", 10**8), ("250", 250), ("3K", 3000)]
)
def test_counts_of_keys(text, count):
    assert scale.parse_count(text) == count


def test_scale_counts_what_lies_beside_the_rows():
    result = scale.measure(200_000)
    assert result["keys"] == 200_000 and result["inserts_per_second"] > 0
    # 12.8 bytes per slot, at most 3/4 full, and at least that after a doubling.
    assert 12.8 / (3 / 4) - 1 < result["bytes_beside_last"] < 12.8 / (3 / 8) + 2
    assert result["table_gib"] * 2**30 > 200_000 * (64 + 13)
