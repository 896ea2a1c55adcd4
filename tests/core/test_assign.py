"""Assignments between optimizer steps. The kinds of batches are in cpp/tests/assign_test.cc."""

import numpy as np
import pytest

from tests.core.oracles import Pair
from tests.core.test_optimizers import CASES, TOLERANCE


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_assign_between_steps_follows_the_dense_table(core, case, use_hashtable):
    """Weights are as assigned at that step; moments stay, and later steps go on from there."""
    rule, options = CASES[case]
    num_rows, dim = 5000, 5
    table_options = {"use_hashtable": use_hashtable, "max_capacity": num_rows}
    pair = Pair(core, rule, {**options, "weight_decay": 0.02}, dim, num_rows, **table_options)
    rng = np.random.default_rng(4)
    for step in range(1, 26):
        # Keys with gradients become rows early, the others are new when they are assigned.
        keys = rng.integers(0, 300, 40)
        pair.step(step, 0.03, keys, rng.normal(size=(40, dim)).astype(np.float32))
        if step % 5 == 0:
            # Large and nearly all new; then a mixture of present, new and repeated keys.
            if step == 15:
                keys = rng.permutation(np.r_[np.arange(1000, 2500), 1000:1200, 0:3])
            else:
                keys = rng.integers(0, 600 + 100 * step, 1500)
            rows = rng.standard_normal((keys.size, dim)).astype(np.float32)
            pair.table.assign(keys, rows)
            last = dict(zip(keys.tolist(), rows, strict=True))
            pair.oracle.w[list(last)] = list(last.values())
            np.testing.assert_array_equal(
                pair.table.find(keys)[0], [last[k] for k in keys.tolist()]
            )
    tolerance = TOLERANCE.get(case, 2e-5)
    pair.compare(tolerance)
    keys, rows, _ = pair.table.export()
    np.testing.assert_allclose(rows, pair.oracle.w[keys], atol=tolerance, rtol=0)
