"""Two tapes around a lookup, and gradients of gradients."""

import numpy as np
import tensorflow as tf

ROWS = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]], np.float32)
KEYS = [0, 2, 2]  # of every rank


def checks(world_size):
    return {"two_tapes": two_tapes, "second_order": second_order}


def _table(name):
    import sok_like as sok

    table = sok.EmbeddingVariable(2, name=name)
    sok.assign(table, np.arange(len(ROWS)), ROWS)
    return table


def _found(table):
    return tf.nn.embedding_lookup(table, tf.constant(KEYS, tf.int64))


def two_tapes():
    """By where the tapes are, the gradient of an ordinary factor and that of the table."""
    results = {}
    for place in ("eager", "within", "around"):
        table, factor = _table(f"two_tapes_{place}"), tf.Variable(2.0)
        find = tf.function(_found, autograph=False) if place == "around" else _found

        def step(table=table, factor=factor, find=find):
            with tf.GradientTape() as one, tf.GradientTape() as other:
                loss = factor * tf.reduce_sum(find(table) ** 2)
            return one.gradient(loss, factor), other.gradient(loss, table)

        of_factor, of_table = tf.function(step)() if place == "within" else step()
        rows = dict(zip(of_table.indices.numpy().tolist(), of_table.values.numpy(), strict=True))
        results[place] = of_factor.numpy(), rows
    return results


def second_order():
    """What a penalty on the gradient of the table raises, and one on that of the rows gives."""
    results = {}
    for place in ("eager", "function"):
        table = _table(f"second_order_{place}")

        def penalty(of_rows, table=table):
            with tf.GradientTape() as outer:
                rows = _found(table)
                with tf.GradientTape() as inner:
                    inner.watch(rows)
                    found = rows if of_rows else _found(table)
                    loss = tf.reduce_sum(found**3)
                gradient = inner.gradient(loss, rows if of_rows else table)
                penalty = tf.reduce_sum((gradient if of_rows else gradient.values) ** 2)
            return outer.gradient(penalty, table)

        call = tf.function(penalty) if place == "function" else penalty
        gradient = call(True)
        rows = dict(zip(gradient.indices.numpy().tolist(), gradient.values.numpy(), strict=True))
        try:
            error = str(call(False))
        except NotImplementedError as raised:
            error = str(raised)
        results[place] = rows, error
    return results
