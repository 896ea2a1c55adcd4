"""The model of the flights examples: a small DLRM (Naumov et al. 2019) over one hash table.

    keys  [batch, features] --table--> vectors [batch, features, dim] --+--> sum over features
    dense [batch, columns] --bottom MLP--> [batch, dim] ----------------+--> all pairwise products
                                                    |                            |
                                                    +--------- top MLP ----------+--> logit

Written with `tf.keras`, so it is the same under Keras 3 and under tf_keras
(`TF_USE_LEGACY_KERAS=1`).
"""

import tensorflow as tf

import sok_like as sok

# Small, so that a cross that was never seen in training adds almost nothing to the products.
INITIAL_RANGE = 0.01
BOTTOM_UNITS = (32,)
TOP_UNITS = (64, 32)


def make_embedding(num_features, embedding_dim, max_keys):
    """One hash table for all features; their keys already differ.

    Args:
        num_features: keys per sample, one per feature.
        embedding_dim: length of a row.
        max_keys: maximum number of keys per rank.
    """
    return sok.DistributedEmbedding(
        combiner="sum",
        max_vocabulary_size_per_gpu=max_keys,
        embedding_vec_size=embedding_dim,
        slot_num=num_features,
        max_nnz=1,
        embedding_initializer=tf.keras.initializers.RandomUniform(-INITIAL_RANGE, INITIAL_RANGE),
        # A rank's loss is the mean over its share of the batch. "mean" divides the sum of the
        # ranks' gradients by their number, which gives the mean over the global batch.
        gradient_scale="mean",
    )


def interact(vectors, bottom):
    """Inputs of the top MLP: the dot product of every pair, the sum of vectors, the dense part.

    Args:
        vectors: float32 `[batch, features, dim]`.
        bottom: float32 `[batch, dim]`, taken as one more vector in the products.

    Returns:
        float32 `[batch, (features + 1) * features / 2 + 2 * dim]`.
    """
    together = tf.concat([vectors, bottom[:, tf.newaxis]], axis=1)
    count = together.shape[1]
    products = tf.reshape(tf.matmul(together, together, transpose_b=True), [-1, count * count])
    below_diagonal = [row * count + column for row in range(count) for column in range(row)]
    pairs = tf.gather(products, below_diagonal, axis=1)
    return tf.concat([pairs, tf.reduce_sum(vectors, axis=1), bottom], axis=1)


class FlightsModel(tf.keras.Model):
    """Logit of a late arrival.

    Inputs: a pair of keys, int64 `[batch, features]`, and dense, float32 `[batch, columns]`.
    Output: float32 `[batch]`.
    """

    def __init__(self, num_features, embedding_dim, max_keys, **kwargs):
        super().__init__(**kwargs)
        self.embedding = make_embedding(num_features, embedding_dim, max_keys)
        hidden = [tf.keras.layers.Dense(units, activation="relu") for units in BOTTOM_UNITS]
        self.bottom = tf.keras.Sequential([*hidden, tf.keras.layers.Dense(embedding_dim)])
        hidden = [tf.keras.layers.Dense(units, activation="relu") for units in TOP_UNITS]
        self.top = tf.keras.Sequential([*hidden, tf.keras.layers.Dense(1)])

    def call(self, inputs, training=False):
        keys, dense = inputs
        # Only training inserts keys; otherwise an unknown key reads its initial row.
        vectors = self.embedding(keys, training=training)
        return tf.squeeze(self.top(interact(vectors, self.bottom(dense))), axis=1)
