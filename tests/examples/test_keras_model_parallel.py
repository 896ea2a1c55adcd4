"""The example of Keras' ModelParallel on 2 ranks."""

import re

import pytest

pytestmark = [pytest.mark.keras(slow=True), pytest.mark.ranks]


def test_losses_agree_over_meshes_and_ranks(on_two_ranks):
    line = re.compile(r"^(\w+) on (\(\d, \d\)): losses ([\d. ]+)$", re.M)
    for output in on_two_ranks("keras_model_parallel"):
        found = {(name, shape): losses for name, shape, losses in line.findall(output)}
        names = {name for name, _ in found}
        assert names == {"classifier", "recommender"}
        assert {shape for _, shape in found} == {"(1, 2)", "(2, 1)"}
        for name in names:
            by_columns, by_batch = (
                [float(loss) for loss in found[name, shape].split()]
                for shape in ("(1, 2)", "(2, 1)")
            )
            assert by_columns == pytest.approx(by_batch, abs=2e-5)
            assert by_columns[-1] < by_columns[0]
        # 16 units over 2 ranks, and the users' rows.
        assert re.search(r"dense/kernel +\(288, 16\) +\(None, 'model'\) +\(288, 8\)", output)
        assert re.search(r"users/embeddings +\(1000, 8\) +\('model', None\) +\(500, 8\)", output)
