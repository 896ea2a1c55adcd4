"""What holds ranks together under `fit`, and what each rank is told where they drift apart."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from tests.training import layer_of

pytestmark = pytest.mark.keras
SCORES = {0: [1.0, 0.5, 0.2, 0.1], 1: [1.0, 2.0, 3.0, 4.0]}  # rank: a metric, by epoch
RATE = 0.1


def head(start):
    """The same on all ranks, unless its weights start from another number."""
    kernel = tf.keras.initializers.Constant(start)
    return tf.keras.layers.Dense(1, name="head", kernel_initializer=kernel)


def make_model(start=1.0):
    keys = tf.keras.Input([2], dtype="int64")
    rows = sok.DistributedEmbedding("sum", None, 2, slot_num=2, max_nnz=1)(keys)
    return tf.keras.Model(keys, head(start)(tf.keras.layers.Flatten()(rows)))


class Unbuilt(tf.keras.Model):
    """Has no weights of its own before its first call."""

    def __init__(self, start):
        super().__init__()
        self.rows = sok.DistributedEmbedding("sum", None, 2, slot_num=2, max_nnz=1)
        self.head = head(start)

    def call(self, keys):
        return self.head(tf.reshape(self.rows(keys), [-1, 4]))


def fit(model, callbacks, epochs=1, steps=3):
    """`fit` on keys of all ranks; the optimizer, wrapped."""
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(sok.rank())
    keys = rng.integers(0, 9, [4 * steps, 2])
    targets = rng.normal(size=[4 * steps, 1]).astype(np.float32)
    model.fit(keys, targets, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0)
    return optimizer


# ---- callbacks ----


class Scores(tf.keras.callbacks.Callback):
    """Reports the rank's score as a metric of each epoch, and keeps its loss."""

    def __init__(self, **more):
        super().__init__()
        self.losses, self.more = [], more

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = SCORES[sok.rank()][epoch]
        logs.update(self.more)
        self.losses.append(float(logs["loss"]))


def expected_of_scores(scores):
    """Epochs and final rate of Keras' two callbacks on one list of scores."""
    best, rate, waited = np.inf, RATE, 0
    for epoch, score in enumerate(scores):
        if score < best - 1e-4:
            best, waited = score, 0
            continue
        waited, rate = waited + 1, rate * 0.5
        if waited >= 2:
            return epoch + 1, rate
    return len(scores), rate


@pytest.mark.parametrize("world_size", [1, 2])
def test_metric_average(on_threads, world_size):
    def check():
        own, seen = Scores(), []
        see = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append((logs["score"], logs["loss"]))
        )
        score, kinds = {"monitor": "score", "mode": "min"}, tf.keras.callbacks
        callbacks = [own, sok.callbacks.MetricAverage(), see]
        callbacks += [kinds.ReduceLROnPlateau(patience=1, factor=0.5, **score)]
        callbacks += [kinds.EarlyStopping(patience=2, **score)]
        optimizer = fit(make_model(), callbacks, epochs=4)
        return own.losses, seen, float(np.asarray(optimizer.learning_rate))

    ranks = on_threads(world_size, check)
    scores = np.mean([SCORES[rank] for rank in range(world_size)], axis=0)
    epochs, rate = expected_of_scores(scores)
    losses = np.mean([own for own, _, _ in ranks], axis=0)
    for _, seen, found in ranks:
        assert seen == ranks[0][1]  # to the bit
        np.testing.assert_allclose(seen, np.stack([scores[:epochs], losses], 1), rtol=1e-6)
        assert found == pytest.approx(rate)
    if world_size > 1:
        assert ranks[0][0] != ranks[1][0] and epochs < 4 and rate < RATE


def test_callbacks_that_raise(on_threads):
    """`MetricAverage` behind one that acts, or of other metrics; a broadcast of another model."""

    def check():
        average, stops = sok.callbacks.MetricAverage, tf.keras.callbacks.EarlyStopping
        keys = tf.keras.Input([2])
        other = tf.keras.Model(keys, tf.keras.layers.Dense(1 + sok.rank(), name="head")(keys))
        scores = Scores(**({"another": 1.0} if sok.rank() else {}))
        for model, callbacks, words in (
            (make_model(), [stops("loss"), average()], "EarlyStopping before it"),
            (make_model(), [scores, average()], r"all ranks.*Received: \['another', .*on rank 1"),
            (other, [sok.callbacks.BroadcastVariables()], "differs is number 0.*head.*kernel"),
        ):
            with pytest.raises(ValueError, match=f"(?s){words}"):
                fit(model, callbacks)

    on_threads(2, check)


