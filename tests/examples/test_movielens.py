"""`examples/movielens.py` on 2 ranks, and beside stock embeddings behind a vocabulary."""

import re

import pytest

from tests import forks


def error_of(output):
    return float(re.search(r"test RMSE +([\d.]+)", output)[1])


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_learn_and_name_films(on_two_ranks):
    first, second = on_two_ranks("movielens")
    assert error_of(first) < 0.95  # always the mean of all ratings: 1.126
    assert re.search(r"films like +Star Wars: \w+", first)
    assert "RMSE" not in second


@pytest.mark.slow
@pytest.mark.ranks
def test_as_good_as_stock_embeddings(on_two_ranks):
    spread = error_of(on_two_ranks("movielens", "--epochs", "8")[0])
    dense = forks.run(forks.ROOT / "examples" / "movielens.py", "--dense")
    assert dense.returncode == 0, dense.stderr[-4000:]
    assert abs(spread - error_of(dense.stdout)) < 0.005
