"""What numbers of ranks read that other numbers wrote, by the ways besides hash layers and Keras.

    dense     tables of `dist_model_parallel`, each sliced in its own way, in tf.train.Checkpoint
              and in Keras' files
    tape      the same with optimizers of TensorFlow 1, and legacy ones
    parallel  Keras' ModelParallel, in tf.train.Checkpoint and in .weights.h5
    session   tf.compat.v1.train.Saver
    dump      sok.Saver
    backup    Keras' BackupAndRestore, stopped in the third epoch

All train the same samples from the same values, so one dense model of stock layers, which the test
trains in its own process, says what each must hold.
"""

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.dist_model_parallel.dense_tables import slot_objects
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.runtime.ranks import comm
from tests.checks.files import BATCH, Interrupted

RATE, WRITTEN, EPOCHS = 0.05, 2, 4
# At most 36 elements: replicated; at least 150: by rows; beyond 100: by columns.
TABLES = [(20, 4), (13, 8), (16, 6), (40, 4), (12, 3)]
WAYS = {"row_slice_threshold": 150, "column_slice_threshold": 100, "data_parallel_threshold": 36}


def write(kind, folder):
    globals()[kind]().write(folder)


def read(kind, folder):
    """What was held after reading, and after more epochs."""
    return globals()[kind]().read(folder)


def initial():
    rng = np.random.default_rng(11)
    tables = [rng.normal(size=size).astype(np.float32) for size in TABLES]
    return tables, rng.normal(size=[sum(dim for _, dim in TABLES), 1]).astype(np.float32)


def samples():
    """One id per sample and table, each once; and targets."""
    rng = np.random.default_rng(12)
    ids = [rng.permutation(rows)[:BATCH].reshape(BATCH, 1) for rows, _ in TABLES]
    return ids, rng.normal(size=[BATCH, 1]).astype(np.float32)


def mine(array):
    count = BATCH // comm.current().world_size
    return array[comm.current().rank * count : (comm.current().rank + 1) * count]


def fit(model, ids, epochs, split=True, **options):
    _, targets = samples()
    if split:
        ids, targets = tf.nest.map_structure(mine, (ids, targets))
    shuffled = {"batch_size": len(targets), "shuffle": False, "verbose": 0}
    return model.fit(ids, targets, epochs=epochs, **shuffled, **options)


def on_top(rows, kernel, name):
    """A model of the tables' rows and one output, which begins with `kernel`."""
    flat = [tf.keras.layers.Flatten()(each) for each in rows]
    flat = flat[0] if len(flat) == 1 else tf.keras.layers.Concatenate()(flat)
    start = tf.keras.initializers.Constant(kernel)
    return tf.keras.layers.Dense(1, kernel_initializer=start, name=f"{name}_top")(flat)


def slots(optimizer, variable):
    """Adam's, of a variable that is whole on this rank."""
    return {
        name: np.array(slot) for name, slot in sorted(slot_objects(optimizer, variable).items())
    }


class Dense:
    kinds = ("c", "w.weights.h5", "m.keras")

    def make(self):
        tables, kernel = initial()
        inputs = [tf.keras.Input([1], dtype="int64") for _ in TABLES]
        layer = dmp.DistributedEmbedding(
            [tf.keras.layers.Embedding(*size) for size in TABLES],
            strategy="memory_balanced",
            name="dense_tables",
            **WAYS,
        )
        model = tf.keras.Model(inputs, on_top(layer(inputs), kernel, "dense"))
        optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(RATE))
        model.compile(optimizer, "mse", run_eagerly=True)
        return model, layer, tables

    def write(self, folder):
        model, layer, tables = self.make()
        layer.set_weights(tables)
        fit(model, samples()[0], WRITTEN)
        tf.train.Checkpoint(model=model).write(str(folder / "c"))
        model.save_weights(str(folder / "w.weights.h5"))
        model.save(str(folder / "m.keras"))

    def read(self, folder):
        found = {}
        for kind in self.kinds:
            model, layer = self.read_kind(kind, folder)
            states = [self.held(model, layer)]
            fit(model, samples()[0], EPOCHS - WRITTEN)
            found[kind] = [*states, self.held(model, layer)]
        return found

    def read_kind(self, kind, folder):
        if kind == "m.keras":
            model = tf.keras.models.load_model(str(folder / kind))
            model.compile(model.optimizer, "mse", run_eagerly=True)
            return model, next(each for each in model.layers if hasattr(each, "strategy"))
        model, layer, _ = self.make()
        if kind == "c":
            status = tf.train.Checkpoint(model=model).read(str(folder / kind))
            status.assert_existing_objects_matched().assert_consumed()
        else:
            fit(model, samples()[0], 1)  # what is there is replaced
            model.load_weights(str(folder / kind))
        return model, layer

    def held(self, model, layer):
        state = layer.get_optimizer_state(model.optimizer, all_ranks=True)
        top = model.layers[-1].kernel
        return {
            "tables": layer.get_weights(all_ranks=True),
            "slots": [*state["tables"], slots(model.optimizer, top)],
            "kernel": np.array(top),
            "iterations": state["iterations"],
        }


