"""The flights training of `flights.py` as a TF1 graph in a `tf.compat.v1.Session`.

    python examples/flights_session.py
    python -m sok_like.run -np 2 examples/flights_session.py

Data, table and network are the same; the code is that of scripts before TF 2. LazyAdam updates the
table, only the rows of the batch; TF1's Adam updates the other variables.
"""

import contextlib
import time

import flights
import flights_data
import flights_model
import flights_plot
import flights_ranks
import metrics
import numpy as np
import tensorflow as tf

import sok_like as sok


def dense_stack(tensor, units, weights):
    """Fully connected layers, all but the last with a ReLU.

    Args:
        tensor: float32 `[batch, inputs]`.
        units: widths of the layers.
        weights: list of (matrix, bias), one per layer.
    """
    for layer, (matrix, bias) in enumerate(weights):
        tensor = tf.matmul(tensor, matrix) + bias
        if layer + 1 < len(units):
            tensor = tf.nn.relu(tensor)
    return tensor


def make_weights(name, inputs, units, seed):
    """Creates the variables of `dense_stack`: Glorot uniform matrices, zero biases."""
    glorot = tf.compat.v1.glorot_uniform_initializer(seed=seed)
    weights = []
    for layer, outputs in enumerate(units):
        scope = f"{name}_{layer}"
        matrix = tf.compat.v1.get_variable(f"{scope}/matrix", [inputs, outputs], initializer=glorot)
        bias = tf.compat.v1.get_variable(
            f"{scope}/bias", [outputs], initializer=tf.compat.v1.zeros_initializer()
        )
        weights.append((matrix, bias))
        inputs = outputs
    return weights


class Network:
    """The graph's model: its placeholders, its variables, and outputs for training and testing."""

    def __init__(self, num_features, num_columns, local_batch, arguments, max_keys):
        dim = arguments.embedding_dim
        self.keys = tf.compat.v1.placeholder(tf.int64, [local_batch, num_features], "keys")
        self.dense = tf.compat.v1.placeholder(tf.float32, [local_batch, num_columns], "dense")
        self.labels = tf.compat.v1.placeholder(tf.float32, [local_batch], "labels")
        self.embedding = flights_model.make_embedding(num_features, dim, max_keys)

        self._bottom_units = (*flights_model.BOTTOM_UNITS, dim)
        self._top_units = (*flights_model.TOP_UNITS, 1)
        interactions = (num_features + 1) * num_features // 2 + 2 * dim
        self._bottom = make_weights("bottom", num_columns, self._bottom_units, arguments.seed)
        self._top = make_weights("top", interactions, self._top_units, arguments.seed)
        self.dense_variables = [v for layer in self._bottom + self._top for v in layer]

        self.loss = tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(
                labels=self.labels, logits=self._logits(training=True)
            )
        )
        embedding_variables = self.embedding.trainable_variables
        self.tables, _ = sok.split_embedding_variable_from_others(embedding_variables)
        # A lookup of its own: a training lookup inserts every key it meets.
        self.test_logits = self._logits(training=False)

    def _logits(self, training):
        """Logits of the placeholders' flights, float32 `[local_batch]`."""
        vectors = self.embedding(self.keys, training=training)
        bottom = dense_stack(self.dense, self._bottom_units, self._bottom)
        top = dense_stack(flights_model.interact(vectors, bottom), self._top_units, self._top)
        return tf.squeeze(top, axis=1)

    def feed(self, part):
        return {self.keys: part.keys, self.dense: part.dense, self.labels: part.labels}


def make_train_op(network, learning_rate, ranks):
    """One step of both optimizers, as a single op.

    The embedding layer sums its gradient over ranks itself; other gradients are averaged here.
    """
    tables = network.tables
    gradients = tf.gradients(network.loss, [*tables, *network.dense_variables])
    table_gradients, dense_gradients = gradients[: len(tables)], gradients[len(tables) :]
    dense_gradients = [ranks.mean_op(gradient) for gradient in dense_gradients]
    table_optimizer = sok.tf.keras.optimizers.lazy_adam.LazyAdamOptimizer(learning_rate)
    dense_optimizer = tf.compat.v1.train.AdamOptimizer(learning_rate)
    return tf.group(
        table_optimizer.apply_gradients(list(zip(table_gradients, tables, strict=True))),
        dense_optimizer.apply_gradients(
            list(zip(dense_gradients, network.dense_variables, strict=True))
        ),
    )


