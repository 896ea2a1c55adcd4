"""Deltas of a table that trains, erases and evicts, of one and of two ranks, read by either.

A base and three deltas are written, read, gone on from with a fourth delta, and compacted.
"""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm

pytestmark = pytest.mark.ranks

DIM, BATCH, NUM_KEYS = 4, 24, 80
ERASED = {3: range(0, 20), 5: range(10, 40, 3)}  # before these steps


def batch(step):
    """int64 `[BATCH]`; the keys of later steps are others, and some of them new."""
    return np.random.default_rng(step).integers(8 * step, 8 * step + NUM_KEYS // 2, BATCH)


def make(kind):
    """A table and its optimizer."""
    option = None
    if kind == "evicted":
        option = sok.EmbeddingVariableOption(
            filter_option=sok.CounterFilter(2), evict_option=sok.GlobalStepEvict(2)
        )
    table = sok.EmbeddingVariable(DIM, name=f"deltas_{kind}", ev_option=option)
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    return table, sok.OptimizerWrapper(tf.keras.optimizers.Adam(rate))


def train(table, optimizer, steps, kind):
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
    table, optimizer = make(kind)
    sok.Saver().restore(table, folder)
    return table, optimizer


def write(kind, folder):
    """What the table held at the last delta; initial rows of the keys; the dumps' names."""
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


def state_read(kind, folder):
    return state(read(kind, folder)[0])


def go_on(kind, folder):
    """What a fourth delta leads to, and a fifth, before which all are compacted."""
    saver, (table, optimizer), pairs = sok.Saver(), read(kind, folder), []
    train(table, optimizer, [8], kind)
    saver.dump(table, folder, since="last")
    pairs.append([state(table), state_read(kind, folder)])
    saver.compact(table, folder)
    pairs.append([state(table), state_read(kind, folder)])
    train(table, optimizer, [9], kind)
    saver.dump(table, folder, since="last")
    return [*pairs, [state(table), state_read(kind, folder)]]


def by_key(parts):
    """The content of all ranks, in the order of the keys."""
    keys = np.concatenate([part["keys"] for part in parts])
    order = np.argsort(keys)
    arrays = {"keys": keys[order]}
    for name in ("rows", "slot_rows", "records"):
        if name in parts[0]:
            arrays[name] = np.concatenate([part[name] for part in parts])[order]
    if "waiting" in parts[0]:
        waiting = np.concatenate([part["waiting"] for part in parts])
        arrays["waiting"] = waiting[np.argsort(waiting[:, 0])]
    arrays["steps"] = np.unique([part["optimizer_step"] for part in parts])
    return arrays


def check_same(after, before, what):
    assert after.keys() == before.keys() and len(before["keys"])
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], f"{what} {name}")


def dense_adam(initial, steps):
    """Rows of dense Adam in float64, by key: every row there is moves at every step."""
    rows, last = {}, None
    for step in range(steps):
        for key in ERASED.get(step, ()):
            rows.pop(key, None)
        keys = batch(step)
        assert len(keys) == BATCH
        for key in keys:
            rows.setdefault(key, [initial[key].astype(np.float64), np.zeros(DIM), np.zeros(DIM)])
        rate = 0.05 * 0.9 ** (step / 2)
        alpha = rate * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        counts = {key: np.sum(keys == key) for key in rows}
        for key, (row, m, v) in rows.items():
            gradient = 2 * row * counts[key]
            m += 0.1 * (gradient - m)
            v += 0.001 * (gradient**2 - v)
            row -= alpha * m / (np.sqrt(v) + 1e-7)
        last = rows
    return last


def check_read(run, at, kind, folder):
    """One rank and two read the content `at`."""
    for readers in (1, 2):
        parts = run(readers, state_read, kind, folder)
        check_same(by_key(parts), at, f"{kind} {readers}")
        for rank, part in enumerate(parts):
            assert (part["keys"].view(np.uint64) % np.uint64(readers) == rank).all()


@pytest.mark.parametrize("kind", ["dense", "evicted"])
@pytest.mark.parametrize("writers", [1, 2])
def test_a_base_and_its_deltas_are_the_table_bit_for_bit(on_processes, tmp_path, kind, writers):
    found = on_processes(writers, write, kind, tmp_path)
    at = by_key([result["at"] for result in found])
    check_read(on_processes, at, kind, tmp_path)
    if kind == "dense":
        rows = dense_adam(found[0]["initial"], 8)
        assert at["keys"].tolist() == sorted(rows) and len(rows) < NUM_KEYS
        expected = np.stack([rows[key][0] for key in sorted(rows)])
        np.testing.assert_allclose(at["rows"], expected, rtol=1e-4, atol=1e-6)
        # Keys are missing that were there, and rows have moved that no delta holds.
        assert set(range(NUM_KEYS)) - set(at["keys"]) & set(batch(0))
    ranks = on_processes(3 - writers, go_on, kind, tmp_path)
    for number in range(3):
        live, again = (by_key([pairs[number][of] for pairs in ranks]) for of in (0, 1))
        check_same(again, live, f"{kind} {writers} {number}")


def compact_even_keys(folder):
    """All of a table with a filter are of one rank; deltas are compacted, and read again."""
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    table, other = (sok.EmbeddingVariable(DIM, name="even", ev_option=option) for _ in "ab")
    optimizer, saver = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), sok.Saver()

    def train(keys, steps):
        keys = tf.RaggedTensor.from_tensor(tf.constant(keys, tf.int64)[:, tf.newaxis])
        for _ in range(steps):
            with tf.GradientTape() as tape:
                (vectors,) = sok.group_embedding_lookup_sparse([table], [keys], ["sum"])
                loss = tf.reduce_sum(vectors**2)
            optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))

    def check_restored():
        saver.restore(other, folder)
        wrote, found = state(table), state(other)
        assert found.keys() == wrote.keys()
        for name, value in wrote.items():
            np.testing.assert_array_equal(found[name], value, name)

    train([2, 4, 6, 8], 3)
    saver.dump(table, folder)
    train([4, 10, 12], 3)
    saver.dump(table, folder, since="last")
    saver.compact(table, folder)
    check_restored()
    assert state(table)["keys"].tolist() == ([] if sok.rank() else [2, 4, 6, 8, 10, 12])
    train([4], 1)
    saver.dump(table, folder, since="last")
    check_restored()


def test_compact_of_a_table_whose_keys_are_all_of_one_rank(on_processes, tmp_path):
    on_processes(2, compact_even_keys, tmp_path)
