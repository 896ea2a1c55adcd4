"""A deep-and-cross program of DeepRec's kind trains as TensorFlow's own variables do."""

import re

import numpy as np
import pytest

from tests.ranks import ROOT, run_ranks

PROGRAM = ROOT / "tests" / "deeprec" / "cross_program.py"
LINES = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Labels that depend on the first text."""
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("cross") / "train.csv"
    with open(path, "w") as file:
        for _ in range(LINES):
            texts = rng.integers(0, 20, 3)
            numbers = [f"{number:.3f}" for number in rng.random(2)]
            line = [str(texts[0] % 2), *numbers, *(f"C{text:03d}" for text in texts)]
            file.write(",".join(line) + "\n")
    return path


def losses(data, folder, num_ranks, way, scales=(1,)):
    """The losses of the whole batch, step by step: of each scale, as each rank printed them."""
    arguments = [str(data), str(folder), "--way", way, "--scales", *map(str, scales)]
    printed = run_ranks(str(PROGRAM), num_ranks, args=arguments, alone=num_ranks > 1)
    return [
        [float(loss) for loss in line.split()]
        for text in printed
        for line in re.findall(r"^losses (.+)$", text, re.MULTILINE)
    ]


@pytest.mark.slow  # `make test` trains the session of checks/deeprec.py on ranks
@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", ["tables", "columns"])
def test_both_ways_train_as_stock_variables_do(data, tmp_path, num_ranks, way):
    # Gradients of tables are sums over ranks, those of ordinary variables are means.
    right, untrained = losses(data, tmp_path / "stock", 1, "stock", (num_ranks, 0))
    assert len(right) == 8
    # What the tables learn shows: it is many times the tolerance below.
    assert np.abs(np.subtract(right, untrained)).max() > 2e-4
    found_by_rank = losses(data, tmp_path / way, num_ranks, way)
    assert len(found_by_rank) == num_ranks
    for found in found_by_rank:
        np.testing.assert_allclose(found, right, rtol=1e-5)
    assert (tmp_path / f"{way}-1" / "model.ckpt-8.index").exists()
