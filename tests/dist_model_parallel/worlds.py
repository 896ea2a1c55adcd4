"""The numbers of ranks of this folder's tests."""

import pytest

# 3 ranks only train, but with SLOW=1, as `make test-all` sets it.
MARKS = {1: [], 2: [pytest.mark.ranks], 3: [pytest.mark.ranks, pytest.mark.slow]}
WORLDS = [pytest.param(n, marks=marks, id=f"{n}") for n, marks in MARKS.items()]
each_world = pytest.mark.parametrize("world_size", WORLDS)
