"""The snippets of DMP's user guide: a model and a training step of which three lines are changed.

They are run as its readers have them; where it leaves lines out, here are the fewest that make a
program.
"""

import numpy as np
import tensorflow as tf

from sok_like import dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

TABLE_SIZES = [(40, 4), (9, 4), (3, 4)]
STEPS, LOCAL_BATCH, RATE = 3, 5, 0.5


def make_model(table_sizes):
    class MyEmbeddingModel(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding_layers = [tf.keras.layers.Embedding(*size) for size in table_sizes]
            # add this line to wrap list of embedding layers used in the model
            self.embedding_layers = dmp.DistributedEmbedding(self.embedding_layers)
            self.head = tf.keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            # embedding_outputs = [e(i) for e, i in zip(self.embedding_layers, inputs)]
            embedding_outputs = self.embedding_layers(inputs)
            return self.head(tf.concat(embedding_outputs, axis=1))

    return MyEmbeddingModel()


def make_training_step(model, loss, opt):
    @tf.function
    def training_step(inputs, labels, first_batch):
        with tf.GradientTape() as tape:
            probs = model(inputs)
            loss_value = loss(labels, probs)

        # Change Horovod Gradient Tape to dmp tape
        # tape = hvd.DistributedGradientTape(tape)
        tape = dmp.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905

        if first_batch:
            # Change Horovod broadcast_variables to dmp's
            # hvd.broadcast_variables(model.variables, root_rank=0)
            dmp.broadcast_variables(model.variables, root_rank=0)
        return loss_value

    return training_step


def tables():
    rng = np.random.default_rng(21)
    return [rng.normal(size=size).astype(np.float32) for size in TABLE_SIZES]


def samples(step, rank):
    """A rank's batch: ids `[batch]` of each table, labels `[batch, 1]`."""
    rng = np.random.default_rng([22, step, rank])
    ids = [rng.integers(0, rows, LOCAL_BATCH) for rows, _ in TABLE_SIZES]
    return ids, rng.normal(size=[LOCAL_BATCH, 1]).astype(np.float32)


def user_guide():
    """Trains as the guide does; the tables, the dense weights, and what its later lines make."""
    rank = comm.current().rank
    model = make_model(TABLE_SIZES)
    model([tf.constant(ids) for ids in samples(0, rank)[0]])
    model.embedding_layers.set_weights(tables())
    opt, loss = tf.keras.optimizers.SGD(RATE), tf.keras.losses.MeanSquaredError()
    training_step = make_training_step(model, loss, opt)
    for step in range(STEPS):
        ids, labels = samples(step, rank)
        training_step([tf.constant(x) for x in ids], tf.constant(labels), step == 0)

    embedding_layers = [tf.keras.layers.Embedding(*size) for size in TABLE_SIZES]
    # Split embedding tables that are larger than 20000000 elements (not Bytes)
    embedding_layers = dmp.DistributedEmbedding(embedding_layers, column_slice_threshold=20000000)
    whole = [w.shape for w in embedding_layers.get_weights(all_ranks=True)]

    embedding_layers = [tf.keras.layers.Embedding(*size) for size in [*TABLE_SIZES, (6, 2)]]
    # The first and the last input both map to embedding 0
    embedding_layers = dmp.DistributedEmbedding(
        embedding_layers,
        input_table_map=[0, 1, 2, 3, 0])  # fmt: skip
    embedding_layers.build(None)
    embedding_layers.set_weights([*tables(), np.zeros([6, 2])])
    outputs = embedding_layers([tf.constant([2])] * 5)
    return {
        "tables": model.embedding_layers.get_weights(all_ranks=True),
        "head": model.head.get_weights(),
        "whole": whole,
        "first": outputs[0].numpy(),
        "last": outputs[4].numpy(),
    }
