"""The benchmarks of ranks run, and leave no process behind."""

import pytest

from benchmarks import engines, ranks


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
