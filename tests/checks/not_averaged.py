"""Ordinary gradients that nothing averages over ranks, and ways to average them in a program."""

import functools

import numpy as np
import tensorflow as tf

from tests.checks.drift import raised, rank

DOORS = ("dmp", "dmp_by_rank", "sok", "group")
# A persistent tape is asked for tables and for ordinary variables one after the other; the ranks
# start with other weights; the program averages, or Horovod's tape does.
OTHERS = (("sok", "apart"), ("dmp", "start"))
OTHERS += tuple((door, way) for door in ("dmp", "sok") for way in ("by_hand", "horovod"))
FITS = ("fit_stock", "fit_dmp", "fit_horovod", "fit_own_step")
FITS_OF_TABLES = ("fit_sok", "fit_sok_in_horovod")
STEPS, RATE = 5, 0.5


def checks(world_size):
    if world_size == 1:
        return {}
    every = {
        f"{door}_{way}_{mode}": functools.partial(loop, door, way, mode == "graph")
        for mode in ("eager", "graph")
        for door, way in [*((door, "nothing") for door in DOORS), *OTHERS]
    }
    for way in (*FITS, *FITS_OF_TABLES):
        every[way] = functools.partial(fit, way)
    every["broadcast"] = broadcast
    return every


def make_model(door, start=1.0, scale="auto"):
    """A model with one ordinary variable, `head`, that is the same on all ranks."""
    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

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
            (rows, _) = layer([keys] * len(layer.strategy.input_ids_list[rank()]))
    head = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer=constant(start), name="head")
    return tf.keras.Model(keys, head(tf.keras.layers.Flatten()(rows)))


def constant(value):
    return tf.keras.initializers.Constant(value)


def data(door="dmp"):
    rng = np.random.default_rng(rank())
    size = [8 if door == "dmp_by_rank" else 4, 2]
    keys = [rng.integers(0, 16, size) for _ in range(STEPS)]
    return keys, rng.normal(size=[STEPS, 4, 1]).astype(np.float32)


def loop(door, way, compiled):
    """Steps that ended, what the next one raised, and the kernel of the head."""
    import horovod.tensorflow as hvd

    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    hvd.init()
    scale = "mean" if way in ("by_hand", "horovod") else "auto"
    model = make_model(door, start=1.0 + rank() if way == "start" else 1.0, scale=scale)
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
    return {"steps": ended, "error": error, "head": head_of(model), "foreign": foreign(model)}


def foreign(model):
    """How many keys of other ranks this rank's tables hold."""
    import sok_like as sok
    from sok_like.table.variable import is_embedding_variable

    tables = [variable for variable in model.variables if is_embedding_variable(variable)]
    keys = np.concatenate([[], *(sok.export(table)[0] for table in tables)])
    return int((keys % sok.size() != rank()).sum())


def head_of(model):
    return model.get_layer("head").get_weights()[0].tolist()


def fit(way):
    """The same under `fit`."""
    import horovod.tensorflow as hvd

    import sok_like as sok
    from sok_like import dist_model_parallel as dmp

    hvd.init()
    model = make_model("sok" if way in FITS_OF_TABLES else "dmp")
    optimizer = tf.keras.optimizers.SGD(RATE)
    if way in FITS_OF_TABLES:
        optimizer = sok.OptimizerWrapper(optimizer)
        if way == "fit_sok_in_horovod":
            optimizer = hvd.DistributedOptimizer(optimizer)
    elif way == "fit_dmp":
        optimizer = dmp.DistributedOptimizer(optimizer)
    elif way == "fit_horovod":
        optimizer = hvd.DistributedOptimizer(optimizer)
    elif way == "fit_own_step":
        model = OwnStep(model.input, model.output)
    model.compile(optimizer, "mse")
    keys, targets = data()
    ended = []
    seen = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: ended.append(1))
    arrays = np.concatenate(keys), np.concatenate(targets)
    how = {"batch_size": 4, "shuffle": False, "callbacks": [seen], "verbose": 0}
    error = raised(lambda: model.fit(*arrays, **how))
    return {
        "steps": len(ended),
        "error": error,
        "head": head_of(model),
        "foreign": foreign(model),
    }


class OwnStep(tf.keras.Model):
    """Averages by hand what a stock optimizer takes."""

    def train_step(self, data):
        import horovod.tensorflow as hvd

        from sok_like import dist_model_parallel as dmp

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

    from sok_like import dist_model_parallel as dmp

    hvd.init()
    layer = dmp.DistributedEmbedding([tf.keras.layers.Embedding(6, 4)])
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    layer.set_weights([whole])
    shared = tf.Variable([float(rank())])
    variables = [getattr(v, "_value", v) for v in layer.variables]
    hvd.broadcast_variables([*variables, shared], root_rank=1)
    (after,) = layer.get_weights(all_ranks=True)
    return {"shared": shared.numpy().tolist(), "kept": bool((after == whole).all())}
