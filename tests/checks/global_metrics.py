"""`GlobalMetrics` in `fit` and `evaluate`, where ranks have batches of different sizes."""

import numpy as np
import tensorflow as tf

SAMPLES = [6, 14]  # of each rank, in two batches
EPOCHS = 2


def checks(world_size):
    found = {"of_all_samples": of_all_samples, "own_classes": own_classes}
    if world_size > 1:
        found |= {"nested": nested, "other_names": other_names, "other_metrics": other_metrics}
    return found


def rank():
    from sok_like.runtime.ranks import comm

    return comm.current().rank


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
        of.Recall(name="recall"),
        of.BinaryAccuracy(name="accuracy"),
        of.TruePositives(name="hits"),
        of.RootMeanSquaredError(name="rmse"),
        of.SensitivityAtSpecificity(0.5, name="sensitivity"),
        of.BinaryIoU(name="iou"),
        of.F1Score(threshold=0.5, name="f1"),
        of.R2Score(name="r2"),
        of.MeanSquaredError(name="mse"),
    ]


def make_model(with_table=True):
    """Its predictions stay as they are, because the learning rate is 0."""
    import sok_like as sok

    keys = tf.keras.Input([1], dtype="int64")
    if with_table:
        rows = (
            tf.keras.layers.Flatten()(sok.HashEmbedding(4, embeddings_initializer="normal")(keys))
            * 30
        )
    else:
        rows = tf.keras.layers.Lambda(lambda x: tf.cast(x, tf.float32) - 20)(keys)
    weights = tf.keras.initializers.GlorotUniform(seed=5)
    dense = tf.keras.layers.Dense(1, "sigmoid", kernel_initializer=weights)
    return tf.keras.Model(keys, dense(rows))


def compiled(model, of_model):
    import sok_like as sok

    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.0))
    model.compile(optimizer, "binary_crossentropy", metrics=of_model)
    return model


def fitted(model, callbacks, epochs=EPOCHS):
    """The history of `fit`, which validates on the training data, and what `evaluate` returns."""
    keys, labels = samples(rank())
    options = {"batch_size": len(keys) // 2, "verbose": 0, "callbacks": callbacks}
    validation = {"validation_data": (keys, labels), "validation_batch_size": len(keys) // 2}
    history = model.fit(keys, labels, epochs=epochs, **validation, **options)
    return history.history, model.evaluate(keys, labels, return_dict=True, **options)


class Seen(tf.keras.callbacks.Callback):
    """What a callback gets at the end of epochs."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


def of_all_samples():
    """Numbers of `fit` and `evaluate`, and predictions; the callback stands last."""
    import sok_like as sok

    model, seen = compiled(make_model(), metrics()), Seen()
    history, evaluated = fitted(model, [seen, sok.callbacks.GlobalMetrics()])
    keys, labels = samples(rank())
    own = {name: np.asarray(value) for name, value in model.get_metrics_result().items()}
    return {
        "history": history,
        "seen": seen.logs,
        "evaluated": {name: np.asarray(value) for name, value in evaluated.items()},
        "own": own,
        "predictions": model.predict(keys, batch_size=len(keys) // 2, verbose=0),
        "labels": labels,
    }


class Peak(tf.keras.metrics.Metric):
    """Keeps a maximum, which is no sum."""

    def __init__(self, name="peak"):
        super().__init__(name=name)
        self.most = self.add_weight(shape=(), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(tf.maximum(self.most, tf.reduce_max(tf.cast(self.of(y_pred), "float32"))))

    def of(self, y_pred):
        return tf.fill([2], 10.0 + rank())

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


def own_classes():
    """`evaluate` with metrics of one's own; warns."""
    import sok_like as sok

    of_model = [Peak(), Count("count"), Share(name="share")]
    model = compiled(make_model(with_table=False), of_model)
    keys, labels = samples(rank())
    options = {"batch_size": 3, "verbose": 0, "return_dict": True}  # 2 and 5 batches
    callback = sok.callbacks.GlobalMetrics(sums=[Count])
    evaluated = model.evaluate(keys, labels, callbacks=[callback], **options)
    return {"evaluated": evaluated, "labels": labels}


def nested():
    """An `evaluate` without the callback, on rank 0 alone, at the end of each epoch of `fit`."""
    import sok_like as sok

    model = compiled(make_model(with_table=False), [tf.keras.metrics.TruePositives(name="hits")])
    keys, labels = samples(rank())
    own = []

    class Evaluate(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank() == 0:
                own.append(model.evaluate(keys, labels, verbose=0, return_dict=True)["hits"])

    history, _ = fitted(model, [Evaluate(), sok.callbacks.GlobalMetrics()])
    hits = np.sum((model.predict(keys, verbose=0) > 0.5) & (labels == 1))
    return {"own": own, "history": history["hits"], "hits": hits}


class OwnStep(tf.keras.Model):
    def test_step(self, data):
        keys, labels = data
        loss = tf.reduce_mean(tf.square(self(keys) - labels))
        return {"loss": loss, "of_rank": tf.constant(1.0 + rank())}


def other_names():
    """`evaluate` of a model whose step returns what is no metric; warns."""
    import sok_like as sok

    inner = make_model(with_table=False)
    model = compiled(OwnStep(inner.inputs, inner.outputs), None)
    keys, labels = samples(rank())
    callback = sok.callbacks.GlobalMetrics()
    options = {"callbacks": [callback], "verbose": 0, "return_dict": True}
    return [model.evaluate(keys, labels, **options)["of_rank"] for _ in range(2)]


def other_metrics():
    import sok_like as sok
    from tests.checks.drift import raised

    of_model = [tf.keras.metrics.AUC(num_thresholds=10 + rank(), name="auc")]
    model = compiled(make_model(with_table=False), of_model)
    return raised(lambda: fitted(model, [sok.callbacks.GlobalMetrics()]))
