"""Which flights will arrive late? Trains a DLRM on hashed 64-bit keys, on 1 to N ranks.

    python examples/flights.py
    python -m sok_like.run -np 2 examples/flights.py

Every rank reads its share of each global batch and holds its share of the table, so more ranks
train the same model. The test flights are spread over the year: the model has seen other flights of
the same day, as an airline has by the afternoon. It does not forecast future days.
"""

import argparse
import os
import time

import flights_data
import flights_model
import flights_plot
import flights_ranks
import metrics
import numpy as np
import tensorflow as tf

import sok_like as sok

# About this many test flights are scored during training; the final figures use all of them.
CURVE_ROWS = 8192
CURVE_POINTS = 12


def parse_arguments():
    """Reads the command line; both flights programs take the same options."""
    parser = argparse.ArgumentParser(description="Predicts late arrivals of flights.")
    # A second pass memorizes single aircraft: test AUC falls from then on.
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=3072, help="over all ranks together")
    parser.add_argument("--embedding-dim", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--rows", type=int, help="use only so many flights, for a quick look")
    parser.add_argument("--output", default=os.path.join("out", "flights.png"))
    parser.add_argument("--no-plot", action="store_true")
    return parser.parse_args()


def curve_flights(test):
    """A sample of the test flights spread over the whole file, which is ordered by date."""
    return test.take(slice(None, None, max(1, len(test) // CURVE_ROWS)))


class Curves(tf.keras.callbacks.Callback):
    """Stores the loss of each step, and at intervals scores some test flights.

    All ranks score at the same steps, because a lookup involves all of them. `seconds` is the time
    for scoring, which does not count as training.
    """

    def __init__(self, score, labels, every):
        super().__init__()
        self.train_losses, self.test_points, self.seconds = [], [], 0.0
        self._score, self._labels, self._every = score, labels, every
        self._previous_total = 0.0

    def on_train_batch_end(self, batch, logs=None):
        # Keras reports the mean since the epoch began; the step's own loss is the difference.
        total = logs["loss"] * (batch + 1)
        self.train_losses.append(total - (self._previous_total if batch > 0 else 0.0))
        self._previous_total = total
        step = len(self.train_losses)
        if step % self._every == 0:
            started = time.perf_counter()
            logits = self._score()
            loss, area = metrics.log_loss(self._labels, logits), metrics.auc(self._labels, logits)
            self.test_points.append((step, loss, area))
            self.seconds += time.perf_counter() - started


def make_scorer(model, flights, local_batch, ranks):
    """Returns a function without arguments that returns all `flights`' logits on every rank."""
    forward = tf.function(lambda keys, dense: model((keys, dense), training=False))
    batches = ranks.shard(len(flights), local_batch)

    def score():
        parts = [flights.take(rows) for rows in batches]
        logits = [forward(tf.constant(p.keys), tf.constant(p.dense)).numpy() for p in parts]
        return ranks.join(np.concatenate(logits), len(flights))

    return score


def make_dataset(train, arguments, ranks):
    """This rank's training batches as a `tf.data.Dataset` of ((keys, dense), labels)."""
    local_batch = arguments.batch_size // ranks.size

    def batches():
        for part in flights_data.train_batches(
            train, arguments.batch_size, arguments.seed, arguments.epochs, ranks.rank, ranks.size
        ):
            yield (part.keys, part.dense), part.labels

    keys = tf.TensorSpec([local_batch, train.keys.shape[1]], tf.int64)
    dense = tf.TensorSpec([local_batch, train.dense.shape[1]], tf.float32)
    labels = tf.TensorSpec([local_batch], tf.float32)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=((keys, dense), labels))
    return dataset.prefetch(2)


def report(ranks, test, logits, trained_rows, seconds, keys, table_bytes):
    """Prints quality, speed and table size (of all ranks together) on rank 0."""
    if ranks.rank == 0:
        print(f"test AUC       {metrics.auc(test.labels, logits):.4f}")
        print(f"test log loss  {metrics.log_loss(test.labels, logits):.4f}")
        print(f"training       {seconds:.1f} s, {trained_rows / seconds:,.0f} rows per second")
        print(f"table          {keys:,} keys, {table_bytes / 2**20:.1f} MiB, {ranks.size} rank(s)")


def main():
    arguments = parse_arguments()
    sok.Init(global_batch_size=arguments.batch_size, seed=arguments.seed)
    ranks = flights_ranks.Ranks()
    tf.keras.utils.set_random_seed(arguments.seed)

    train, test = flights_data.load(arguments.rows)
    local_batch = arguments.batch_size // ranks.size
    steps = len(flights_data.epoch_rows(len(train), arguments.batch_size, arguments.seed, epoch=0))
    max_keys = train.keys.size  # More than can ever appear; the table grows as keys arrive.
    model = flights_model.FlightsModel(train.keys.shape[1], arguments.embedding_dim, max_keys)
    model.compile(
        optimizer=sok.OptimizerWrapper(tf.keras.optimizers.Adam(arguments.learning_rate)),
        loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
        jit_compile=False,
    )

    curve_test = curve_flights(test)
    curve_score = make_scorer(model, curve_test, local_batch, ranks)
    curve_score()  # Builds the variables.
    tables, others = sok.split_embedding_variable_from_others(model.trainable_variables)
    ranks.broadcast_variables(others)

    every = max(1, steps * arguments.epochs // CURVE_POINTS)
    curves = Curves(curve_score, curve_test.labels, every)
    started = time.perf_counter()
    model.fit(
        make_dataset(train, arguments, ranks),
        epochs=arguments.epochs,
        steps_per_epoch=steps,
        callbacks=[curves],
        shuffle=False,  # The batches come shuffled.
        verbose=1 if ranks.rank == 0 else 0,
    )
    seconds = time.perf_counter() - started - curves.seconds

    logits = make_scorer(model, test, local_batch, ranks)()
    trained_rows = arguments.epochs * steps * arguments.batch_size
    keys = ranks.sum(sum(int(variable.size()) for variable in tables))
    table_bytes = ranks.sum(sum(int(variable.bytes()) for variable in tables))
    report(ranks, test, logits, trained_rows, seconds, keys, table_bytes)
    if ranks.rank == 0 and not arguments.no_plot:
        points = curves.test_points
        flights_plot.draw(arguments.output, curves.train_losses, points, test.labels, logits)
        print(f"curves         {arguments.output}")


if __name__ == "__main__":
    main()
