"""The short form of `make soak`: counts add up over evictions, dumps and restores."""

import numpy as np
import pytest

from benchmarks import soak


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
