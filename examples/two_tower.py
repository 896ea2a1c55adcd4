"""Which films would a user like? Two towers trained on MovieLens-100K, on 1 to N ranks.

    python examples/two_tower.py
    python -m sok_like.run -np 2 examples/two_tower.py --folder out/towers

The negatives of a sample are all other films of the global batch (`sok.gather_batch`). Popular
films are negatives more often; subtracting the logarithm of how often a film was seen, which its
table counts, corrects that (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus
Item Recommendations", RecSys 2019). `--folder` writes each tower as a SavedModel.
"""

import argparse
import os

import movielens_data
import numpy as np
import tensorflow as tf

import sok_like as sok

LIKED, TOP = 4, 50  # stars of a film that a user likes; films to recommend


def parse_arguments():
    parser = argparse.ArgumentParser(description="Recommends films with two towers.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512, help="over all ranks together")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--folder", help="write the towers there")
    return parser.parse_args()


def tower(name, features, dim, **options):
    """A Keras model from features, string Inputs by name, to vectors `[batch, dim]`."""
    widths = dict.fromkeys(features, dim)
    rows = sok.GroupEmbedding(widths, pad_key="", name=f"{name}_features", **options)(features)
    both = list(rows.values())
    both = tf.keras.layers.Concatenate()(both) if len(both) > 1 else both[0]
    hidden = tf.keras.layers.Dense(32, "relu", name=f"{name}_hidden")(both)
    return tf.keras.Model(features, tf.keras.layers.Dense(dim, name=f"{name}_vector")(hidden))


def text(name, *shape):
    return tf.keras.Input(shape, dtype="string", name=name)


class TwoTower(tf.keras.Model):
    """The probability of a user's film among all films of the global batch."""

    def __init__(self, dim, most_genres):
        super().__init__()
        counted = sok.EmbeddingVariableOption(record_statistics=True, count="occurrences")
        self.users = tower("user", {"user": text("user")}, dim)
        films = {"film": text("film"), "genres": text("genres", most_genres)}
        options = {"film": {"ev_option": counted}}
        self.films = tower("film", films, dim, table_options=options)
        self.film_table = self.films.get_layer("film_features").tables["film"]

    def call(self, inputs, training=False):
        users = self.users({"user": inputs["user"]}, training=training)
        films = self.films({name: inputs[name] for name in ("film", "genres")}, training=training)
        if training:
            self.add_loss(self.loss_of(users, films, sok.keys_of(inputs["film"])))
        return tf.reduce_sum(users * films, axis=1)

    def loss_of(self, users, films, keys):
        """Cross-entropy of this rank's samples among the films of all ranks, a scalar."""
        candidates, candidate_keys = sok.gather_batch(films), sok.gather_batch(keys, "keys")
        logits = tf.matmul(users, candidates, transpose_b=True)
        often = tf.maximum(self.film_table.get_frequency(candidate_keys), 1)
        logits -= tf.math.log(tf.cast(often, tf.float32))
        local_batch = tf.shape(users)[0]  # the same on all ranks
        own = tf.range(local_batch) + sok.rank() * local_batch
        # The same film in another sample is no negative.
        same = tf.equal(keys[:, tf.newaxis], candidate_keys)
        others = same & (tf.range(tf.size(candidate_keys)) != own[:, tf.newaxis])
        logits = tf.where(others, -1e9, logits)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits))


def features_of(ratings, most_genres):
    """The model's inputs: strings `[ratings]`; genres `[ratings, most_genres]`, padded."""
    genres = tf.ragged.constant(ratings.genres).to_tensor("", shape=[None, most_genres])
    return {"user": ratings.users, "film": ratings.films, "genres": genres.numpy().astype(str)}


def batches_of(features, local_batch):
    """This rank's share of every global batch, shuffled in the same way on all ranks."""
    samples = tf.data.Dataset.from_tensor_slices(features)
    samples = samples.shuffle(len(features["user"]), seed=1)
    # Every rank must take the same number of steps; the few remaining samples are dropped.
    return sok.shard(samples, drop_remainder=True).batch(local_batch, drop_remainder=True)


def recall(model, films, train, test):
    """The share of liked test films among the best `TOP` of the films that a user has not rated."""
    inputs = {name: tf.constant(values) for name, values in films.items()}
    vectors = model.films.predict(inputs, batch_size=2048, verbose=0)
    users = np.unique(test.users)
    asked = model.users.predict({"user": tf.constant(users)}, batch_size=2048, verbose=0)
    scores = asked @ vectors.T
    rows = {user: number for number, user in enumerate(users)}
    columns = {film: number for number, film in enumerate(films["film"])}
    for user, film in zip(train.users, train.films, strict=True):
        if user in rows and film in columns:
            scores[rows[user], columns[film]] = -np.inf
    best = tf.math.top_k(scores, TOP).indices.numpy()
    found = [columns.get(f) in best[rows[u]] for u, f in zip(test.users, test.films, strict=True)]
    return float(np.mean(found))


def main():
    arguments = parse_arguments()
    sok.Init(global_batch_size=arguments.batch_size, seed=1)
    tf.keras.utils.set_random_seed(1)
    rated, test, _ = movielens_data.load()
    liked = rated.take(np.flatnonzero(rated.stars >= LIKED))
    test = test.take(np.flatnonzero(test.stars >= LIKED))
    most_genres = max(len(genres) for genres in rated.genres)
    model = TwoTower(arguments.dim, most_genres)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(arguments.learning_rate)))
    features = features_of(liked, most_genres)
    history = model.fit(
        batches_of(features, arguments.batch_size // sok.size()),
        epochs=arguments.epochs,
        verbose=2 if sok.rank() == 0 else 0,
    )
    _, first = np.unique(features["film"], return_index=True)
    films = {name: features[name][first] for name in ("film", "genres")}
    found = recall(model, films, rated, test)
    if arguments.folder:  # all ranks call the export
        sok.export_saved_model(model.users, os.path.join(arguments.folder, "users"))
        sok.export_saved_model(model.films, os.path.join(arguments.folder, "films"))
    if sok.rank() == 0:
        print(f"last loss     {history.history['loss'][-1]:.4f}")
        print(f"recall at {TOP}  {found:.3f}   (by chance {TOP / len(first):.3f})")


if __name__ == "__main__":
    main()
