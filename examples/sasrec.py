"""Which film does a user watch next? A small SASRec on MovieLens-100K, on 1 to N ranks.

    python examples/sasrec.py
    python -m sok_like.run -np 2 examples/sasrec.py

    history     [batch, length]          film ids, strings, padded on the left with ""
    candidates  [batch, length * 2]      after each position the next film, and one at random
         |  one table, no combiner: a row for each film, and a mask from the padding
    states      [batch, length, dim]     causal self-attention (Kang and McAuley, 2018)
    scores      [batch, length, 2]       the loss leaves out the masked positions

The last film of each user is held out, and ranked among 100 films that the user has not seen. The
model is exported as a SavedModel that stock TensorFlow runs, and compared with `predict`.
"""

import argparse
import pathlib
import tempfile

import movielens_data
import numpy as np
import tensorflow as tf

import sok_like as sok

layers = tf.keras.layers
CANDIDATES = 100  # the film that was watched, and others


def parse_arguments():
    parser = argparse.ArgumentParser(description="Predicts the next film of a user.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="over all ranks together")
    parser.add_argument("--length", type=int, default=20, help="films of a history")
    parser.add_argument("--embedding-dim", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=pathlib.Path, help="of the SavedModel")
    return parser.parse_args()


def padded(films, length):
    """The last `length` films, after as many "" as are missing."""
    kept = films[-length:]
    return [""] * (length - len(kept)) + kept


def training_data(histories, length, seed):
    """Histories `[samples, length]`, and candidates `[samples, 2 * length]`: next and random."""
    films, random = sorted({f for h in histories for f in h}), np.random.default_rng(seed)
    inputs, nexts = [], []
    for history in histories:
        known = history[:-1]  # the last film is for the test
        for stop in range(len(known), 1, -length):
            start = max(stop - length - 1, 0)
            inputs.append(padded(known[start : stop - 1], length))
            nexts.append(padded(known[start + 1 : stop], length))
    nexts = np.array(nexts)
    others = np.where(nexts == "", "", random.choice(films, nexts.shape))
    candidates = np.stack([nexts, others], 2).reshape(len(nexts), -1)
    return {"history": tf.constant(inputs), "candidates": tf.constant(candidates)}


def test_data(histories, length, seed):
    """Histories, and candidates `[users, CANDIDATES]`: the film that came next, then others."""
    films, random = sorted({f for h in histories for f in h}), np.random.default_rng(seed)
    inputs, candidates = [], []
    for history in histories:
        unseen = sorted(set(films) - set(history))
        inputs.append(padded(history[:-1], length))
        candidates.append([history[-1], *random.choice(unseen, CANDIDATES - 1, replace=False)])
    return {"history": tf.constant(inputs), "candidates": tf.constant(candidates)}


@tf.keras.utils.register_keras_serializable("sasrec")
class Positions(layers.Layer):
    """Adds a trained row for each position."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True  # the mask goes on to the next layer

    def build(self, input_shape):
        self.rows = self.add_weight(name="rows", shape=input_shape[1:], initializer="uniform")
        self.built = True

    def call(self, inputs):
        return inputs + tf.convert_to_tensor(self.rows)


@tf.keras.utils.register_keras_serializable("sasrec")
class Scores(layers.Layer):
    """Products of states with the rows of their candidates: `[batch, positions, candidates]`.

    With `last_only`, of the last position alone.
    """

    def __init__(self, last_only=False, **kwargs):
        super().__init__(**kwargs)
        self.last_only = last_only

    def compute_mask(self, inputs, mask=None):
        return None if mask is None or self.last_only else mask[0]

    def compute_output_shape(self, input_shape):
        states, _ = input_shape
        return (states[0], 1 if self.last_only else states[1], None)

    def call(self, inputs):
        states, rows = inputs
        states = states[:, -1:] if self.last_only else states
        shape = tf.shape(states)
        rows = tf.reshape(rows, [shape[0], shape[1], -1, states.shape[-1]])
        return tf.einsum("bld,blcd->blc", states, rows)

    def get_config(self):
        return {**super().get_config(), "last_only": self.last_only}


def encoded(rows, blocks):
    """States `[batch, length, dim]`: each has seen the rows up to its own position."""
    dim = rows.shape[-1]
    states = Positions()(rows)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(states)
        seen = layers.MultiHeadAttention(2, dim // 2)(normal, normal, use_causal_mask=True)
        states = layers.Add()([states, layers.Dropout(0.2)(seen)])
        hidden = layers.Dense(dim, "relu")(layers.LayerNormalization()(states))
        states = layers.Add()([states, layers.Dropout(0.2)(layers.Dense(dim)(hidden))])
    return layers.LayerNormalization()(states)


def make_models(length, dim, blocks):
    """The model to train, and one that scores candidates as the next film; they share layers."""
    inputs = {
        "history": tf.keras.Input([length], dtype="string", name="history"),
        "candidates": tf.keras.Input([None], dtype="string", name="candidates"),
    }
    rows = sok.GroupEmbedding(
        {"history": dim, "candidates": dim},
        tables={"history": "film", "candidates": "film"},
        combiners=None,
        pad_key="",
        name="films",
    )(inputs)
    states = encoded(rows["history"], blocks)
    training = tf.keras.Model(inputs, Scores()([states, rows["candidates"]]))
    ranking = tf.keras.Model(inputs, Scores(last_only=True)([states, rows["candidates"]]))
    return training, ranking


def batches_of(features, local_batch, seed):
    """This rank's share of every global batch; the first candidate is the next film."""
    size, width = features["candidates"].shape
    labels = np.tile([1.0, 0.0], [size, width // 2, 1]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).shuffle(size, seed=seed)
    return sok.shard(dataset, drop_remainder=True).batch(local_batch, drop_remainder=True)


def hit_rate(scores, best=10):
    """The share of users whose next film, the first candidate, is among the `best`."""
    better = (scores[:, 0, 1:] >= scores[:, 0, :1]).sum(axis=1)
    return float((better < best).mean())


def main():
    arguments = parse_arguments()
    sok.Init(global_batch_size=arguments.batch_size, seed=arguments.seed)
    tf.keras.utils.set_random_seed(arguments.seed)
    histories = movielens_data.histories()
    training, ranking = make_models(arguments.length, arguments.embedding_dim, arguments.blocks)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(arguments.learning_rate))
    training.compile(optimizer, tf.keras.losses.BinaryCrossentropy(from_logits=True))
    training.fit(
        batches_of(
            training_data(histories, arguments.length, arguments.seed),
            arguments.batch_size // sok.size(),
            arguments.seed,
        ),
        epochs=arguments.epochs,
        verbose=2 if sok.rank() == 0 else 0,
    )
    test = test_data(histories, arguments.length, arguments.seed)
    scores = ranking.predict(test, verbose=0)
    folder = arguments.folder or pathlib.Path(tempfile.gettempdir(), "sok_sasrec")
    sok.export_saved_model(ranking, folder, missing="initial")  # by all ranks
    if sok.rank() == 0:
        served = tf.saved_model.load(str(folder)).signatures["serving_default"](**test)
        (served,) = served.values()
        print(f"served as predicted   {np.abs(served - scores).max() < 1e-5}")
        print(f"hit rate at 10        {hit_rate(scores):.3f} (at random 0.100)")


if __name__ == "__main__":
    main()
