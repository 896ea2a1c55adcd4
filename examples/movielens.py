"""How many stars will a user give a film? Trains on MovieLens-100K, on 1 to N ranks.

    python examples/movielens.py
    python -m sok_like.run -np 2 examples/movielens.py

Users, films and genres are strings, as in the data; no vocabulary is built. Each rank trains on its
share of every global batch and holds its share of the tables. For comparison, `--dense` trains the
same model in one process, on `tf.keras.layers.Embedding` with a vocabulary.
"""

import argparse

import movielens_data
import numpy as np
import tensorflow as tf

import sok_like as sok

FEATURES = ("user", "film", "genres", "user_bias", "film_bias")


def parse_arguments():
    parser = argparse.ArgumentParser(description="Predicts the ratings of films.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=512, help="over all ranks together")
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--title", default="Star Wars", help="print the films most like this one")
    parser.add_argument("--dense", action="store_true", help="stock embeddings, for comparison")
    return parser.parse_args()


def features_of(ratings):
    """The model's inputs: string tensors `[ratings]`; genres `[ratings, most genres]`, padded."""
    genres = tf.ragged.constant(ratings.genres).to_tensor("")
    users, films = tf.constant(ratings.users), tf.constant(ratings.films)
    return {
        "user": users,
        "film": films,
        "genres": genres,
        "user_bias": users,
        "film_bias": films,
    }


def hashed_embeddings(dim):
    """Five features in five hash tables; '' pads the genres."""
    widths = {"user": dim, "film": dim, "genres": dim, "user_bias": 1, "film_bias": 1}
    return sok.GroupEmbedding(widths, combiners="mean", pad_key="", name="features")


class DenseEmbeddings(tf.keras.layers.Layer):
    """The same rows from stock layers, each with the vocabulary of its feature."""

    def __init__(self, dim, features, **kwargs):
        super().__init__(**kwargs)
        self.lookups, self.tables = {}, {}
        for name in FEATURES:
            words = np.unique(features[name].numpy().ravel())
            words = [word.decode() for word in words if word]
            self.lookups[name] = tf.keras.layers.StringLookup(vocabulary=words, mask_token="")
            width = 1 if name.endswith("bias") else dim
            self.tables[name] = tf.keras.layers.Embedding(len(words) + 2, width)

    def call(self, inputs):
        found = {}
        for name in FEATURES:
            ids = self.lookups[name](inputs[name])
            rows = self.tables[name](ids)
            if name == "genres":
                there = tf.cast(ids > 0, rows.dtype)[:, :, tf.newaxis]
                rows = tf.reduce_sum(rows * there, 1) / tf.reduce_sum(there, 1)
            found[name] = rows
        return found


class Ratings(tf.keras.Model):
    """Biases, the product of user and film, and a small network over all three vectors."""

    def __init__(self, embeddings, mean):
        super().__init__()
        self.embeddings = embeddings
        self.hidden = tf.keras.layers.Dense(64, "relu")
        self.dropout = tf.keras.layers.Dropout(0.2)
        self.score = tf.keras.layers.Dense(1, bias_initializer=tf.keras.initializers.Constant(mean))

    def call(self, inputs, training=False):
        rows = self.embeddings(inputs)
        user, film, genres = rows["user"], rows["film"], rows["genres"]
        hidden = self.dropout(self.hidden(tf.concat([user, film, genres], 1)), training=training)
        product = tf.reduce_sum(user * (film + genres), axis=1, keepdims=True)
        return self.score(hidden) + product + rows["user_bias"] + rows["film_bias"]


def batches_of(features, stars, local_batch, seed):
    """This rank's share of every global batch, shuffled in the same way on all ranks."""
    dataset = tf.data.Dataset.from_tensor_slices((features, stars[:, np.newaxis]))
    dataset = dataset.shuffle(len(stars), seed=seed)
    # Every rank must take the same number of steps; the few remaining ratings are dropped.
    return sok.shard(dataset, drop_remainder=True).batch(local_batch, drop_remainder=True)


def root_mean_squared_error(model, features, stars):
    """Error of predictions, clipped to 1 to 5 stars. All ranks score the same ratings together."""
    predicted = model.predict(features, batch_size=2048, verbose=0)[:, 0]
    return float(np.sqrt(np.mean((np.clip(predicted, 1, 5) - stars) ** 2)))


def nearest_films(model, titles, title, count=5):
    """Titles of the films whose rows have nearly the same direction as a film's row."""
    films = sorted(titles)
    asked = next((film for film in films if titles[film].startswith(title)), None)
    if asked is None:
        raise SystemExit(f"No film is called '{title}'")
    names = tf.constant(films)
    blank = tf.fill([len(films)], "")
    inputs = {"user": blank, "film": names, "genres": blank[:, tf.newaxis]}
    inputs |= {"user_bias": blank, "film_bias": names}
    rows = model.embeddings(inputs, training=False)["film"]
    rows -= tf.reduce_mean(rows, axis=0)  # removes what all films have in common
    rows = tf.math.l2_normalize(rows, axis=1).numpy()
    order = np.argsort(-rows @ rows[films.index(asked)])
    return titles[asked], [titles[films[i]] for i in order if films[i] != asked][:count]


def main():
    arguments = parse_arguments()
    sok.Init(global_batch_size=arguments.batch_size, seed=arguments.seed)
    tf.keras.utils.set_random_seed(arguments.seed)
    train, test, titles = movielens_data.load()
    features, test_features = features_of(train), features_of(test)
    optimizer = tf.keras.optimizers.Adam(arguments.learning_rate)
    if arguments.dense:
        everything = {name: tf.concat([x, test_features[name]], 0) for name, x in features.items()}
        model = Ratings(DenseEmbeddings(arguments.embedding_dim, everything), train.stars.mean())
    else:
        model = Ratings(hashed_embeddings(arguments.embedding_dim), train.stars.mean())
        optimizer = sok.OptimizerWrapper(optimizer)
    model.compile(optimizer, "mse")
    local_batch = arguments.batch_size // sok.size()
    model.fit(
        batches_of(features, train.stars, local_batch, arguments.seed),
        epochs=arguments.epochs,
        verbose=2 if sok.rank() == 0 else 0,
    )
    error = root_mean_squared_error(model, test_features, test.stars)
    if not arguments.dense:
        title, like = nearest_films(model, titles, arguments.title)
    if sok.rank() == 0:
        print(f"test RMSE      {error:.4f}")
        if not arguments.dense:
            print(f"films like     {title}: {', '.join(like)}")


if __name__ == "__main__":
    main()