class DenseTape(Dense):
    """The same tables, trained in a loop by TensorFlow 1's optimizer, or a legacy one of tf_keras.

    Their slot variables can be read by no name, so what the further epochs make of them tells.
    """

    kinds = ("v1",) if hasattr(tf.keras, "version") else ("v1", "legacy")

    @staticmethod
    def optimizer(kind):
        if kind == "v1":
            return tf.compat.v1.train.AdamOptimizer(RATE)
        return tf.keras.optimizers.legacy.Adam(RATE)

    @staticmethod
    def train(lookup, tables, optimizer, epochs, tape=lambda tape: tape, part=lambda array: array):
        """Steps over the samples, by what `lookup` makes of the ids; the kernel is constant."""
        ids, targets = samples()
        kernel, variables = tf.constant(initial()[1]), [as_tf_table(each) for each in tables]
        for _ in range(epochs):
            with tape(tf.GradientTape()) as gradients:
                rows = lookup([tf.constant(part(each)) for each in ids])
                flat = tf.concat([tf.reshape(each, [-1, each.shape[-1]]) for each in rows], 1)
                loss = tf.reduce_mean((tf.matmul(flat, kernel) - part(targets)) ** 2)
            found = gradients.gradient(loss, variables)
            optimizer.apply_gradients(zip(found, variables, strict=True))

    def make_kind(self, kind):
        layer = dmp.DistributedEmbedding(
            [tf.keras.layers.Embedding(*size) for size in TABLES],
            strategy="memory_balanced",
            name=f"dense_tape_{kind}",
            **WAYS,
        )
        layer.set_weights(initial()[0])
        optimizer = self.optimizer(kind)

        def train(epochs):
            tables, tape = layer.trainable_variables, dmp.DistributedGradientTape
            self.train(layer, tables, optimizer, epochs, tape, mine)

        return layer, tf.train.Checkpoint(layer=layer, optimizer=optimizer), train

    def write(self, folder):
        for kind in self.kinds:
            _, checkpoint, train = self.make_kind(kind)
            train(WRITTEN)
            checkpoint.write(str(folder / kind))

    def read(self, folder):
        found = {}
        for kind in self.kinds:
            layer, checkpoint, train = self.make_kind(kind)
            train(1)  # what is there is replaced
            checkpoint.read(str(folder / kind)).assert_existing_objects_matched()
            states = [layer.get_weights(all_ranks=True)]
            train(EPOCHS - WRITTEN)
            found[kind] = [*states, layer.get_weights(all_ranks=True)]
        return found


class Parallel:
    """The table of 40 rows by rows, the one of 12 dimensions joined, the top's kernel by rows."""

    kinds = ("c", "w.weights.h5")

    def make(self):
        size = comm.current().world_size
        distribution = sok.distribution
        devices = [f"cpu:{rank}" for rank in range(size)]
        mesh = distribution.DeviceMesh((1, size), ("batch", "model"), devices)
        layouts = distribution.LayoutMap(mesh)
        layouts["parallel_rows/embeddings"] = ("model", None)
        layouts["parallel_columns/embeddings"] = (None, "model")
        layouts["parallel_top/kernel"] = ("model", None)
        (rows, columns), kernel = self.initial()
        with distribution.ModelParallel(mesh, layouts).scope():
            inputs = [tf.keras.Input([1], dtype="int64") for _ in range(2)]
            layers = []
            for name, values in (("rows", rows), ("columns", columns)):
                start = tf.keras.initializers.Constant(values)
                layer = tf.keras.layers.Embedding(*values.shape, start, name=f"parallel_{name}")
                layers.append(layer)
            vectors = [layer(each) for layer, each in zip(layers, inputs, strict=True)]
            model = tf.keras.Model(inputs, on_top(vectors, kernel, "parallel"))
            model.compile(tf.keras.optimizers.Adam(RATE), "mse", run_eagerly=True)
        return model, layers

    def initial(self):
        """Tables of 36 and 24 columns' parts: what 1 to 4 ranks divide."""
        rng = np.random.default_rng(13)
        tables = [rng.normal(size=size).astype(np.float32) for size in ((24, 4), (16, 12))]
        return tables, rng.normal(size=[16, 1]).astype(np.float32)

    def ids(self):
        rng = np.random.default_rng(14)
        return [rng.permutation(rows)[:BATCH].reshape(BATCH, 1) for rows in (24, 16)]

    def write(self, folder):
        model, _ = self.make()
        fit(model, self.ids(), WRITTEN, split=False)
        tf.train.Checkpoint(model=model).write(str(folder / "c"))
        model.save_weights(str(folder / "w.weights.h5"))

    def read(self, folder):
        found = {}
        for kind in self.kinds:
            model, layers = self.make()
            fit(model, self.ids(), 1, split=False)  # what is there is replaced
            if kind == "c":
                status = tf.train.Checkpoint(model=model).read(str(folder / kind))
                status.assert_existing_objects_matched().assert_consumed()
            else:
                model.load_weights(str(folder / kind))
            states = [self.held(model, layers)]
            fit(model, self.ids(), EPOCHS - WRITTEN, split=False)
            found[kind] = [*states, self.held(model, layers)]
        return found

    def held(self, model, layers):
        return {
            "tables": [np.array(layer.embeddings) for layer in layers],
            "kernel": np.array(model.layers[-1].kernel),
            "iterations": int(tf.convert_to_tensor(model.optimizer.iterations)),
        }


