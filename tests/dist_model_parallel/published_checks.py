"""What programs for DMP do on each rank: one id a sample, odd batches, tf_keras' old optimizers."""

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

# So many that each of four ranks has an input of one id a sample: in a graph it must have one.
SIZES = [(7, 3), (5, 2), (9, 4), (4, 2), (6, 3), (3, 5), (8, 2)]
LISTS = 2  # the table whose samples are lists of ids
LOCAL = 2  # samples of a rank
RATE = 0.5


def tables():
    rng = np.random.default_rng(5)
    return [rng.normal(size=size).astype(np.float32) for size in SIZES]


def ids(world_size):
    """Ids of the global batch, table by table: one of each sample, for table `LISTS` a list."""
    rng = np.random.default_rng(6)
    found = [rng.integers(0, rows, LOCAL * world_size) for rows, _ in SIZES]
    found[LISTS] = [rng.integers(0, 9, k % 3).tolist() for k in range(LOCAL * world_size)]
    return found


def one_id_a_sample():
    """Outputs outside of a graph, in one, and for sparse ids; tables after a step; errors."""
    current = comm.current()
    plain = [sok.Embedding(*size) for size in SIZES[1:]]
    layers = [tf.keras.layers.Embedding(*SIZES[0]), *plain]
    layers[LISTS] = sok.Embedding(*SIZES[LISTS], combiner="sum")
    layer = dmp.DistributedEmbedding(layers, dp_input=False)
    layer.set_weights(tables())
    mine = layer.strategy.input_ids_list[current.rank]
    given = ids(current.world_size)
    ragged = tf.ragged.constant(given[LISTS], dtype=tf.int64, row_splits_dtype=tf.int64)
    given = [ragged if i == LISTS else tf.constant(each) for i, each in enumerate(given)]
    inputs = [given[i] for i in mine]

    @tf.function
    def step(inputs):
        with tf.GradientTape() as tape:
            outputs = layer(inputs)
            loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs]) / LOCAL
        tape = dmp.DistributedGradientTape(tape)
        return outputs, tape.gradient(loss, layer.trainable_variables)

    seen = {"eager": [output.numpy() for output in layer(inputs)]}
    given[LISTS] = ragged.to_sparse()
    seen["sparse"] = [output.numpy() for output in layer([given[i] for i in mine])]
    outputs, gradients = step(inputs)
    seen["graph"] = [output.numpy() for output in outputs]
    rows = [tf.convert_to_tensor(gradient) for gradient in gradients]
    for row, variable in zip(rows, layer.trainable_variables, strict=True):
        variable.assign_sub(RATE * row)
    seen["tables"] = layer.get_weights(all_ranks=True)
    seen["odd"] = error_of(layer, [each[1:] for each in inputs])
    # In a graph one input of two axes beside one of one axis.
    mixed = [tf.reshape(given[i], [-1, 1]) if i == 0 else given[i] for i in mine]
    seen["mixed"] = error_of(tf.function(lambda inputs: layer(inputs)), mixed)
    seen["mixed eager"] = [tuple(output.shape) for output in layer(mixed)]
    return seen


def error_of(function, inputs):
    try:
        function(inputs)
    except Exception as error:
        return isinstance(error, ValueError), str(error)
    return None


def old_optimizer():
    """Steps of tf_keras' legacy Adam through DistributedOptimizer; None under Keras 3."""
    if not hasattr(tf.keras, "__internal__"):
        return None
    current = comm.current()
    layer = dmp.DistributedEmbedding([sok.Embedding(*size) for size in SIZES])
    head = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    inputs = [tf.keras.Input([], dtype="int64") for _ in SIZES]
    model = tf.keras.Model(inputs, head(tf.concat(layer(inputs), 1)))
    optimizer = tf.keras.optimizers.legacy.Adam(0.1)
    model.compile(dmp.DistributedOptimizer(optimizer), "mse")
    layer.set_weights(tables())
    x, y = old_data(current.world_size)
    part = slice(LOCAL * current.rank, LOCAL * (current.rank + 1))
    for _ in range(2):
        model.train_on_batch([each[part] for each in x], y[part])
    return [*layer.get_weights(all_ranks=True), *head.get_weights()]


def old_data(world_size):
    rng = np.random.default_rng(7)
    x = [tf.constant(rng.integers(0, rows, LOCAL * world_size)) for rows, _ in SIZES]
    return x, tf.constant(rng.normal(size=[LOCAL * world_size, 1]), tf.float32)


def published():
    """The checks of this file, in a launch of their own."""
    sok.Init(global_batch_size=12, seed=7)
    return {"one_id_a_sample": one_id_a_sample(), "old_optimizer": old_optimizer()}
