"""Ranks that would drift apart under `fit`: callbacks that hold them together, and errors."""

import numpy as np
import tensorflow as tf

SCORES = {0: [1.0, 0.5, 0.2, 0.1], 1: [1.0, 2.0, 3.0, 4.0]}  # rank: a metric, by epoch
RATE = 0.1
STATISTICS = ("fit", "eager", "graph", "graph_within", "no_weights")
RATES = ("eager", "graph", "eager_not_averaged", "graph_not_averaged", "graph_dmp")


def checks(world_size):
    every = {
        "metric_average": metric_average,
        "order_of_callbacks": order_of_callbacks,
        "broadcast_built": lambda: broadcast(make_model),
        "broadcast_unbuilt": lambda: broadcast(Unbuilt),
        "no_such_root": no_such_root,
        "same_start": lambda: start(seed=1),
    }
    if world_size > 1:
        every["global_metrics"] = global_metrics
        every["other_metrics"] = other_metrics
        every["other_models"] = other_models
        every["adapted"] = adapted
        every["moving_statistics"] = moving_statistics
        every["other_start"] = lambda: start(seed=rank())
        every["other_rates"] = other_rates
        every["other_rates_in_session"] = other_rates_in_session
        every["other_rates_of_tables"] = other_rates_of_tables
        every["other_rates_of_tables_under_fit"] = other_rates_of_tables_under_fit
        every["other_rates_of_tables_in_session"] = other_rates_of_tables_in_session
        every["other_schedules"] = other_schedules
    return every


def rank():
    from sok_like.runtime.ranks import comm

    return comm.current().rank


def raised(function):
    """The class and text of what `function` raises; None."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def make_model():
    import sok_like as sok

    keys = tf.keras.Input([2], dtype="int64")
    rows = sok.DistributedEmbedding("sum", None, 2, slot_num=2, max_nnz=1)(keys)
    output = tf.keras.layers.Dense(1, name="head")(tf.keras.layers.Flatten()(rows))
    return tf.keras.Model(keys, output)


class Unbuilt(tf.keras.Model):
    """Has no weights of its own before its first call."""

    def __init__(self):
        import sok_like as sok

        super().__init__()
        self.rows = sok.DistributedEmbedding("sum", None, 2, slot_num=2, max_nnz=1)
        self.head = tf.keras.layers.Dense(1, name="head")

    def call(self, keys):
        return self.head(tf.reshape(self.rows(keys), [-1, 4]))


def fit(model, callbacks, epochs=1, steps=3):
    """`fit` on keys of all ranks; the optimizer, wrapped."""
    import sok_like as sok

    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(rank())
    keys = rng.integers(0, 9, [4 * steps, 2])
    targets = rng.normal(size=[4 * steps, 1]).astype(np.float32)
    model.fit(keys, targets, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0)
    return optimizer


class Scores(tf.keras.callbacks.Callback):
    """Reports the rank's score as a metric of each epoch, and keeps its loss."""

    def __init__(self, **more):
        super().__init__()
        self.losses, self.more = [], more

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = SCORES[min(rank(), 1)][epoch]
        logs.update(self.more)
        self.losses.append(float(logs["loss"]))


