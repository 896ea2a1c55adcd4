"""A deep-and-cross program of DeepRec's kind: groups of tables, both ways, in a monitored session.

    cross_program.py data.csv checkpoints --way tables|columns|stock

Each line of the data is a label, two numbers and three texts, which are hashed to 63-bit keys. With
`--way stock` TensorFlow's own variables stand for the tables, and the texts end with row numbers.
"""

import argparse
import collections

import numpy as np
import tensorflow.compat.v1 as tf

import sok_like as sok

tf.disable_v2_behavior()
sok.deeprec.install()
tf.config.experimental.enable_distributed_strategy(strategy="collective")

import horovod.tensorflow as hvd  # noqa: E402

NUMBERS, TEXTS = ["I1", "I2"], {"C1": 4, "C2": 8, "C3": 4}  # and the width of their rows
BATCH, EPOCHS, RATE = 16, 2, 0.5
LAYERS = [8, 1]


def ramp(shape, dtype=None, partition_info=None):
    """The same numbers in every process, however many samples it has."""
    size = int(np.prod(shape))
    return tf.reshape(tf.cast(tf.range(size) % 7 - 3, tf.float32) / 10, shape)


def batches(path):
    """The batches of this rank: every n-th line."""

    def parse(lines):
        defaults = [[0], *[[0.0]] * len(NUMBERS), *[[" "]] * len(TEXTS)]
        read = tf.io.decode_csv(lines, record_defaults=defaults)
        columns = collections.OrderedDict(zip(["clicked", *NUMBERS, *TEXTS], read, strict=True))
        labels = columns.pop("clicked")
        return [columns[name] for name in NUMBERS], [columns[name] for name in TEXTS], labels

    lines = tf.data.TextLineDataset(path).shard(hvd.size(), hvd.rank()).repeat(EPOCHS)
    return lines.batch(BATCH // hvd.size()).map(parse).prefetch(2)


def by_tables(numbers, keys):
    """Rows by the lookup of a group of tables, and the numbers beside them."""
    tables, ids = [], []
    for (name, width), key in zip(TEXTS.items(), keys, strict=True):
        table = tf.get_embedding_variable(
            f"{name}_weight",
            embedding_dim=width,
            initializer=tf.ones_initializer(tf.float32),
            ev_option=tf.EmbeddingVariableOption(evict_option=None, filter_option=None),
        )
        table.target_gpu = -1
        tables.append(table)
        ids.append(tf.RaggedTensor.from_row_lengths(key, tf.ones_like(key)))
    rows = tf.nn.group_embedding_lookup_sparse(tables, ids, ["sum"] * len(tables))
    return tf.concat(rows + [tf.reshape(number, [-1, 1]) for number in numbers], axis=-1)


def by_columns(numbers, keys):
    """The same by feature columns in a group."""
    columns = [tf.feature_column.numeric_column(name) for name in NUMBERS]
    with tf.feature_column.group_embedding_column_scope(name="categorical"):
        for name, width in TEXTS.items():
            option = tf.EmbeddingVariableOption(evict_option=None, filter_option=None)
            column = tf.feature_column.categorical_column_with_embedding(
                key=name, dtype=tf.int64, ev_option=option
            )
            columns.append(
                tf.feature_column.embedding_column(
                    categorical_column=column,
                    dimension=width,
                    initializer=tf.ones_initializer(tf.float32),
                )
            )
    features = dict(zip(NUMBERS, numbers, strict=True))
    for name, key in zip(TEXTS, keys, strict=True):
        features[name] = tf.sparse.from_dense(tf.reshape(key, [-1, 1]))
    return tf.feature_column.input_layer(features, columns)


def by_stock(numbers, keys, scale):
    """The same by dense variables of TensorFlow, whose gradients are multiplied."""
    rows = []
    for (name, width), key in zip(TEXTS.items(), keys, strict=True):
        table = tf.get_variable(f"{name}_stock", [1000, width], initializer=tf.ones_initializer())
        found = tf.nn.embedding_lookup(table, key)
        rows.append(scale * found - tf.stop_gradient((scale - 1) * found))
    return tf.concat(rows + [tf.reshape(number, [-1, 1]) for number in numbers], axis=-1)


def dense(x, units, activation, name):
    kernel = tf.get_variable(f"{name}_kernel", [x.shape[-1], units], initializer=ramp)
    bias = tf.get_variable(f"{name}_bias", [units], initializer=tf.zeros_initializer())
    return activation(tf.matmul(x, kernel) + bias)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("checkpoints")
    parser.add_argument("--way", choices=("tables", "columns", "stock"), required=True)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0])
    arguments = parser.parse_args()
    for scale in arguments.scales:
        with tf.Graph().as_default():
            train(arguments, scale)


def train(arguments, scale):
    dataset = batches(arguments.data)
    iterator = tf.data.Iterator.from_structure(
        tf.data.get_output_types(dataset), tf.data.get_output_shapes(dataset)
    )
    numbers, texts, labels = iterator.get_next()
    numbers, texts = tf.unstack(numbers), tf.unstack(texts)
    start = iterator.make_initializer(dataset)
    if arguments.way == "stock":
        keys = [tf.strings.to_number(tf.strings.substr(each, 1, 3), tf.int64) for each in texts]
        x = by_stock(numbers, keys, scale)
    else:
        keys = [tf.strings.to_hash_bucket_fast(each, np.iinfo(np.int64).max) for each in texts]
        x = (by_tables if arguments.way == "tables" else by_columns)(numbers, keys)
    crossed = x * dense(x, x.shape[-1], tf.nn.relu, "cross") + x
    for i, units in enumerate(LAYERS[:-1]):
        crossed = dense(crossed, units, tf.nn.relu, f"mlp_{i}")
    outputs = dense(crossed, LAYERS[-1], tf.nn.sigmoid, "mlp_last")
    labels = tf.cast(tf.reshape(labels, [-1, 1]), tf.float32)
    loss = tf.losses.log_loss(labels, outputs)
    shown = hvd.allreduce(loss, op=hvd.Average)
    step = tf.train.get_or_create_global_step()
    update = tf.train.AdagradOptimizer(learning_rate=RATE).minimize(loss, global_step=step)
    scaffold = tf.train.Scaffold(local_init_op=tf.group(tf.local_variables_initializer(), start))
    hooks = [
        tf.train.StopAtStepHook(last_step=8),
        tf.train.LoggingTensorHook({"steps": step, "loss": shown}, every_n_iter=5),
    ]
    losses = []
    with tf.train.MonitoredTrainingSession(
        master="",
        hooks=hooks,
        checkpoint_dir=f"{arguments.checkpoints}-{scale:g}",
        scaffold=scaffold,
        config=tf.ConfigProto(),
    ) as session:
        while not session.should_stop():
            losses.append(session.run([shown, update])[0])
    print("losses", *losses)


if __name__ == "__main__":
    main()
