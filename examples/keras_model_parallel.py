"""Keras' published ModelParallel example made whole, and a recommender, on every mesh of the ranks.

    python examples/keras_model_parallel.py
    python -m sok_like.run -np 4 examples/keras_model_parallel.py

First a classifier of small pictures with the layouts of the published example: `dense` and `conv2d`
variables are sharded along their last dimension. Then a recommender: a table of users sharded by
rows, one of items sharded by columns, and a hash table of any keys. Both are trained on each mesh
of N ranks, (1, N), (2, N / 2) and (N, 1). The losses are those of one process, and each rank holds
its part.
"""

import argparse

import numpy as np
import tensorflow as tf

import sok_like as sok
from sok_like.distribution import (
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    initialize,
    list_devices,
    set_distribution,
    summary,
)

layers = tf.keras.layers
USERS, ITEMS = 1000, 400


def published_layouts(device_mesh):
    """The layout map of the published example."""
    layout_map = LayoutMap(device_mesh)
    layout_map[".*dense.*kernel"] = (None, "model")
    layout_map[".*dense.*bias"] = ("model",)
    layout_map[".*conv2d.*kernel"] = (None, None, None, "model")
    layout_map[".*conv2d.*bias"] = ("model",)
    return layout_map


def classifier():
    """Maps pictures `[batch, 8, 8, 1]` to logits `[batch, 4]`."""
    model = tf.keras.Sequential(
        [
            layers.Input([8, 8, 1]),
            layers.Conv2D(8, 3, activation="relu", name="conv2d"),
            layers.Flatten(),
            layers.Dense(16, activation="relu", name="dense"),
            layers.Dense(4, name="dense_1"),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def pictures(random, samples):
    """Noise with a bright quadrant, and its number: `[samples, 8, 8, 1]`, `[samples]`."""
    labels = random.integers(0, 4, samples)
    quadrants = np.zeros([4, 8, 8, 1], "float32")
    for label in range(4):
        row, column = 4 * (label // 2), 4 * (label % 2)
        quadrants[label, row : row + 4, column : column + 4] = 1
    noise = random.normal(scale=0.5, size=(samples, 8, 8, 1))
    return quadrants[labels] + noise.astype("float32"), labels


def recommender_layouts(device_mesh):
    """Tables sharded by rows and by columns, and the dense layers above them."""
    layout_map = LayoutMap(device_mesh)
    layout_map["users/embeddings"] = ("model", None)
    layout_map["items/embeddings"] = (None, "model")
    layout_map["hidden/kernel"] = (None, "model")
    layout_map["hidden/bias"] = ("model",)
    layout_map["output/kernel"] = ("model", None)
    return layout_map


def recommender():
    """Maps user, item and query to a logit."""
    user = layers.Input([1], name="user", dtype="int64")
    item = layers.Input([1], name="item", dtype="int64")
    query = layers.Input([1], name="query", dtype="int64")
    vectors = [
        layers.Embedding(USERS, 8, name="users")(user),
        layers.Embedding(ITEMS, 8, name="items")(item),
        # Takes any 64-bit key, grows with the keys, and is always sharded over all ranks.
        layers.Reshape([1, 8])(
            sok.All2AllDenseEmbedding(None, 8, slot_num=1, nnz_per_slot=1, name="queries")(query)
        ),
    ]
    joined = layers.Flatten()(layers.Concatenate()(vectors))
    hidden = layers.Dense(16, activation="relu", name="hidden")(joined)
    model = tf.keras.Model([user, item, query], layers.Dense(1, name="output")(hidden))
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["AUC"])
    return model


def clicks(random, samples):
    """Users, items, queries and clicks `[samples, 1]`: even users click on half of the items."""
    user = random.integers(0, USERS, [samples, 1])
    item = random.integers(0, ITEMS, [samples, 1])
    query = random.integers(0, 50, [samples, 1]) << 40
    clicked = (user % 2 == 0) & (item < ITEMS // 2)
    return [user, item, query], clicked.astype("float32")


def train(shape, make_layouts, make_model, data, epochs):
    """The losses by epoch on a mesh of this shape, and the table of all shards."""
    devices = list_devices()  # one per rank
    device_mesh = DeviceMesh(shape=shape, axis_names=("batch", "model"), devices=devices)
    layout_map = make_layouts(device_mesh)
    distribution = ModelParallel(
        device_mesh=device_mesh, layout_map=layout_map, batch_dim_name="batch"
    )
    # This sets the global distribution; `with distribution.scope():` also works.
    set_distribution(distribution)
    tf.keras.utils.set_random_seed(7)
    model = make_model()
    x, y = data
    history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
    table = summary(model)
    set_distribution(None)
    return history.history["loss"], table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    initialize()  # before sok.Init: meshes with two axes need groups of ranks
    num_ranks = len(list_devices())
    sok.Init(global_batch_size=64 * num_ranks, seed=7)
    shapes = dict.fromkeys([(1, num_ranks), (num_ranks, 1)])
    if num_ranks % 2 == 0:
        shapes[2, num_ranks // 2] = None
    for name, layouts, model, make_data in (
        ("classifier", published_layouts, classifier, pictures),
        ("recommender", recommender_layouts, recommender, clicks),
    ):
        data = make_data(np.random.default_rng(3), options.samples)
        for shape in shapes:
            losses, table = train(shape, layouts, model, data, options.epochs)
            print(f"{name} on {shape}: losses {' '.join(f'{loss:.5f}' for loss in losses)}")
            print(table, flush=True)


if __name__ == "__main__":
    main()
