"""Ordinary variables beside tables: ranks that would train weights of their own are told."""

import os

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import dist_model_parallel as dmp
from sok_like.table.variable import is_embedding_variable
from tests.thread_ranks import raised

pytestmark = [pytest.mark.keras, pytest.mark.ranks]

STEPS, RATE = 5, 0.5


def make_model(door, start=1.0, scale="auto"):
    """A model with one ordinary variable, `head`, that is the same on all ranks."""
    keys = tf.keras.Input([2], dtype="int64")
    if door == "sok":
        rows = sok.DistributedEmbedding(
            "sum", None, 2, slot_num=2, max_nnz=1, gradient_scale=scale, name="rows"
        )(keys)
    elif door == "group":
        rows = sok.GroupEmbedding({"a": 2}, combiners="sum")({"a": keys})["a"]
    else:
        tables = [sok.Embedding(16, 2, "ones", combiner="sum") for _ in range(2)]
        layer = dmp.DistributedEmbedding(tables, dp_input=door == "dmp")
        if door == "dmp":
            rows = tf.keras.layers.Concatenate()(layer([keys, keys]))
        else:  # inputs of the global batch, of the tables that this rank has
            (rows, _) = layer([keys] * len(layer.strategy.input_ids_list[sok.rank()]))
    start = tf.keras.initializers.Constant(start)
    head = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer=start, name="head")
    return tf.keras.Model(keys, head(tf.keras.layers.Flatten()(rows)))


def data(door="dmp"):
    rng = np.random.default_rng(sok.rank())
    size = [8 if door == "dmp_by_rank" else 4, 2]
    keys = [rng.integers(0, 16, size) for _ in range(STEPS)]
    return keys, rng.normal(size=[STEPS, 4, 1]).astype(np.float32)


def loop(door, way, compiled):
    """Steps that ended, what the next one raised, and the kernel of the head."""
    import horovod.tensorflow as hvd

    hvd.init()
    scale = "mean" if way in ("by_hand", "horovod") else "auto"
    model = make_model(door, start=1.0 + sok.rank() if way == "start" else 1.0, scale=scale)
    optimizer = tf.keras.optimizers.SGD(RATE)
    if not door.startswith("dmp"):
        optimizer = sok.OptimizerWrapper(optimizer, average_dense_gradients=False)
    variables = model.trainable_variables
    local = [variable for variable in variables if dmp.is_local(variable)]
    ordinary = [variable for variable in variables if not dmp.is_local(variable)]

    def step(keys, targets):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((model(keys, training=True) - targets) ** 2)
        if way == "horovod":
            tape = hvd.DistributedGradientTape(tape)
            sources = [getattr(v, "_value", v) for v in local + ordinary]  # those of TensorFlow
            found = tape.gradient(loss, sources)
            gradients = found[: len(local)], found[len(local) :]
        elif way == "apart":
            gradients = tape.gradient(loss, local), tape.gradient(loss, ordinary)
        else:
            gradients = tape.gradient(loss, (local, ordinary))
        of_local, of_ordinary = gradients
        if way == "by_hand":
            of_ordinary = [hvd.allreduce(g, name=f"by_hand_{compiled}") for g in of_ordinary]
        optimizer.apply_gradients(zip(of_local + of_ordinary, local + ordinary, strict=True))

    if compiled:
        optimizer.build(local + ordinary)
        step = tf.function(step)
    error, ended = None, 0
    for keys, targets in zip(*data(door), strict=True):
        error = raised(lambda k=keys, t=targets: step(tf.constant(k), tf.constant(t)))
        if error is not None:
            break
        ended += 1
    return what_is_left(model, ended, error)


def what_is_left(model, ended, error):
    """Also how many keys of other ranks this rank's tables hold."""
    tables = [variable for variable in model.variables if is_embedding_variable(variable)]
    keys = np.concatenate([[], *(sok.export(table)[0] for table in tables)])
    foreign = int((keys % sok.size() != sok.rank()).sum())
    head = model.get_layer("head").get_weights()[0].tolist()
    return {"steps": ended, "error": error, "head": head, "foreign": foreign}


