"""`GlobalMetrics`: numbers of all samples, beside Keras' metrics on all predictions at once.

Ranks have batches of different sizes.
"""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

pytestmark = pytest.mark.keras
SAMPLES = [6, 14]  # of each rank, in two batches
EPOCHS = 2


def samples(of_rank):
    """Keys and labels."""
    rng = np.random.default_rng(of_rank)
    keys = rng.integers(0, 40, [SAMPLES[of_rank], 1])
    return keys, rng.integers(0, 2, [SAMPLES[of_rank], 1]).astype(np.float32)


def metrics():
    """Metrics of several kinds of states, each under a name of its own."""
    of = tf.keras.metrics
    return [
        of.AUC(name="auc"),
        of.AUC(curve="PR", num_thresholds=30, name="auc_pr"),
        of.Precision(name="precision"),
        of.BinaryAccuracy(name="accuracy"),
        of.RootMeanSquaredError(name="rmse"),
        of.SensitivityAtSpecificity(0.5, name="sensitivity"),
        of.BinaryIoU(name="iou"),
        of.F1Score(threshold=0.5, name="f1"),
        of.R2Score(name="r2"),
        of.MeanSquaredError(name="mse"),
    ]


def hits():
    return tf.keras.metrics.TruePositives(name="hits")


def make_model(with_table=False, kind=tf.keras.Model):
    """Its predictions stay as they are, because the learning rate is 0."""
    keys = tf.keras.Input([1], dtype="int64")
    if with_table:
        table = sok.HashEmbedding(4, embeddings_initializer="normal")
        rows = tf.keras.layers.Flatten()(table(keys)) * 30
    else:
        rows = tf.keras.layers.Lambda(lambda x: tf.cast(x, tf.float32) - 20)(keys)
    weights = tf.keras.initializers.GlorotUniform(seed=5)
    dense = tf.keras.layers.Dense(1, "sigmoid", kernel_initializer=weights)
    return kind(keys, dense(rows))


def compiled(of_model, with_table=False, kind=tf.keras.Model, **options):
    model = make_model(with_table, kind)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.0))
    model.compile(optimizer, "binary_crossentropy", metrics=of_model, **options)
    return model


def fitted(model, callbacks):
    """The history of `fit`, which validates on the training data."""
    keys, labels = samples(sok.rank())
    size = len(keys) // 2
    options = {"batch_size": size, "verbose": 0, "callbacks": callbacks, "epochs": EPOCHS}
    validation = {"validation_data": (keys, labels), "validation_batch_size": size}
    return model.fit(keys, labels, **validation, **options).history