class Dump:
    """One hash table, which begins with the rows of the first of TABLES."""

    name = "other_ranks"

    def make(self):
        (rows, *_), kernel = initial()
        keys = tf.keras.Input([1], dtype="int64")
        layer = sok.DistributedEmbedding("sum", None, 4, slot_num=1, max_nnz=1, name=self.name)
        model = tf.keras.Model(keys, on_top([layer(keys)], kernel[:4], self.name))
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(RATE))
        model.compile(optimizer, "mse", run_eagerly=True)
        model(samples()[0][0])
        table = layer.embedding_variable
        sok.assign(table, np.arange(len(rows)), rows)
        return model, table

    def write(self, folder):
        model, table = self.make()
        fit(model, samples()[0][0], WRITTEN)
        sok.Saver().dump(table, folder)
        if sok.rank() == 0:
            np.savez(folder / "top.npz", *model.layers[-1].get_weights())

    def read(self, folder):
        model, table = self.make()
        fit(model, samples()[0][0], 1)
        sok.Saver().restore(table, folder)
        return [self.held(model, table)]

    def held(self, model, table):
        snapshot = table.snapshot()
        held = {name: np.asarray(getattr(snapshot, name)) for name in ("keys", "rows", "slot_rows")}
        return {
            **held,
            "kernel": np.array(model.layers[-1].kernel),
            "iterations": int(snapshot.optimizer_step),
        }


class Backup(Dump):
    name = "other_ranks_backup"

    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == WRITTEN:
                raise Interrupted

    def callback(self, folder):
        return tf.keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False)

    def write(self, folder):
        model, _ = self.make()
        try:
            fit(model, samples()[0][0], EPOCHS, callbacks=[self.callback(folder), self.Stop()])
        except Interrupted:
            pass

    def read(self, folder):
        model, table = self.make()
        epochs = fit(model, samples()[0][0], EPOCHS, callbacks=[self.callback(folder)]).epoch
        return [{"epochs": epochs, **self.held(model, table)}]


class Session:
    """One hash table and a constant kernel, by TensorFlow 1's Adam."""

    def write(self, folder):
        self.run(lambda running, saver: saver.save(running, str(folder / "model.ckpt")), WRITTEN)

    def read(self, folder):
        def restore(running, saver):
            saver.restore(running, str(folder / "model.ckpt"))

        return self.run(restore, 0, EPOCHS - WRITTEN)

    def run(self, between, before, after=0):
        v1 = tf.compat.v1
        (rows, *_), kernel = initial()
        found = []
        with tf.Graph().as_default():
            ids, targets = map(tf.constant, (mine(samples()[0][0]), mine(samples()[1])))
            table = sok.EmbeddingVariable(4, name="other_ranks_session")
            top = v1.get_variable("kernel", initializer=kernel[:4], trainable=False)
            step = v1.train.get_or_create_global_step()
            fill = sok.assign(table, np.arange(len(rows)), rows)
            vectors = tf.reshape(tf.gather(table, ids), [-1, 4])
            loss = tf.reduce_mean((tf.matmul(vectors, top) - targets) ** 2) / sok.size()
            optimizer = sok.OptimizerWrapper(v1.train.AdamOptimizer(RATE))
            train = optimizer.minimize(loss, global_step=step)
            kept = table.snapshot()
            content = [kept.keys, kept.rows, kept.slot_rows, step]
            saver = v1.train.Saver()
            with v1.Session() as running:
                running.run([v1.global_variables_initializer(), table.initializer])
                if before:
                    running.run(fill)
                for _ in range(before):
                    running.run(train)
                between(running, saver)
                for steps in (0, after):
                    for _ in range(steps):
                        running.run(train)
                    names = ("keys", "rows", "slot_rows", "iterations")
                    found.append(dict(zip(names, running.run(content), strict=True)))
        return found
