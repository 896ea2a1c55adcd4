"""Deltas of a table that trains, erases and evicts, written and read by one rank and by two.

Both numbers of ranks within one launch: `files.world`. Each writes a base and three deltas, reads
them at both numbers, goes on from what it has read with a fourth delta, and compacts them.
"""

import numpy as np
import tensorflow as tf

from tests.checks.files import shared, world

DIM, BATCH, NUM_KEYS = 4, 24, 80
ERASED = {3: range(0, 20), 5: range(10, 40, 3)}  # before these steps


def checks(world_size):
    return {"chain": chain, "even_keys": even_keys} if world_size == 2 else {}


def batch(step):
    """int64 `[BATCH]`; the keys of later steps are others, and some of them new."""
    return np.random.default_rng(step).integers(8 * step, 8 * step + NUM_KEYS // 2, BATCH)


def make(kind):
    """A table and its optimizer."""
    import sok_like as sok

    option = None
    if kind == "evicted":
        option = sok.EmbeddingVariableOption(
            filter_option=sok.CounterFilter(2), evict_option=sok.GlobalStepEvict(2)
        )
    table = sok.EmbeddingVariable(DIM, name=f"deltas_{kind}", ev_option=option)
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    return table, sok.OptimizerWrapper(tf.keras.optimizers.Adam(rate))


def train(table, optimizer, steps, kind):
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    rank, world_size = comm.current().rank, comm.current().world_size
    for step in steps:
        if kind == "dense" and step in ERASED:
            table.erase(list(ERASED[step]))
        keys = tf.RaggedTensor.from_tensor(tf.constant(batch(step)[rank::world_size, np.newaxis]))
        with tf.GradientTape() as tape:
            (vectors,) = sok.group_embedding_lookup_sparse([table], [keys], ["sum"])
            loss = tf.reduce_sum(vectors**2)
        optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))


def state(table):
    """All that a dump holds of this rank."""
    return {name: np.asarray(value) for name, value in table.snapshot().fields().items()}


def read(kind, folder):
    import sok_like as sok

    table, optimizer = make(kind)
    sok.Saver().restore(table, folder)
    return table, optimizer


def write(kind, folder):
    """What the table held at the last delta; initial rows of the keys; the dumps' names."""
    import sok_like as sok

    saver, (table, optimizer) = sok.Saver(), make(kind)
    initial = table.find(np.arange(8 * 10 + NUM_KEYS))[0].numpy()
    train(table, optimizer, range(2), kind)
    names = [saver.dump(table, folder)]
    train(table, optimizer, range(2, 4), kind)
    names.append(saver.dump(table, folder, since="last"))
    train(table, optimizer, range(4, 6), kind)
    names.append(saver.dump(table, folder, since=names[-1]))
    saver.dump_to_file(table, folder / "elsewhere")  # brings all rows up to date
    train(table, optimizer, range(6, 8), kind)
    names.append(saver.dump(table, folder, since=6))  # the step of the delta before
    return {"at": state(table), "initial": initial, "names": [n.numpy().decode() for n in names]}


def written_and_read(name, write, after=None):
    """What tables are that 1 and 2 ranks write, and that 1 and 2 ranks read of it.

    `after(kind, folder)` goes on there, on the other number of ranks.
    """
    found = {}
    for kind in ("dense", "evicted"):
        for writers in (1, 2):
            folder = shared(f"{name}_{kind}{writers}")
            with world(writers) as group:
                found[kind, writers] = write(kind, folder) if group is not None else None
            for readers in (1, 2):
                with world(readers) as group:
                    if group is not None:
                        found[kind, writers, readers] = state(read(kind, folder)[0])
            with world(3 - writers) as group:
                if group is not None and after is not None:
                    found[kind, writers, "on"] = after(kind, folder)
    return found


def chain():
    return written_and_read("deltas", write, go_on)


def go_on(kind, folder):
    """What a fourth delta leads to, and a fifth, before which all are compacted."""
    import sok_like as sok

    saver, (table, optimizer), pairs = sok.Saver(), read(kind, folder), []
    train(table, optimizer, [8], kind)
    saver.dump(table, folder, since="last")
    pairs.append([state(table), state(read(kind, folder)[0])])
    saver.compact(table, folder)
    pairs.append([state(table), state(read(kind, folder)[0])])
    train(table, optimizer, [9], kind)
    saver.dump(table, folder, since="last")
    pairs.append([state(table), state(read(kind, folder)[0])])
    return pairs


def even_keys():
    """A table with a filter, all of whose keys rank 0 owns: deltas, compacted, and read again."""
    import sok_like as sok

    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    folder, saver = shared("deltas_even"), sok.Saver()
    table = sok.EmbeddingVariable(DIM, name="even", ev_option=option)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))

    def train(keys, steps):
        keys = tf.RaggedTensor.from_tensor(tf.constant(keys, tf.int64)[:, tf.newaxis])
        for _ in range(steps):
            with tf.GradientTape() as tape:
                (vectors,) = sok.group_embedding_lookup_sparse([table], [keys], ["sum"])
                loss = tf.reduce_sum(vectors**2)
            optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))

    train([2, 4, 6, 8], 3)
    saver.dump(table, folder)
    train([4, 10, 12], 3)
    saver.dump(table, folder, since="last")
    saver.compact(table, folder)
    other = sok.EmbeddingVariable(DIM, name="even", ev_option=option)
    saver.restore(other, folder)
    found = {"wrote": state(table), "read": state(other)}
    train([4], 1)
    saver.dump(table, folder, since="last")
    saver.restore(other, folder)
    return {**found, "wrote_on": state(table), "read_on": state(other)}
