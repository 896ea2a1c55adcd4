"""A hash table, a dense table over ranks and replicated weights under one optimizer."""

import numpy as np
import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.keras]


def test_each_kind_moves_by_its_own_gradient(rank_results):
    results = rank_results(2, "optimizers.all_kinds")
    # Loss on a rank: 2 x the sum over its rows; over two ranks a row's mean gradient is 1.
    for result in results:
        np.testing.assert_allclose(result["hashed"], -np.ones([4, 2]), rtol=1e-6)
        for table, factor in zip(result["dense"], (1.0, 3.0), strict=True):
            np.testing.assert_allclose(table, np.full([4, 2], -factor), rtol=1e-6)
        np.testing.assert_allclose(result["weights"], [-1.5], rtol=1e-6)
