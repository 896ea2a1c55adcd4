"""Keras' `fit` on ranks, each with a part of the batch: what each rank finds."""

import warnings

import numpy as np
import tensorflow as tf

BATCH, STEPS, RATE = 12, 3, 0.5  # samples of all ranks in a step
KEYS = np.array([-7, 0, 3, 2**40])
SCORES = (2.0, 1.0, 3.0, 4.0)  # of epochs
TUNED = (0.5, 0.1)  # learning rates of two optimizers, one after the other


def checks(world_size):
    found = {f"fit_{door}": lambda door=door: fit(door) for door in DOORS}
    return {
        **found,
        "tuned": tuned,
        "best_restored": best_restored,
        "own_train_step": own_train_step,
        "own_loop": own_loop,
        "padding": padding,
    }


def samples():
    """Keys `[STEPS * BATCH, 2]`, some shared by all samples, and targets `[STEPS * BATCH]`."""
    rng = np.random.default_rng(3)
    keys = rng.choice(KEYS, [STEPS * BATCH, 2])
    return keys, rng.normal(size=STEPS * BATCH).astype(np.float32)


def mine(array):
    """This rank's part of every batch, in order."""
    from sok_like.runtime.ranks import comm

    rank, world_size = comm.current().rank, comm.current().world_size
    steps = array.reshape(STEPS, world_size, BATCH // world_size, *array.shape[1:])
    return steps[:, rank].reshape(-1, *array.shape[1:])


class _Sok(tf.keras.layers.Layer):
    def __init__(self, name):
        super().__init__(name=name)
        self.lookup = self.make(name)

    def call(self, keys):
        return self.lookup(keys)


class Distributed(_Sok):
    def make(self, name):
        import sok_like as sok

        return sok.DistributedEmbedding(
            "sum", None, 1, slot_num=2, max_nnz=1, embedding_initializer="zeros", name=name
        )

    def table(self):
        return self.lookup.table


class AllToAll(Distributed):
    def make(self, name):
        import sok_like as sok

        return sok.All2AllDenseEmbedding(None, 1, 2, 1, embedding_initializer="zeros", name=name)


class Group(tf.keras.layers.Layer):
    def __init__(self, name):
        import sok_like as sok
        from sok_like.table.keras_variable import as_weight

        super().__init__(name=name)
        self.weight = as_weight(sok.EmbeddingVariable(1, name=name, initializer="zeros"))

    def call(self, keys):
        import sok_like as sok

        (rows,) = sok.group_embedding_lookup([self.table()], [keys], name=self.name)
        return rows

    def table(self):
        from sok_like.table.variable import unwrap

        return unwrap(self.weight)


class GroupLayer(_Sok):
    def make(self, name):
        import sok_like as sok

        options = {"keys": {"initializer": "zeros"}}
        return sok.GroupEmbedding({"keys": 1}, combiners="sum", table_options=options, name=name)

    def call(self, keys):
        return self.lookup({"keys": keys})["keys"]

    def table(self):
        return self.lookup.tables["keys"]


class Columns(_Sok):
    def make(self, name):
        from sok_like import feature_column as fc

        columns = [
            fc.embedding_column(
                fc.categorical_column_with_embedding(f"{name}_keys", dtype=tf.int64),
                1,
                "sum",
                initializer=tf.zeros_initializer(),
            )
        ]
        return fc.DenseFeatures(columns, name=name)

    def call(self, keys):
        return self.lookup({f"{self.name}_keys": tf.sparse.from_dense(keys + 10)})

    def table(self):
        from sok_like.table.variable import unwrap

        return unwrap(self.lookup.trainable_variables[0])


DOORS = {
    "distributed": Distributed,
    "all_to_all": AllToAll,
    "group": Group,
    "group_layer": GroupLayer,
    "columns": Columns,
}


class Model(tf.keras.Model):
    """The sum of a sample's rows."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, keys):
        rows = self.layer(keys)
        return tf.reduce_sum(rows, axis=list(range(1, rows.shape.rank)))


def rows_of(table, shift=0):
    """This rank's rows, by key."""
    import sok_like as sok

    keys, rows = sok.export(table)
    return dict(zip((keys.numpy() - shift).tolist(), rows.numpy()[:, 0].tolist(), strict=True))


def fit(door):
    """Rows after three steps of `fit`, without a word on `gradient_scale`; warnings."""
    import sok_like as sok

    layer = DOORS[door](f"fit_{door}")
    model = Model(layer)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
    keys, targets = map(mine, samples())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(keys, targets, batch_size=len(keys) // STEPS, shuffle=False, verbose=0)
    told = [str(w.message) for w in caught if "gradient_scale" in str(w.message)]
    return {"rows": rows_of(layer.table(), 10 if door == "columns" else 0), "told": told}


def tuned():
    """Rows after `compile` and `fit` twice, each time with an Adam of its own."""
    import sok_like as sok

    layer = Distributed("tuned")
    model = Model(layer)
    keys, targets = map(mine, samples())
    for rate in TUNED:
        model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(rate)), "mse")
        model.fit(keys, targets, batch_size=len(keys) // STEPS, shuffle=False, verbose=0)
    return rows_of(layer.table())


class Epochs(tf.keras.callbacks.Callback):
    """Gives each epoch its score, and keeps the rows at its end."""

    def __init__(self, table):
        super().__init__()
        self.table, self.rows = table, []

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = SCORES[epoch]
        self.rows.append(rows_of(self.table))


def best_restored():
    """Rows at the end of each epoch, and after EarlyStopping has put the best ones back."""
    import sok_like as sok

    layer = Distributed("best_restored")
    model = Model(layer)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(RATE)), "mse")
    keys, targets = map(mine, samples())
    epochs = Epochs(layer.table())
    stopping = tf.keras.callbacks.EarlyStopping(
        "score", mode="min", patience=1, restore_best_weights=True
    )
    options = {"batch_size": len(keys) // STEPS, "shuffle": False, "verbose": 0}
    model.fit(keys, targets, epochs=len(SCORES), callbacks=[epochs, stopping], **options)
    return epochs.rows, rows_of(layer.table())


class OwnStep(Model):
    def train_step(self, data):
        keys, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(keys, training=True) - targets) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def own_train_step():
    """The same with a `train_step` of the program's own, in graphs and eagerly."""
    import sok_like as sok

    found = []
    for run_eagerly in (False, True):
        layer = Distributed(f"own_step_{run_eagerly}")
        model = OwnStep(layer)
        model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), run_eagerly=run_eagerly)
        keys, targets = map(mine, samples())
        model.fit(keys, targets, batch_size=len(keys) // STEPS, shuffle=False, verbose=0)
        found.append(rows_of(layer.table()))
    return found


def own_loop():
    """A loop that divides by the batch of all ranks, and the warnings of two such loops."""
    import sok_like as sok
    from sok_like.runtime.ranks import lookup_options

    lookup_options._warned = False
    keys, targets = map(mine, samples())
    found = {"told": []}
    for scale in ("auto", "auto", "sum", "mean"):
        layer = sok.DistributedEmbedding(
            *("sum", None, 1),
            slot_num=2,
            max_nnz=1,
            embedding_initializer="zeros",
            gradient_scale=scale,
            name="own_loop",
        )
        model, optimizer = Model(layer), sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
        divisor = len(keys) // STEPS if scale == "mean" else BATCH

        @tf.function
        def step(keys, targets, model=model, optimizer=optimizer, divisor=divisor):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(keys) - targets) ** 2) / divisor
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for part in zip(np.split(keys, STEPS), np.split(targets, STEPS), strict=True):
                step(*map(tf.constant, part))
        found["told"] += [str(w.message) for w in caught if "gradient_scale" in str(w.message)]
        found[scale] = rows_of(layer.table)
    return found


def padding():
    """Outputs before and this rank's rows after a step, of both layers, where -1 is padding.

    Rank 0 has key 1 and padding, rank 1 has padding alone, and so on.
    """
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    keys = tf.constant([[[1, -1], [-1, -1]], [[1, 5], [-1, 1]]], tf.int64)
    if comm.current().rank % 2:
        keys = tf.fill([1, 2, 2], tf.constant(-1, tf.int64))
    options = {"embedding_initializer": "ones", "pad_key": -1, "gradient_scale": "sum"}
    layers = {
        "sum": sok.DistributedEmbedding("sum", None, 1, 2, 2, name="padded_sum", **options),
        "mean": sok.DistributedEmbedding("mean", None, 1, 2, 2, name="padded_mean", **options),
        "none": sok.All2AllDenseEmbedding(None, 1, 2, 2, name="padded_none", **options),
    }
    found = {}
    for name, layer in layers.items():
        with tf.GradientTape() as tape:
            output = layer(keys)
            loss = tf.reduce_sum(output)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        found[name] = {"output": output.numpy().tolist(), "rows": rows_of(layer.table)}
    return found
