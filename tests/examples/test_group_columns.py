"""The feature column example on a part of the flights: it trains, and better than by chance."""

import re

import pytest

from tests import forks
from tests.examples.conftest import FLIGHTS


def run(*words):
    done = forks.run(forks.ROOT / "examples" / "group_columns.py", *FLIGHTS, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return auc(done.stdout)


def auc(output):
    return float(re.search(r"test AUC +(\S+)", output)[1])


@pytest.mark.slow
def test_ftrl_and_adagrad_learn():
    # 0.5 is chance. On so few flights most dates and crosses are seen a few times only.
    assert run() > 0.65


@pytest.mark.ranks
def test_two_ranks_train_the_same_model(on_two_ranks):
    alone = run("--optimizer", "adagrad")
    together = auc(on_two_ranks("group_columns")[0])
    assert alone > 0.65
    # Initial rows and batches are the same; only the rounding of sums differs.
    assert abs(alone - together) < 0.005
