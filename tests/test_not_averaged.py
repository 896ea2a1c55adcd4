"""Ordinary variables beside tables: ranks that would train weights of their own are told."""

import os

import numpy as np
import pytest

from tests.checks import not_averaged

pytestmark = [pytest.mark.keras, pytest.mark.ranks]
each_mode = pytest.mark.parametrize("mode", ["eager", "graph"])


def check_told(ranks, steps):
    for found in ranks:
        assert found["steps"] == steps
        kind, message = found["error"]
        assert kind == "InvalidArgumentError"
        assert "stay alike" in message and "average their gradients" in message
        assert "'head" in message and "kernel" in message


def check_alike(ranks):
    for found in ranks:
        assert found["error"] is None and found["steps"] == not_averaged.STEPS
        assert found["foreign"] == 0
        assert found["head"] == ranks[0]["head"]
    assert ranks[0]["head"] != [[1.0]] * len(ranks[0]["head"])


@each_mode
@pytest.mark.parametrize("case", [f"{door}_nothing" for door in not_averaged.DOORS] + ["sok_apart"])
def test_nothing_averages(rank_results, case, mode):
    ranks = rank_results(2, f"not_averaged.{case}_{mode}")
    check_told(ranks, steps=1)
    assert ranks[0]["head"] != ranks[1]["head"]


@each_mode
def test_other_weights_at_the_start(rank_results, mode):
    check_told(rank_results(2, f"not_averaged.dmp_start_{mode}"), steps=1)


@each_mode
def test_a_program_that_averages(rank_results, mode):
    check_alike(rank_results(2, f"not_averaged.dmp_by_hand_{mode}"))


@pytest.mark.parametrize("way", not_averaged.FITS)
def test_under_fit(rank_results, way):
    ranks = rank_results(2, f"not_averaged.{way}")
    # Under Keras 3 Horovod's wrapper averages nothing.
    averages = os.environ.get("TF_USE_LEGACY_KERAS") == "1" and way == "fit_horovod"
    if way in ("fit_stock", "fit_horovod") and not averages:
        check_told(ranks, steps=1)
        return
    check_alike(ranks)
    right = rank_results(2, "not_averaged.fit_dmp")
    np.testing.assert_allclose(ranks[0]["head"], right[0]["head"], rtol=1e-5)


@each_mode
@pytest.mark.parametrize("door", ["dmp", "sok"])
def test_horovods_tape_leaves_tables_alone(rank_results, door, mode):
    ranks = rank_results(2, f"not_averaged.{door}_horovod_{mode}")
    check_alike(ranks)
    right = rank_results(2, f"not_averaged.{door}_by_hand_{mode}")
    np.testing.assert_allclose(ranks[0]["head"], right[0]["head"], rtol=1e-5)


def test_horovods_optimizer_leaves_tables_alone(rank_results):
    ranks = rank_results(2, "not_averaged.fit_sok_in_horovod")
    check_alike(ranks)
    right = rank_results(2, "not_averaged.fit_sok")
    np.testing.assert_allclose(ranks[0]["head"], right[0]["head"], rtol=1e-5)


def test_horovods_broadcast_leaves_tables_alone(rank_results):
    for found in rank_results(2, "not_averaged.broadcast"):
        assert found == {"shared": [1.0], "kept": True}
