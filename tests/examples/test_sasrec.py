"""`examples/sasrec.py` on 2 ranks: it learns, and its SavedModel gives the scores of `predict`."""

import re

import pytest


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_learn_what_comes_next(on_two_ranks, tmp_path):
    first, second = on_two_ranks("sasrec", "--folder", str(tmp_path))
    assert re.search(r"served as predicted +True", first)
    assert float(re.search(r"hit rate at 10 +([\d.]+)", first)[1]) > 0.4  # at random: 0.1
    assert "hit rate" not in second
