"""Rows of all ranks' batches: values, gradients, and a model against one process."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok

pytestmark = pytest.mark.keras

SIZES = (3, 1, 2)  # batches of the ranks
WEIGHTS = np.random.default_rng(1).normal(size=[3, 6, 2]).astype(np.float32)
ROWS = np.random.default_rng(2).normal(size=[6, 2]).astype(np.float32)
USERS = np.array([1, 2, 3, 1, 5, 6, 7, 2]) * 10**12
ITEMS = np.array([4, 5, 4, 6, 7, 8, 9, 5])


def gathered():
    """What every rank gathers, and its gradient, eagerly and in a function, in two dtypes."""
    rank, world_size = sok.rank(), sok.size()
    start = sum(SIZES[:rank])
    mine = ROWS[start : start + SIZES[rank]]
    total = sum(SIZES[:world_size])

    def step(mine):
        with tf.GradientTape() as tape:
            tape.watch(mine)
            whole = sok.gather_batch(mine)
            loss = tf.reduce_sum(tf.cast(WEIGHTS[rank, :total], whole.dtype) * whole**2)
        return whole, tape.gradient(loss, mine)

    found = {}
    for dtype in (tf.float32, tf.bfloat16):
        given = tf.cast(mine, dtype)
        for name, run in (("eager", step), ("function", tf.function(step))):
            found[f"{name} {dtype.name}"] = [
                tf.cast(tensor, tf.float32).numpy() for tensor in run(given)
            ]
    found["integers"] = sok.gather_batch(tf.range(SIZES[rank]) + 10 * rank).numpy()
    return found


class TwoTower(tf.keras.Model):
    """Users and items; the negatives of a sample are all other items of the global batch."""

    def __init__(self, sok):
        super().__init__()
        statistics = sok.EmbeddingVariableOption(record_statistics=True, count="occurrences")
        options = {"item": {"ev_option": statistics}}
        self.rows = sok.GroupEmbedding({"user": 4, "item": 4}, table_options=options, name="towers")
        self.user_tower = tf.keras.layers.Dense(3, use_bias=False)
        self.item_tower = tf.keras.layers.Dense(3, use_bias=False)
        self.sok = sok

    def call(self, inputs, training=False):
        rows = self.rows(inputs, training=training)
        users, items = self.user_tower(rows["user"]), self.item_tower(rows["item"])
        if training:
            sok = self.sok
            everyone, ids = sok.gather_batch(items), sok.gather_batch(inputs["item"], "item_ids")
            logits = tf.matmul(users, everyone, transpose_b=True)
            often = self.rows.tables["item"].get_frequency(ids)
            logits -= tf.math.log(tf.cast(tf.maximum(often, 1), tf.float32))
            batch = tf.shape(users)[0]
            mine = tf.range(batch) + sok.rank() * batch
            same = tf.equal(inputs["item"][:, tf.newaxis], ids)
            others = same & ~tf.one_hot(mine, tf.shape(ids)[0], True, False)
            logits -= 1e9 * tf.cast(others, tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(mine, logits)
            self.add_loss(tf.reduce_mean(losses))
        return tf.reduce_sum(users * items, 1)


def trained():
    """Weights after `fit`; ranks train on their shares of one global batch per step."""
    tf.keras.utils.set_random_seed(4)
    model = TwoTower(sok)
    features = {"user": tf.constant(USERS), "item": tf.constant(ITEMS, tf.int64)}
    data = sok.shard(tf.data.Dataset.from_tensor_slices(features), drop_remainder=True)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05)), jit_compile=False)
    model.fit(data.batch(8 // sok.size()).repeat(3), steps_per_epoch=3, verbose=0)
    towers = [w for layer in (model.user_tower, model.item_tower) for w in layer.get_weights()]
    tables = model.rows.tables
    found = {"towers": towers}
    for name, keys in (("user", USERS), ("item", ITEMS)):
        found[name] = tf.nn.embedding_lookup(tables[name], keys).numpy()
    found["scores"] = model.predict(features, verbose=0)
    return found


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_rows_and_gradients(on_threads, world_size):
    total = sum(SIZES[:world_size])
    gradient = 2 * WEIGHTS[:world_size, :total].sum(0) * ROWS[:total]  # of the sum of all losses
    for rank, found in enumerate(on_threads(world_size, gathered)):
        mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        for name, near in (("float32", 1e-6), ("bfloat16", 0.05)):
            for how in ("eager", "function"):
                rows, back = found[f"{how} {name}"]
                np.testing.assert_allclose(rows, ROWS[:total], rtol=near / 2, atol=near)
                np.testing.assert_allclose(back, gradient[mine], rtol=near, atol=near)
        expected = [n + 10 * r for r in range(world_size) for n in range(SIZES[r])]
        assert found["integers"].tolist() == expected


@pytest.mark.ranks
def test_a_model_of_two_towers_is_that_of_one_process(on_processes):
    (alone,) = on_processes(1, trained)
    for found in on_processes(2, trained):
        for name, values in alone.items():
            for mine, theirs in zip(found[name], values, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5, err_msg=name)


def test_refused(sok):
    with pytest.raises(ValueError, match="scalar"):
        sok.gather_batch(3.0)
    for wrong in (tf.constant(["a"]), tf.constant([True])):
        with pytest.raises(TypeError, match="must hold numbers"):
            sok.gather_batch(wrong)