class Head(tf.keras.callbacks.Callback):
    """The weights of the layer "head" as steps begin, and after the last."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.built:
            head = next(layer for layer in self.model.layers if layer.name == "head")
            self.kernels.append(head.get_weights()[0][:, 0].tolist())

    def on_train_end(self, logs=None):
        self.on_train_batch_begin(None)


@pytest.mark.parametrize("make", [make_model, Unbuilt])
def test_broadcast_variables(on_threads, make):
    def check():
        model, before, after = make(1.0 + sok.rank()), Head(), Head()
        fit(model, [before, sok.callbacks.BroadcastVariables(np.int64(0)), after])
        return before.kernels, after.kernels

    ranks = on_threads(2, check)
    for _, after in ranks:
        assert after == ranks[0][1]
        assert len(after) >= 3
    if make is make_model:  # all steps, and the end
        assert ranks[1][0][0] != ranks[0][0][0]
        assert ranks[1][1][0] == ranks[0][0][0]
    # Nothing but the first step moved them apart.
    assert ranks[0][1][-1] != ranks[0][1][0]


def test_broadcast_from_no_such_rank(sok):
    for root in (-1, 99, None):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            sok.callbacks.BroadcastVariables(root)


def test_weights_that_start_different_are_named(on_threads):
    def check():
        words = "(?s)start alike.*head.*kernel"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            fit(make_model(1.0 + sok.rank()), [])

    on_threads(2, check)


def adapted_model(kind, data):
    """A model of one layer of this kind, adapted, and a table."""
    is_text = kind != "Normalization"
    data = data.astype(str) if is_text else data.astype(np.float32)[:, np.newaxis]
    options = {"output_sequence_length": 1} if is_text else {}
    layer = getattr(tf.keras.layers, kind)(**options)
    layer.adapt(data)
    inputs = tf.keras.Input([1], dtype="string" if is_text else "float32")
    learned = layer(inputs)
    keys = learned if is_text else tf.keras.layers.Discretization([0.0])(learned)
    rows = tf.keras.layers.Flatten()(sok.HashEmbedding(2)(keys))
    if not is_text:
        rows = tf.keras.layers.Concatenate()([rows, learned])
    model = tf.keras.Model(inputs, head(1.0)(rows))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
    return model


def fit_adapted(model, kind, callbacks=()):
    inputs = np.arange(1.0, 7.0, dtype=np.float32)[:, np.newaxis]
    if kind != "Normalization":
        inputs = tf.constant(inputs.astype(str))
    model.fit(inputs, np.ones([6, 1]), batch_size=2, callbacks=[*callbacks], verbose=0)


@pytest.mark.parametrize("kind", ["TextVectorization", "Normalization"])
def test_layers_adapted_to_other_data_are_named(on_threads, kind):
    def check():
        data = np.arange(1.0, 5.0)
        fit_adapted(adapted_model(kind, data), kind)
        name = kind.lower() if kind == "Normalization" else "lookup"
        words = f"(?is)`adapt` with the same data.*Received: layer.*{name}"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            fit_adapted(adapted_model(kind, data * (1 + sok.rank())), kind)

    on_threads(2, check)


def test_broadcast_variables_brings_what_a_normalization_has_learned(on_threads):
    def check():
        model = adapted_model("Normalization", np.arange(4.0) * (1 + sok.rank()))
        fit_adapted(model, "Normalization", [sok.callbacks.BroadcastVariables()])
        return model.predict(np.ones([2, 1], np.float32), verbose=0).tolist()

    first, second = on_threads(2, check)
    assert first == second


def samples(of_rank):
    return np.random.default_rng(of_rank).normal(of_rank, 1 + of_rank, [3, 4, 2]).astype("float32")


@pytest.mark.parametrize("kind", ["fit", "eager", "graph", "graph_within", "no_weights"])
def test_moving_statistics_are_averaged(on_threads, kind):
    mean, variance = np.ones(2), np.ones(2)  # as set before
    for batches in zip(samples(0), samples(1), strict=True):
        mean = 0.5 * mean + 0.5 * np.mean([batch.mean(0) for batch in batches], 0)
        variance = 0.5 * variance + 0.5 * np.mean([batch.var(0) for batch in batches], 0)

    def check():
        options = {"center": False, "scale": False} if kind == "no_weights" else {}
        normalize = tf.keras.layers.BatchNormalization(momentum=0.5, **options)
        inputs, batches = tf.keras.Input([2]), samples(sok.rank())
        model = tf.keras.Model(inputs, head(1.0)(normalize(inputs)))
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        if kind == "fit":
            model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
            fitting = {"batch_size": 4, "shuffle": False, "verbose": 0}
            model.fit(batches.reshape(12, 2), np.ones([12, 1], np.float32), **fitting)
        else:
            train_batches(model, batches)
        found = [np.array(weight) for weight in normalize.get_weights()[-2:]]
        np.testing.assert_allclose(found, [mean, variance], rtol=1e-5)

    def train_batches(model, batches):
        optimizer = tf.keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)

        def in_training(batch):
            return model(batch, training=True)

        in_training = tf.function(in_training) if kind == "graph_within" else in_training

        def step(batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(in_training(batch) - 1.0))
            tape = dmp.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step = tf.function(step) if kind == "graph" else step
        for batch in batches:
            step(tf.constant(batch))

    on_threads(2, check)


def test_synchronized_statistics_are_refused(on_threads):
    def check():
        synchronized = tf.keras.layers.BatchNormalization(synchronized=True)
        with pytest.raises(NotImplementedError, match="synchronized=True on layer"):
            synchronized(tf.ones([2, 2]), training=True)

    on_threads(2, check)


# ---- rates ----


@pytest.mark.parametrize("compiled", [False, True])
def test_rates_that_differ(on_threads, compiled):
    def check():
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
        weight = tf.Variable([1.0, 2.0])

        def step():
            optimizer.apply_gradients([(tf.ones([2]), weight)])

        if compiled:
            optimizer.build([weight])
            step = tf.function(step)
        step()
        step()
        if sok.rank() == 1:
            optimizer.learning_rate.assign(RATE / 2)
        words = r"(?s)learning rate must be the same.*0\.1.*0\.05"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            step()
        np.testing.assert_allclose(weight, [0.8, 1.8], rtol=1e-6)

    on_threads(2, check)


@pytest.mark.parametrize("of_table", [False, True])
def test_rates_that_differ_in_a_session(on_threads, of_table):
    v1 = tf.compat.v1

    def check():
        with tf.Graph().as_default(), v1.Session() as session:
            if of_table:
                weight = sok.EmbeddingVariable(1, name="rates", initializer="zeros")
                (loss,) = sok.group_embedding_lookup([weight], [tf.constant([1, 2], tf.int64)])
            else:
                weight = loss = v1.get_variable("weight", initializer=[1.0])
            rate = v1.placeholder(tf.float32, [])
            optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(rate))
            train = optimizer.minimize(tf.reduce_sum(loss), var_list=[weight])
            session.run(v1.global_variables_initializer())
            session.run(train, {rate: RATE})
            session.run(train, {rate: RATE})
            with pytest.raises(tf.errors.InvalidArgumentError, match="learning rate"):
                session.run(train, {rate: RATE / (1 + sok.rank())})

    on_threads(2, check)


def table_steps(layer, optimizer, more=(), compiled=False):
    """A function that takes a step of a table, which rank 0 alone has no keys of, and of `more`."""
    keys = tf.constant([1, 2, 3][: 3 * sok.rank()], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys)) + sum(tf.reduce_sum(v) for v in more)
        variables = [*layer.trainable_variables, *more]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    if compiled:
        optimizer.build([*layer.trainable_variables, *more])
        return tf.function(step)
    return step


def steps_until_told(step, optimizer):
    """Steps that end, where rank 1 changes its rate after two."""
    for ended in range(6):
        if ended == 2 and sok.rank() == 1:
            optimizer.learning_rate.assign(RATE / 2)
        try:
            step()
        except tf.errors.FailedPreconditionError as error:
            assert "learning_rate_changed_on_this_rank" in error.message
            return ended
    return None


@pytest.mark.parametrize(
    "kind, compiled", [("alone", False), ("alone", True), ("not averaged", False), ("dmp", True)]
)
def test_rates_of_tables_that_differ(on_threads, kind, compiled):
    def check():
        stock, layer = (
            tf.keras.optimizers.SGD(RATE),
            layer_of("rates", 0.0, 1, gradient_scale="sum"),
        )
        optimizer = sok.OptimizerWrapper(stock, average_dense_gradients=kind == "alone")
        if kind == "dmp":
            optimizer = dmp.DistributedOptimizer(optimizer)
        more = [] if kind == "alone" else [tf.Variable([1.0])]
        ended = steps_until_told(table_steps(layer, optimizer, more, compiled), optimizer)
        # Rank 0, whose rate is what it was, is told in its next lookup.
        assert ended == 3 - sok.rank()
        rows = sok.export(layer.table)[1].numpy()
        np.testing.assert_allclose(rows, np.full_like(rows, -RATE * ended), rtol=1e-5)

    on_threads(2, check)


def test_schedules_that_differ(on_threads):
    """They are compared at steps 1 and 17."""

    def check():
        for name, seconds in (("alike", RATE), ("unlike", RATE / (1 + sok.rank()))):
            schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([5], [RATE, seconds])
            optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(schedule))
            layer = layer_of(name, 0.0, 1, gradient_scale="sum")
            step = table_steps(layer, optimizer, compiled=True)
            for _ in range(16):
                step()
            if name == "alike":
                step()
        with pytest.raises(tf.errors.InvalidArgumentError, match="learning rate must be the same"):
            step()

    on_threads(2, check)