class Seen(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append((logs["score"], logs["loss"]))


def metric_average():
    """Own losses, averages that later callbacks see, and what two of Keras' did."""
    import sok_like as sok

    tf.keras.utils.set_random_seed(1)
    own, seen = Scores(), Seen()
    callbacks = [own, sok.callbacks.MetricAverage(), seen]
    callbacks += [tf.keras.callbacks.ReduceLROnPlateau("score", patience=1, factor=0.5, mode="min")]
    callbacks += [tf.keras.callbacks.EarlyStopping("score", patience=2, mode="min")]
    optimizer = fit(make_model(), callbacks, epochs=4)
    rate = float(np.asarray(optimizer.learning_rate))
    return {"losses": own.losses, "seen": seen.logs, "rate": rate}


def order_of_callbacks():
    import sok_like as sok

    stopping = tf.keras.callbacks.EarlyStopping("loss")
    return raised(lambda: fit(make_model(), [stopping, sok.callbacks.MetricAverage()]))


def other_metrics():
    import sok_like as sok

    more = {"another": 1.0} if rank() else {}
    return raised(lambda: fit(make_model(), [Scores(**more), sok.callbacks.MetricAverage()]))


def global_metrics():
    """Numbers of all samples; and hits under a distribution, whose batches may be split already."""
    import sok_like as sok
    from tests.checks import global_metrics as checks

    found = {"plain": checks.of_all_samples()}
    for split in (True, False):
        keys, labels = checks.samples(0 if split else rank())
        with sok.distribution.DataParallel(auto_shard_dataset=split).scope():
            model = checks.make_model(with_table=False)
            model.compile("sgd", "mse", metrics=[tf.keras.metrics.TruePositives(name="hits")])
            options = {"verbose": 0, "batch_size": len(keys) // 2}
            callback = sok.callbacks.GlobalMetrics()
            evaluated = model.evaluate(keys, labels, callbacks=[callback], **options)
            hits = np.sum((model.predict(keys, **options) > 0.5) & (labels == 1))
        found[split] = evaluated[-1], hits
    return found


class Head(tf.keras.callbacks.Callback):
    """The weights of the layer "head" as steps begin, and after the last."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def read(self):
        if self.model.built:
            head = next(layer for layer in self.model.layers if layer.name == "head")
            self.kernels.append(head.get_weights()[0][:, 0].tolist())

    def on_train_batch_begin(self, batch, logs=None):
        self.read()

    def on_train_end(self, logs=None):
        self.read()


def broadcast(make):
    """Weights as made, and step by step, where every rank has another seed."""
    import sok_like as sok

    tf.keras.utils.set_random_seed(10 + rank())
    model, before, after = make(), Head(), Head()
    fit(model, [before, sok.callbacks.BroadcastVariables(np.int64(0)), after])
    return {"before": before.kernels, "after": after.kernels}


def no_such_root():
    import sok_like as sok

    return [raised(lambda r=r: sok.callbacks.BroadcastVariables(r)) for r in (-1, 99, None)]


def other_models():
    import sok_like as sok

    units = [1, 2][rank() % 2]
    keys = tf.keras.Input([2])
    model = tf.keras.Model(keys, tf.keras.layers.Dense(units, name="head")(keys))
    return raised(lambda: fit(model, [sok.callbacks.BroadcastVariables()]))


def start(seed):
    """What three steps raise that nothing made to start alike."""
    tf.keras.utils.set_random_seed(20 + seed)
    return raised(lambda: fit(make_model(), []))


def adapted():
    """What `fit` raises, by kind of layer and whether ranks adapt it to the same data.

    Under "predictions", those after `BroadcastVariables` and a normalization of other data.
    """
    layers, found = tf.keras.layers, {}
    for kind in (layers.StringLookup, layers.TextVectorization, layers.Normalization):
        for alike in (True, False):
            tf.keras.utils.set_random_seed(1)
            data = np.arange(1.0, 5.0) * (1 if alike else 1 + rank())
            model = adapted_model(kind, data)
            found[kind.__name__, alike] = raised(lambda m=model, k=kind: fit_on(m, k, []))
    import sok_like as sok

    model = adapted_model(layers.Normalization, np.arange(4.0) * (1 + rank()))
    fit_on(model, layers.Normalization, [sok.callbacks.BroadcastVariables()])
    found["predictions"] = model.predict(np.ones([2, 1], np.float32), verbose=0).tolist()
    return found


def adapted_model(kind, data):
    """A model of one layer of this kind, adapted, and a table."""
    import sok_like as sok

    is_text = kind is not tf.keras.layers.Normalization
    data = data.astype(str) if is_text else data.astype(np.float32)[:, np.newaxis]
    layer = kind(output_sequence_length=1) if kind is tf.keras.layers.TextVectorization else kind()
    layer.adapt(data)
    inputs = tf.keras.Input([1], dtype="string" if is_text else "float32")
    learned = layer(inputs)
    keys = learned if is_text else tf.keras.layers.Discretization([0.0])(learned)
    rows = tf.keras.layers.Flatten()(sok.HashEmbedding(2)(keys))
    if not is_text:
        rows = tf.keras.layers.Concatenate()([rows, learned])
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(rows))


def fit_on(model, kind, callbacks):
    import sok_like as sok

    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
    inputs = np.arange(1.0, 7.0, dtype=np.float32)[:, np.newaxis]
    if kind is not tf.keras.layers.Normalization:
        inputs = tf.constant(inputs.astype(str))
    model.fit(inputs, np.ones([6, 1]), batch_size=2, callbacks=callbacks, verbose=0)


def other_rates():
    """What each step raises when rank 1 changes its rate before the third; eager and compiled."""
    import sok_like as sok

    found = {}
    for name in ("eager", "graph"):
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
        weight = tf.Variable([1.0, 2.0])

        def step(optimizer=optimizer, weight=weight):
            optimizer.apply_gradients([(tf.ones([2]), weight)])

        if name == "graph":
            optimizer.build([weight])
            step = tf.function(step)
        found[name] = []
        for number in range(3):
            if number == 2 and rank() == 1:
                optimizer.learning_rate.assign(RATE / 2)
            found[name].append(raised(step))
        found[f"{name}_weight"] = weight.numpy().tolist()
    return found


def other_rates_in_session():
    import sok_like as sok

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", initializer=[1.0])
        rate = v1.placeholder(tf.float32, [])
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(rate))
        train = optimizer.minimize(tf.reduce_sum(weight))
        session.run(v1.global_variables_initializer())
        rates = [RATE, RATE, RATE / (1 + rank())]
        return [raised(lambda r=r: session.run(train, {rate: r})) for r in rates]


def flat_layer(name):
    import sok_like as sok

    return sok.All2AllDenseEmbedding(
        *(None, 1, 1, 1),
        dynamic_input=True,
        embedding_initializer="zeros",
        gradient_scale="sum",
        name=name,
    )


def table_steps(layer, optimizer, more=(), compiled=False):
    """A function that takes a step of a table, which rank 0 alone has no keys of, and of `more`."""
    keys = tf.constant([1, 2, 3][: 3 * rank()], tf.int64)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys)) + sum(tf.reduce_sum(v) for v in more)
        variables = [*layer.trainable_variables, *more]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    if compiled:
        optimizer.build([*layer.trainable_variables, *more])
        return tf.function(step)
    return step


def other_rates_of_tables():
    """Steps that ended, and what the next one raised, where rank 1 changes its rate after two."""
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    found = {}
    for name in RATES:
        alone = name in ("eager", "graph")
        optimizer = sok.OptimizerWrapper(
            tf.keras.optimizers.SGD(RATE), average_dense_gradients=alone
        )
        if name.endswith("dmp"):
            optimizer = dmp.DistributedOptimizer(optimizer)
        layer = flat_layer(f"rates_{name}")
        more = [] if alone else [tf.Variable([1.0])]
        step = table_steps(layer, optimizer, more, name.startswith("graph"))
        ended, error = 0, None
        while error is None and ended < 6:
            if ended == 2 and rank() == 1:
                optimizer.learning_rate.assign(RATE / 2)
            error = raised(step)
            ended += error is None
        found[name] = ended, error
        found[f"{name}_rows"] = sok.export(layer.table)[1].numpy()[:, 0].tolist()
    return found


def other_schedules():
    """Steps until ranks with schedules of their own hear of it, and until like ones do."""
    import sok_like as sok

    found = []
    for seconds in (RATE, RATE / (1 + rank())):
        schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([5], [RATE, seconds])
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(schedule))
        step = table_steps(flat_layer(f"schedule_{len(found)}"), optimizer, compiled=True)
        found.append([raised(step) for _ in range(20)])
    return found


class Change(tf.keras.callbacks.Callback):
    """Gives this rank another rate before the third step."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and rank() == 1:
            self.model.optimizer.learning_rate.assign(RATE / 2)


def other_rates_of_tables_under_fit():
    """The steps that ended, and what `fit` raised, of a model of a table alone."""
    keys = tf.keras.Input([2], dtype="int64")
    rows = flat_layer("rates_under_fit")(tf.keras.layers.Flatten()(keys)[:, 0])
    model, ended = tf.keras.Model(keys, rows), []
    seen = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: ended.append(1))
    error = raised(lambda: fit(model, [Change(), seen], steps=4))
    return len(ended), error


def other_rates_of_tables_in_session():
    import sok_like as sok

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.EmbeddingVariable(1, name="rates_in_session", initializer="zeros")
        (rows,) = sok.group_embedding_lookup([table], [tf.constant([1, 2], tf.int64)])
        rate = v1.placeholder(tf.float32, [])
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(rate))
        train = optimizer.minimize(tf.reduce_sum(rows), var_list=[table])
        session.run(v1.global_variables_initializer())
        rates = [RATE, RATE, RATE / (1 + rank())]
        return [raised(lambda r=r: session.run(train, {rate: r})) for r in rates]


def moving_statistics():
    """The statistics after steps on `samples` by kind of loop, and what `synchronized` raises."""
    found = {kind: _statistics(kind) for kind in STATISTICS}
    synchronized = tf.keras.layers.BatchNormalization(synchronized=True)
    found["error"] = raised(lambda: synchronized(tf.ones([2, 2]), training=True))
    return found


def samples(of_rank):
    return np.random.default_rng(of_rank).normal(of_rank, 1 + of_rank, [3, 4, 2]).astype("float32")


def _statistics(kind):
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    alone = {"center": False, "scale": False} if kind == "no_weights" else {}
    normalize = tf.keras.layers.BatchNormalization(momentum=0.5, **alone)
    inputs, batches = tf.keras.Input([2]), samples(rank())
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, name="head")(normalize(inputs)))
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    targets = np.ones([12, 1], np.float32)
    if kind == "fit":
        model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
        model.fit(batches.reshape(12, 2), targets, batch_size=4, shuffle=False, verbose=0)
    else:
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
    return [np.array(weight) for weight in normalize.get_weights()[-2:]]