def make_session_scorer(session, network, flights_part, local_batch, ranks):
    """Returns a function without arguments that returns all flights' logits on every rank."""
    batches = ranks.shard(len(flights_part), local_batch)

    def score():
        parts = [flights_part.take(rows) for rows in batches]
        logits = [session.run(network.test_logits, network.feed(part)) for part in parts]
        return ranks.join(np.concatenate(logits), len(flights_part))

    return score


def show_progress(step, steps, loss, seconds):
    """Redraws a one-line progress bar."""
    done = 30 * step // steps
    speed = 1000 * seconds / step
    bar = "=" * done + "." * (30 - done)
    end = "\n" if step == steps else ""
    print(f"\r{step}/{steps} [{bar}] {speed:.0f} ms/step - loss: {loss:.4f}", end=end, flush=True)


def main():
    arguments = flights.parse_arguments()
    train, test = flights_data.load(arguments.rows)
    steps = len(train) // arguments.batch_size * arguments.epochs
    every = max(1, steps // flights.CURVE_POINTS)

    graph = tf.Graph()
    with graph.as_default():
        tf.compat.v1.set_random_seed(arguments.seed)
        sok_init = sok.Init(global_batch_size=arguments.batch_size, seed=arguments.seed)
        ranks = flights_ranks.Ranks()
        local_batch = arguments.batch_size // ranks.size
        network = Network(
            train.keys.shape[1], train.dense.shape[1], local_batch, arguments, train.keys.size
        )
        train_op = make_train_op(network, arguments.learning_rate, ranks)
        table_initializers = [table.initializer for table in network.tables]
        dense_initializer = tf.compat.v1.global_variables_initializer()
        same_start = [v.assign(ranks.broadcast_op(v)) for v in network.dense_variables]
        table_sizes = [(table.size(), table.bytes()) for table in network.tables]

    # Not `with Session()`: that makes the graph the default again, and the ranks' results could
    # not be joined eagerly between two runs.
    with contextlib.closing(tf.compat.v1.Session(graph=graph)) as session:
        session.run(sok_init)
        session.run(table_initializers)
        session.run(dense_initializer)
        session.run(same_start)

        curve_test = flights.curve_flights(test)
        curve_score = make_session_scorer(session, network, curve_test, local_batch, ranks)
        train_losses, test_points, scoring = [], [], 0.0
        started = time.perf_counter()
        batches = flights_data.train_batches(
            train, arguments.batch_size, arguments.seed, arguments.epochs, ranks.rank, ranks.size
        )
        for step, part in enumerate(batches, start=1):
            loss, _ = session.run([network.loss, train_op], network.feed(part))
            train_losses.append(float(loss))
            if ranks.rank == 0:
                show_progress(step, steps, loss, time.perf_counter() - started - scoring)
            if step % every == 0:
                paused = time.perf_counter()
                logits = curve_score()
                labels = curve_test.labels
                point = (step, metrics.log_loss(labels, logits), metrics.auc(labels, logits))
                test_points.append(point)
                scoring += time.perf_counter() - paused
        seconds = time.perf_counter() - started - scoring

        logits = make_session_scorer(session, network, test, local_batch, ranks)()
        sizes = session.run(table_sizes)

    keys, table_bytes = (ranks.sum(sum(column)) for column in zip(*sizes, strict=True))
    flights.report(ranks, test, logits, steps * arguments.batch_size, seconds, keys, table_bytes)
    if ranks.rank == 0 and not arguments.no_plot:
        flights_plot.draw(arguments.output, train_losses, test_points, test.labels, logits)
        print(f"curves         {arguments.output}")


if __name__ == "__main__":
    main()
