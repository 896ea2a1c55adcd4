"""The flights of `flights.py` as feature columns in groups, wide and deep, in a TF1 session.

    python examples/group_columns.py
    python -m sok_like.run -np 2 examples/group_columns.py
    python examples/group_columns.py --optimizer adagrad

Each feature has a table of its own. The wide part has a row of one float per key, trained by FTRL,
which keeps keys without influence at 0. The deep part feeds an MLP and is trained by Adagrad. A
group of columns takes one fused lookup, however many tables it has. There are three groups; on
several ranks each takes two exchanges. With `--optimizer` a single optimizer trains everything.
"""

import argparse
import contextlib
import time

import flights
import flights_data
import flights_ranks
import flights_session
import numpy as np
import tensorflow as tf

import sok_like as sok

fc = sok.feature_column
v1 = tf.compat.v1

HIDDEN = (64, 32)
# Names of features and columns become scopes, so they use only characters that scopes allow.
NAMES = ["_x_".join(cross) for cross in flights_data.FEATURES]


def parse_arguments():
    parser = argparse.ArgumentParser(description="Predicts late arrivals from feature columns.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=3072, help="over all ranks together")
    parser.add_argument("--embedding-dim", type=int, default=8)
    parser.add_argument("--optimizer", choices=("both", "ftrl", "adagrad"), default="both")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--rows", type=int, help="use only so many flights, for a quick look")
    return parser.parse_args()


def make_columns(embedding_dim):
    """(wide, deep) columns, over the same categorical columns."""
    keys = {name: fc.categorical_column_with_embedding(name, tf.int64) for name in NAMES}
    with fc.group_embedding_column_scope("wide"):
        zeros = v1.zeros_initializer()
        wide = [fc.embedding_column(column, 1, "sum", zeros) for column in keys.values()]
    deep = [tf.feature_column.numeric_column(name) for name in flights_data.DENSE]
    initializer = v1.random_uniform_initializer(-0.05, 0.05)
    for name, column in keys.items():
        # Two groups, entered in turn: only the name of the scope decides.
        with fc.group_embedding_column_scope("of_the_day" if "date" in name else "every_day"):
            deep.append(fc.embedding_column(column, embedding_dim, "sum", initializer))
    return wide, deep


class Network:
    """The graph's placeholders, outputs and variables."""

    def __init__(self, local_batch, arguments):
        self._wide, self._deep = make_columns(arguments.embedding_dim)
        self._seed = arguments.seed
        self.keys = v1.placeholder(tf.int64, [local_batch, len(NAMES)], "keys")
        self.dense = v1.placeholder(tf.float32, [local_batch, len(flights_data.DENSE)], "dense")
        self.labels = v1.placeholder(tf.float32, [local_batch], "labels")
        self.loss = tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(
                labels=self.labels, logits=self._logits(training=True)
            )
        )
        # Again with the same variables: a training lookup inserts every key it meets.
        self.test_logits = self._logits(training=False)
        self.wide_variables = v1.trainable_variables("wide/")
        self.deep_variables = v1.trainable_variables("deep/")
        self.tables, self.others = sok.split_embedding_variable_from_others(
            v1.trainable_variables()
        )

    def _logits(self, training):
        """Logits of the placeholders' flights, float32 `[local_batch]`."""
        features = {
            # Any 64-bit number is a key, even -1: in a RaggedTensor -1 is not padding.
            name: tf.RaggedTensor.from_tensor(column[:, tf.newaxis])
            for name, column in zip(NAMES, tf.unstack(self.keys, axis=1), strict=True)
        }
        features.update(zip(flights_data.DENSE, tf.unstack(self.dense, axis=1), strict=True))
        # "mean": a rank's loss is the mean over its own part of the batch.
        options = {"training": training, "gradient_scale": "mean"}
        with v1.variable_scope("wide", reuse=not training):
            wide = tf.reduce_sum(fc.input_layer(features, self._wide, **options), axis=1)
        with v1.variable_scope("deep", reuse=not training):
            inputs = fc.input_layer(features, self._deep, **options)
            units = (*HIDDEN, 1)
            weights = flights_session.make_weights("mlp", inputs.shape[1], units, self._seed)
            deep = flights_session.dense_stack(inputs, units, weights)
        return wide + tf.squeeze(deep, axis=1)

    def feed(self, part):
        return {self.keys: part.keys, self.dense: part.dense, self.labels: part.labels}


def make_optimizer(name):
    """An optimizer that trains both tables and other variables."""
    stock = {
        "ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=1e-4),
        "adagrad": lambda: v1.train.AdagradOptimizer(0.05),
    }[name]()
    return sok.OptimizerWrapper(stock)


def make_train_op(network, choice):
    """One step: FTRL for the wide and Adagrad for the deep part, or one optimizer for all."""
    if choice != "both":
        return make_optimizer(choice).minimize(network.loss)
    variables = [*network.wide_variables, *network.deep_variables]
    gradients = tf.gradients(network.loss, variables)
    pairs = list(zip(gradients, variables, strict=True))
    num_wide = len(network.wide_variables)
    return tf.group(
        make_optimizer("ftrl").apply_gradients(pairs[:num_wide]),
        make_optimizer("adagrad").apply_gradients(pairs[num_wide:]),
    )


def main():
    arguments = parse_arguments()
    train, test = flights_data.load(arguments.rows)
    steps = len(train) // arguments.batch_size * arguments.epochs

    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(arguments.seed)
        sok_init = sok.Init(global_batch_size=arguments.batch_size, seed=arguments.seed)
        ranks = flights_ranks.Ranks()
        local_batch = arguments.batch_size // ranks.size
        network = Network(local_batch, arguments)
        train_op = make_train_op(network, arguments.optimizer)
        initializer = v1.global_variables_initializer()
        same_start = [v.assign(ranks.broadcast_op(v)) for v in network.others]
        table_sizes = [(table.size(), table.bytes()) for table in network.tables]

    # Not `with Session()`: that makes the graph the default again, and the ranks' results could
    # not be joined eagerly.
    with contextlib.closing(v1.Session(graph=graph)) as session:
        for op in (sok_init, initializer, same_start):
            session.run(op)
        batches = flights_data.train_batches(
            train, arguments.batch_size, arguments.seed, arguments.epochs, ranks.rank, ranks.size
        )
        started = time.perf_counter()
        for step, part in enumerate(batches, start=1):
            loss, _ = session.run([network.loss, train_op], network.feed(part))
            if ranks.rank == 0:
                seconds = time.perf_counter() - started
                flights_session.show_progress(step, steps, loss, seconds)
        seconds = time.perf_counter() - started
        scorer = flights_session.make_session_scorer(session, network, test, local_batch, ranks)
        logits = scorer()
        sizes = np.array(session.run(table_sizes))

    keys, table_bytes = (ranks.sum(int(column)) for column in sizes.sum(axis=0))
    flights.report(ranks, test, logits, steps * arguments.batch_size, seconds, keys, table_bytes)
    if ranks.rank == 0:
        print(f"tables         {len(network.tables)}, in 3 groups")


if __name__ == "__main__":
    main()
