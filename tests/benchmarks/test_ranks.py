"""The benchmark of one rank against two runs, and leaves no process behind."""

import pytest

from benchmarks import ranks


@pytest.mark.slow
@pytest.mark.ranks
def test_jobs_take_turns_and_end(monkeypatch):
    started = []

    class Job(ranks.Job):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr(ranks, "Job", Job)
    results = ranks.contest(2, rounds=1, quick=True)
    names = ["layer", "ragged group", "sparse group", *ranks.GROUPS]
    assert [r.name.split(", ")[1] for r in results] == names
    assert all(r.ours_ms > 0 and r.peer_ms > 0 for r in results)
    assert [job._process.returncode for job in started] == [0, 0]
