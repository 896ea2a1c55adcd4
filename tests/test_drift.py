"""What holds ranks together under `fit`, and what each rank is told where they drift apart."""

import numpy as np
import pytest

from tests.checks import drift

pytestmark = pytest.mark.keras
two = pytest.param(2, marks=pytest.mark.ranks)
each_world = pytest.mark.parametrize("world_size", [1, two])
on_ranks = pytest.mark.parametrize("world_size", [two])


def expected_of_scores(scores):
    """Epochs and final rate of Keras' two callbacks on one list of scores."""
    best, rate, waited, waited_to_stop = np.inf, drift.RATE, 0, 0
    for epoch, score in enumerate(scores):
        if score < best - 1e-4:
            best, waited, waited_to_stop = score, 0, 0
            continue
        waited, waited_to_stop = waited + 1, waited_to_stop + 1
        if waited >= 1:
            rate, waited = rate * 0.5, 0
        if waited_to_stop >= 2:
            return epoch + 1, rate
    return len(scores), rate


@each_world
def test_metric_average(rank_results, world_size):
    ranks = rank_results(world_size, "drift.metric_average")
    scores = np.mean([drift.SCORES[rank] for rank in range(world_size)], axis=0)
    epochs, rate = expected_of_scores(scores)
    losses = np.mean([rank["losses"] for rank in ranks], axis=0)
    for rank in ranks:
        assert rank["seen"] == ranks[0]["seen"]  # to the bit
        np.testing.assert_allclose(rank["seen"], np.stack([scores[:epochs], losses], 1), rtol=1e-6)
        assert rank["rate"] == pytest.approx(rate)
    if world_size > 1:
        assert ranks[0]["losses"] != ranks[1]["losses"] and epochs < 4 and rate < drift.RATE


@each_world
def test_metric_average_stands_before_those_that_act(rank_results, world_size):
    for kind, message in rank_results(world_size, "drift.order_of_callbacks"):
        assert kind == "ValueError" and "EarlyStopping before it" in message


@on_ranks
def test_metrics_of_other_names(rank_results, world_size):
    for kind, message in rank_results(world_size, "drift.other_metrics"):
        assert kind == "ValueError" and "same on all ranks" in message, message
        assert "Received, by rank: [['" in message and "'another'" in message


@each_world
@pytest.mark.parametrize("kind", ["built", "unbuilt"])
def test_broadcast_variables(rank_results, kind, world_size):
    ranks = rank_results(world_size, f"drift.broadcast_{kind}")
    for rank in ranks:
        assert rank["after"] == ranks[0]["after"]
        assert len(rank["after"]) >= 3
    if world_size > 1:
        if len(ranks[0]["before"]) == 4:  # all steps, and the end
            assert ranks[1]["before"][0] != ranks[0]["before"][0]
            assert ranks[1]["after"][0] == ranks[0]["before"][0]
        # Nothing but the first step moved them apart.
        assert ranks[0]["after"][-1] != ranks[0]["after"][0]


@each_world
def test_broadcast_from_no_such_rank(rank_results, world_size):
    for found in rank_results(world_size, "drift.no_such_root"):
        for kind, message in found:
            assert kind == "ValueError" and f"[0, {world_size})" in message


@on_ranks
def test_broadcast_of_other_models(rank_results, world_size):
    for kind, message in rank_results(world_size, "drift.other_models"):
        assert kind == "ValueError" and "first that differs is number 0" in message
        assert "head" in message and "kernel" in message


@each_world
def test_equal_weights_are_not_refused(rank_results, world_size):
    assert rank_results(world_size, "drift.same_start") == [None] * world_size


@on_ranks
def test_weights_that_start_different_are_named(rank_results, world_size):
    for kind, message in rank_results(world_size, "drift.other_start"):
        assert kind == "InvalidArgumentError"
        assert "start alike" in message and "head" in message and "kernel" in message


@on_ranks
def test_layers_adapted_to_other_data_are_named(rank_results, world_size):
    ranks = rank_results(world_size, "drift.adapted")
    for found in ranks:
        assert found["predictions"] == ranks[0]["predictions"]
        for name in ("StringLookup", "TextVectorization", "Normalization"):
            assert found[name, True] is None
            kind, message = found[name, False]
            assert kind == "InvalidArgumentError" and "`adapt` with the same data" in message
            words = name if name == "Normalization" else "lookup"
            assert words.lower() in message.partition("Received: layer")[2]


@on_ranks
@pytest.mark.parametrize("kind", drift.STATISTICS)
def test_moving_statistics_are_averaged(rank_results, kind, world_size):
    mean, variance = np.ones(2), np.ones(2)  # as set before
    for batches in zip(*map(drift.samples, range(world_size)), strict=True):
        mean = 0.5 * mean + 0.5 * np.mean([batch.mean(0) for batch in batches], 0)
        variance = 0.5 * variance + 0.5 * np.mean([batch.var(0) for batch in batches], 0)
    for found in rank_results(world_size, "drift.moving_statistics"):
        np.testing.assert_allclose(found[kind], [mean, variance], rtol=1e-5)
        error, message = found["error"]
        assert error == "NotImplementedError" and "synchronized=True on layer" in message


@on_ranks
def test_rates_that_differ(rank_results, world_size):
    for found in rank_results(world_size, "drift.other_rates"):
        for name in ("eager", "graph"):
            first, second, third = found[name]
            assert first is None and second is None
            kind, message = third
            assert kind == "InvalidArgumentError" and "learning rate must be the same" in message
            assert "0.1" in message and "0.05" in message
            np.testing.assert_allclose(found[f"{name}_weight"], [0.8, 1.8], rtol=1e-6)


@on_ranks
@pytest.mark.parametrize("check", ["other_rates_in_session", "other_rates_of_tables_in_session"])
def test_rates_that_differ_in_a_session(rank_results, check, world_size):
    for first, second, third in rank_results(world_size, f"drift.{check}"):
        assert first is None and second is None
        assert third[0] == "InvalidArgumentError" and "learning rate" in third[1]


@on_ranks
@pytest.mark.parametrize("name", drift.RATES)
def test_rates_of_tables_that_differ(rank_results, name, world_size):
    for rank, found in enumerate(rank_results(world_size, "drift.other_rates_of_tables")):
        steps, (kind, message) = found[name]
        # Rank 0, whose rate is what it was, is told in its next lookup.
        assert steps == 3 - rank
        assert kind == "FailedPreconditionError" and "learning_rate_changed_on_this_rank" in message
        expected = [-drift.RATE * steps] * len(found[f"{name}_rows"])
        np.testing.assert_allclose(found[f"{name}_rows"], expected, rtol=1e-5)


@on_ranks
def test_rates_of_tables_that_differ_under_fit(rank_results, world_size):
    ranks = rank_results(world_size, "drift.other_rates_of_tables_under_fit")
    for rank, (steps, (kind, message)) in enumerate(ranks):
        assert steps == 3 - rank and kind == "FailedPreconditionError"
        assert "learning_rate_changed_on_this_rank" in message


@on_ranks
def test_schedules_that_differ(rank_results, world_size):
    for alike, differ in rank_results(world_size, "drift.other_schedules"):
        assert alike == [None] * 20
        assert differ[:16] == [None] * 16  # compared at steps 1 and 17
        kind, message = differ[16]
        assert kind == "InvalidArgumentError" and "learning rate must be the same" in message