def evaluated(model, **options):
    """What `evaluate` returns, with the callback."""
    keys, labels = samples(sok.rank())
    options = {"batch_size": len(keys) // 2, "verbose": 0, "return_dict": True, **options}
    return model.evaluate(keys, labels, **{"callbacks": [sok.callbacks.GlobalMetrics()], **options})


def of_all_samples():
    """Numbers of `fit` and `evaluate`, and predictions; the callback stands last."""
    # Eagerly: tracing so many metrics takes longer than to compute them.
    model, seen = compiled(metrics(), with_table=True, run_eagerly=True), []
    see = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append({**logs}))
    keys, labels = samples(sok.rank())
    return {
        "history": fitted(model, [see, sok.callbacks.GlobalMetrics()]),
        "seen": seen,
        "evaluated": {name: np.asarray(value) for name, value in evaluated(model).items()},
        "own": {name: np.asarray(value) for name, value in model.get_metrics_result().items()},
        "predictions": model.predict(keys, batch_size=len(keys) // 2, verbose=0),
        "labels": labels,
    }


def expected_of(ranks):
    """Keras' metrics of the predictions of some ranks, updated once."""
    labels = np.concatenate([rank["labels"] for rank in ranks])
    predictions = np.concatenate([rank["predictions"] for rank in ranks])
    found = {}
    for metric in metrics():
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


def test_metrics_of_all_samples(on_threads):
    ranks = on_threads(2, of_all_samples)
    expected = expected_of(ranks)
    for rank in ranks:
        check(rank["evaluated"], expected)
        history = {name: values[-1] for name, values in rank["history"].items()}
        check({name[4:]: v for name, v in history.items() if name.startswith("val_")}, expected)
        check({name: v for name, v in history.items() if not name.startswith("val_")}, expected)
        assert len(rank["seen"]) == EPOCHS
        for number, logs in enumerate(rank["seen"]):  # before it in the list
            assert logs.keys() == rank["history"].keys()
            for name, value in logs.items():
                np.testing.assert_array_equal(value, rank["history"][name][number])
                np.testing.assert_array_equal(value, ranks[0]["seen"][number][name])
        check(rank["own"], expected_of([rank]))
    auc = [float(rank["own"]["auc"]) for rank in ranks]
    assert abs(np.mean(auc) - ranks[0]["evaluated"]["auc"]) > 0.01  # no mean of AUCs


def under_data_parallel(split):
    """Hits of all, and of this rank, under a distribution, whose batches may be split already."""
    keys, labels = samples(0 if split else sok.rank())
    with sok.distribution.DataParallel(auto_shard_dataset=split).scope():
        model = make_model()
        model.compile("sgd", "mse", metrics=[hits()])
        options = {"verbose": 0, "batch_size": len(keys) // 2}
        found = model.evaluate(keys, labels, callbacks=[sok.callbacks.GlobalMetrics()], **options)
        return found[-1], np.sum((model.predict(keys, **options) > 0.5) & (labels == 1))


@pytest.mark.ranks
def test_metrics_of_processes_under_data_parallel(on_processes):
    for together, own in on_processes(2, under_data_parallel, True):
        assert together == own > 0  # each rank has all samples already
    ranks = on_processes(2, under_data_parallel, False)
    own_hits = [own for _, own in ranks]
    assert [together for together, _ in ranks] == [sum(own_hits)] * 2 and min(own_hits) > 0


def warned(on_threads, world_size, function):
    """What `function` returns on ranks, and the one warning of a GlobalMetrics, on rank 0."""
    with pytest.warns(UserWarning, match="GlobalMetrics cannot add") as caught:
        found = on_threads(world_size, function)
    (text,) = [str(each.message) for each in caught if "GlobalMetrics" in str(each.message)]
    return found, text


class Peak(tf.keras.metrics.Metric):
    """Keeps a maximum, which is no sum."""

    def __init__(self, name="peak"):
        super().__init__(name=name)
        self.most = self.add_weight(shape=(), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(tf.maximum(self.most, 10.0 + sok.rank()))

    def result(self):
        return self.most


class Count(Peak):
    """Keeps a sum, as nobody but its author knows; its result is its variable."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))


class Share(tf.keras.metrics.Mean):
    """Keras' result of a mean over values of one's own."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.cast(y_true > 0.5, tf.float32), sample_weight)


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_with_results_of_their_own(on_threads, world_size):
    def evaluate():
        model = compiled([Peak(), Count("count"), Share(name="share")])
        callbacks = [sok.callbacks.GlobalMetrics(sums=[Count])]
        return evaluated(model, callbacks=callbacks, batch_size=3)  # 2 and 5 batches

    ranks, said = warned(on_threads, world_size, evaluate)
    assert "metric 'peak' of class Peak" in said and "`sums=[Peak]`" in said
    labels = np.concatenate([samples(rank)[1] for rank in range(world_size)])
    for number, found in enumerate(ranks):
        assert found["peak"] == 10 + number  # its own
        assert found["count"] == len(labels)
        assert found["share"] == pytest.approx(np.mean(labels))


def test_an_evaluation_without_it(on_threads):
    """On rank 0 alone, at the end of each epoch of `fit`."""

    def train():
        model, own = compiled([hits()]), []
        keys, labels = samples(sok.rank())

        def evaluate(epoch, logs):
            if sok.rank() == 0:
                own.append(evaluated(model, callbacks=[])["hits"])

        evaluates = tf.keras.callbacks.LambdaCallback(on_epoch_end=evaluate)
        history = fitted(model, [evaluates, sok.callbacks.GlobalMetrics()])
        found = np.sum((model.predict(keys, verbose=0) > 0.5) & (labels == 1))
        return own, history["hits"], found

    (own, history, first), (others, other_history, second) = on_threads(2, train)
    assert own == [first] * EPOCHS and others == []
    assert history == other_history == [first + second] * EPOCHS


class OwnStep(tf.keras.Model):
    def test_step(self, data):
        keys, labels = data
        loss = tf.reduce_mean(tf.square(self(keys) - labels))
        return {"loss": loss, "of_rank": tf.constant(1.0 + sok.rank())}


def test_what_a_step_returns_beside_metrics(on_threads):
    def evaluate():
        model, callbacks = compiled(None, kind=OwnStep), [sok.callbacks.GlobalMetrics()]
        return [evaluated(model, callbacks=callbacks)["of_rank"] for _ in range(2)]

    ranks, said = warned(on_threads, 2, evaluate)
    assert ranks == [[1, 1], [2, 2]] and "['loss', 'of_rank']" in said


def test_ranks_with_other_metrics(on_threads):
    def train():
        of_model = [tf.keras.metrics.AUC(num_thresholds=10 + sok.rank(), name="auc")]
        with pytest.raises(ValueError, match=r"'float32', 11\]\] on rank 1"):
            fitted(compiled(of_model), [sok.callbacks.GlobalMetrics()])

    on_threads(2, train)


def test_arguments(sok):
    with pytest.raises(TypeError, match="`sums` must contain classes"):
        sok.callbacks.GlobalMetrics(sums=[tf.keras.metrics.Mean()])
