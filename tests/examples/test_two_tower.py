"""`examples/two_tower.py` on 2 ranks: it recommends better than by chance."""

import re

import pytest


@pytest.mark.ranks
def test_two_ranks_recommend(on_two_ranks):
    first, second = on_two_ranks("two_tower")
    found = re.search(r"recall at 50 +(\S+) +\(by chance (\S+)\)", first)
    recall, chance = map(float, found.groups())
    assert recall > 3 * chance
    assert "recall" not in second
