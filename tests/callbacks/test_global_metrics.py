"""`GlobalMetrics`: numbers of all samples, beside Keras' metrics on all predictions at once."""

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import global_metrics

pytestmark = pytest.mark.keras
each_world = pytest.mark.parametrize("world_size", [1, 2])


def expected_of(ranks):
    """Keras' metrics of the predictions of some ranks, updated once."""
    labels = np.concatenate([rank["labels"] for rank in ranks])
    predictions = np.concatenate([rank["predictions"] for rank in ranks])
    found = {}
    for metric in global_metrics.metrics():
        metric.update_state(labels, predictions)
        found[metric.name] = np.asarray(metric.result())
    right = (predictions > 0.5) == labels
    assert found["accuracy"] == pytest.approx(np.mean(right))
    loss = -np.mean(np.log(np.where(labels == 1, predictions, 1 - predictions)))
    return {**found, "loss": loss}


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def check_of_all(ranks):
    expected = expected_of(ranks)
    for rank in ranks:
        check(rank["evaluated"], expected)
        history = {name: values[-1] for name, values in rank["history"].items()}
        check({name[4:]: v for name, v in history.items() if name.startswith("val_")}, expected)
        check({name: v for name, v in history.items() if not name.startswith("val_")}, expected)
        assert len(rank["seen"]) == global_metrics.EPOCHS
        for number, logs in enumerate(rank["seen"]):  # before it in the list
            assert logs.keys() == rank["history"].keys()
            for name, value in logs.items():
                np.testing.assert_array_equal(value, rank["history"][name][number])
                np.testing.assert_array_equal(value, ranks[0]["seen"][number][name])
        check(rank["own"], expected_of([rank]))


@each_world
def test_metrics_of_all_samples(rank_results, world_size):
    ranks = rank_results(world_size, "global_metrics.of_all_samples")
    check_of_all(ranks)
    if world_size > 1:
        auc = [float(rank["own"]["auc"]) for rank in ranks]
        assert abs(np.mean(auc) - ranks[0]["evaluated"]["auc"]) > 0.01  # no mean of AUCs


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.ranks)])
def test_metrics_of_processes(rank_results, world_size):
    found = rank_results(world_size, "drift.global_metrics")
    check_of_all([rank["plain"] for rank in found])
    own_hits = [rank[False][1] for rank in found]
    for rank in found:
        assert rank[True][0] == rank[True][1] > 0  # each rank has all samples already
        assert rank[False][0] == sum(own_hits) and min(own_hits) > 0


def warned(call):
    """What `call` returns, and the one warning of a GlobalMetrics, on rank 0."""
    with pytest.warns(UserWarning, match="GlobalMetrics cannot add") as caught:
        found = call()
    (text,) = [str(each.message) for each in caught if "GlobalMetrics" in str(each.message)]
    return found, text


@each_world
def test_metrics_with_results_of_their_own(rank_results, world_size):
    ranks, said = warned(lambda: rank_results(world_size, "global_metrics.own_classes"))
    assert "metric 'peak' of class Peak" in said and "`sums=[Peak]`" in said
    labels = np.concatenate([rank["labels"] for rank in ranks])
    for number, rank in enumerate(ranks):
        evaluated = rank["evaluated"]
        assert evaluated["peak"] == 10 + number  # its own
        assert evaluated["count"] == len(labels)
        assert evaluated["share"] == pytest.approx(np.mean(labels))


def test_an_evaluation_without_it(rank_results):
    first, second = rank_results(2, "global_metrics.nested")
    assert first["own"] == [first["hits"]] * global_metrics.EPOCHS and second["own"] == []
    for rank in (first, second):
        assert rank["history"] == [first["hits"] + second["hits"]] * global_metrics.EPOCHS


def test_what_a_step_returns_beside_metrics(rank_results):
    ranks, said = warned(lambda: rank_results(2, "global_metrics.other_names"))
    assert ranks == [[1, 1], [2, 2]] and "['loss', 'of_rank']" in said


def test_ranks_with_other_metrics(rank_results):
    for kind, message in rank_results(2, "global_metrics.other_metrics"):
        assert kind == "ValueError" and "'float32', 11]] on rank 1" in message


def test_arguments(sok):
    with pytest.raises(TypeError, match="`sums` must contain classes"):
        sok.callbacks.GlobalMetrics(sums=[tf.keras.metrics.Mean()])
