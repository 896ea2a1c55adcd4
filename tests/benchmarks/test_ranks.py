"""The benchmarks of ranks leave no process behind; the short form of `make soak`."""

import numpy as np
import pytest

from benchmarks import engines, ranks, soak


@pytest.fixture
def started(monkeypatch):
    """The jobs of a test."""
    jobs = []

    class Job(ranks.Job):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            jobs.append(self)

    monkeypatch.setattr(ranks, "Job", Job)
    return jobs


@pytest.mark.slow
@pytest.mark.ranks
def test_one_rank_and_two_take_turns(started):
    results = ranks.contest(2, rounds=1, quick=True)
    names = ["layer", "ragged group", "sparse group", *ranks.GROUPS]
    assert [r.name.split(", ")[1] for r in results] == names
    assert all(r.ours_ms > 0 and r.peer_ms > 0 for r in results)
    assert [job._process.returncode for job in started] == [0, 0]


@pytest.mark.slow
@pytest.mark.ranks
def test_engines_take_turns(started, capsys):
    results = engines.contest(2, rounds=2, quick=True)
    others = [*engines.STEPS, engines.W1, engines.IDLE, engines.WAITING]
    assert [clock.name for clock, _ in results] == [*engines.EXCHANGES, *others]
    assert all(min(r.ours_ms, r.peer_ms) > 0 for pair in results for r in pair)
    idle = results[-2][1]
    assert idle.ours_ms < idle.peer_ms / 5
    assert all(line.count("|") == 10 for line in capsys.readouterr().out.splitlines())
    assert [job._process.returncode for job in started] == [0, 0]


def test_slopes_are_of_the_second_half():
    seconds = np.arange(100.0)
    sizes = np.where(seconds < 50, 7 * seconds, 500 + seconds / 20)
    assert soak.slope(list(seconds), list(sizes)) == pytest.approx(3.0)  # MiB per minute


def test_counts_add_up(sok, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "DUMP_EVERY", 5)
    monkeypatch.setattr(soak.gc, "collect", lambda: None)  # which looks at all tests' traces
    run = soak.Soak(str(tmp_path))
    for number in range(1, 46):  # with two restores
        run.run(number)
    counts = run.table.statistics()
    soak.check_counts(counts)
    assert counts.evicted > 0 and counts.size <= soak.CAPACITY
    assert list(tmp_path.glob("soak.json"))