def fit(way):
    """The same under `fit`."""
    import horovod.tensorflow as hvd

    hvd.init()
    model, optimizer = make_model("sok" if "sok" in way else "dmp"), tf.keras.optimizers.SGD(RATE)
    if "sok" in way:
        optimizer = sok.OptimizerWrapper(optimizer)
    if "horovod" in way:
        optimizer = hvd.DistributedOptimizer(optimizer)
    if way == "fit_dmp":
        optimizer = dmp.DistributedOptimizer(optimizer)
    if way == "fit_own_step":
        model = OwnStep(model.input, model.output)
    model.compile(optimizer, "mse")
    keys, targets = map(np.concatenate, data())
    ended = []
    seen = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: ended.append(1))
    how = {"batch_size": 4, "shuffle": False, "callbacks": [seen], "verbose": 0}
    error = raised(lambda: model.fit(keys, targets, **how))
    return what_is_left(model, len(ended), error)


class OwnStep(tf.keras.Model):
    """Averages by hand what a stock optimizer takes."""

    def train_step(self, data):
        import horovod.tensorflow as hvd

        keys, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(keys, training=True) - targets) ** 2)
        variables = self.trainable_variables
        gradients = [
            g if dmp.is_local(v) else hvd.allreduce(g, name="own_step")
            for g, v in zip(tape.gradient(loss, variables), variables, strict=True)
        ]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def broadcast():
    """Weights that differ by rank, after Horovod's broadcast; the rows, before and after."""
    import horovod.tensorflow as hvd

    hvd.init()
    layer = dmp.DistributedEmbedding([tf.keras.layers.Embedding(6, 4)])
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    layer.set_weights([whole])
    shared = tf.Variable([float(sok.rank())])
    variables = [getattr(v, "_value", v) for v in layer.variables]
    hvd.broadcast_variables([*variables, shared], root_rank=1)
    (after,) = layer.get_weights(all_ranks=True)
    return {"shared": shared.numpy().tolist(), "kept": bool((after == whole).all())}


def check_told(ranks, steps):
    for found in ranks:
        assert found["steps"] == steps
        kind, message = found["error"]
        assert kind == "InvalidArgumentError"
        assert "stay alike" in message and "average their gradients" in message
        assert "'head" in message and "kernel" in message


def check_alike(ranks):
    for found in ranks:
        assert found["error"] is None and found["steps"] == STEPS
        assert found["foreign"] == 0
        assert found["head"] == ranks[0]["head"]
    assert ranks[0]["head"] != [[1.0]] * len(ranks[0]["head"])


@pytest.mark.parametrize(
    "door, way, compiled",
    [
        *(("dmp", "nothing", False), ("dmp_by_rank", "nothing", False), ("sok", "nothing", False)),
        *(("group", "nothing", True), ("sok", "apart", True)),  # tables and others one by one
    ],
)
def test_nothing_averages(on_processes, door, way, compiled):
    ranks = on_processes(2, loop, door, way, compiled)
    check_told(ranks, steps=1)
    assert ranks[0]["head"] != ranks[1]["head"]


def test_other_weights_at_the_start(on_processes):
    check_told(on_processes(2, loop, "dmp", "start", False), steps=1)


@pytest.mark.parametrize("way", ["fit_stock", "fit_dmp", "fit_horovod", "fit_own_step"])
def test_under_fit(on_processes, way):
    ranks = on_processes(2, fit, way)
    # Under Keras 3 Horovod's wrapper averages nothing.
    averages = os.environ.get("TF_USE_LEGACY_KERAS") == "1" and way == "fit_horovod"
    if way in ("fit_stock", "fit_horovod") and not averages:
        check_told(ranks, steps=1)
        return
    check_alike(ranks)
    right = on_processes(2, fit, "fit_dmp")
    np.testing.assert_allclose(ranks[0]["head"], right[0]["head"], rtol=1e-5)


@pytest.mark.parametrize("door, compiled", [("dmp", True), ("sok", False)])
def test_programs_and_horovods_tape_average_and_leave_tables_alone(on_processes, door, compiled):
    right = on_processes(2, loop, door, "by_hand", compiled)
    check_alike(right)
    ranks = on_processes(2, loop, door, "horovod", compiled)
    check_alike(ranks)
    np.testing.assert_allclose(ranks[0]["head"], right[0]["head"], rtol=1e-5)


@pytest.mark.keras(slow=True)
def test_horovods_optimizer_leaves_tables_alone(on_processes):
    ranks, right = (on_processes(2, fit, way) for way in ("fit_sok_in_horovod", "fit_sok"))
    check_alike(ranks)
    np.testing.assert_allclose(ranks[0]["head"], right[0]["head"], rtol=1e-5)


def test_horovods_broadcast_leaves_tables_alone(on_processes):
    assert on_processes(2, broadcast) == [{"shared": [1.0], "kept": True}] * 2
