"""Deltas and dumps in the background, of one and of two ranks, read by either.

A base and three deltas are written, read, gone on from with a fourth delta, and compacted.
"""

import functools
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from sok_like.saving import background
from tests.checks.files import by_key, check_same
from tests.training import content, train_step

pytestmark = pytest.mark.ranks

DIM, BATCH, NUM_KEYS = 4, 24, 80
ERASED = {3: range(0, 20), 5: range(10, 40, 3)}  # before these steps


def batch(step):
    """int64 `[BATCH]`; the keys of later steps are others, and some of them new."""
    first = 8 * step - 20
    return np.random.default_rng(step).integers(first, first + NUM_KEYS // 2, BATCH)


def make(kind):
    """A table and its optimizer."""
    option = None
    if kind == "evicted":
        option = sok.EmbeddingVariableOption(
            filter_option=sok.CounterFilter(2), evict_option=sok.GlobalStepEvict(2)
        )
    table = sok.EmbeddingVariable(DIM, name=f"deltas_{kind}", ev_option=option)
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    return table, sok.OptimizerWrapper(tf.keras.optimizers.AdamW(rate, weight_decay=0.5))


def train(table, optimizer, steps, kind):
    for step in steps:
        if kind == "dense" and step in ERASED:
            table.erase(list(ERASED[step]))
        mine = batch(step)[sok.rank() :: sok.size(), np.newaxis]
        keys = tf.RaggedTensor.from_tensor(tf.constant(mine))
        lookup = functools.partial(sok.group_embedding_lookup_sparse, [table], [keys], "sum")
        train_step(optimizer, table, lambda f=lookup: tf.reduce_sum(f()[0] ** 2))


def read(kind, folder):
    table, optimizer = make(kind)
    sok.Saver().restore(table, folder)
    return table, optimizer


def content_read(kind, folder):
    return content(read(kind, folder)[0])


def chain(kind, folder):
    """What the table holds at the last of three deltas."""
    saver, (table, optimizer) = sok.Saver(), make(kind)
    train(table, optimizer, range(2), kind)
    saver.dump(table, folder)
    train(table, optimizer, range(2, 4), kind)
    name = saver.dump(table, folder, since="last")
    train(table, optimizer, range(4, 6), kind)
    saver.dump(table, folder, since=name)
    saver.dump_to_file(table, folder / "elsewhere")  # brings all rows up to date
    train(table, optimizer, range(6, 8), kind)
    saver.dump(table, folder, since=6)  # the step of the delta before
    return content(table), 8


def in_the_background(kind, folder):
    """What the table holds at a delta that follows a dump in the background."""
    saver, (table, optimizer) = sok.Saver(), make(kind)
    train(table, optimizer, range(2), kind)
    own = background.BackgroundPart.read_back
    late = lambda piece: (time.sleep(0.1 * comm.current().rank), own(piece))  # noqa: E731
    with mock.patch.object(background.BackgroundPart, "read_back", late):
        dump, at, step = saver.begin_dump(table, folder), content(table), 2
        while step < 6 or not dump.done:  # ranks whose threads end apart leave it together
            train(table, optimizer, [step], kind)
            step += 1
        dump.finish()
    check_same(content_read(kind, folder), at)
    saver.dump(table, folder, since="last")
    assert not np.array_equal(content(table)["optimizer_step"], at["optimizer_step"])
    return content(table), step


def go_on(kind, folder, step):
    """A fourth delta, and a fifth, before which all are compacted, hold what the table does."""
    saver, (table, optimizer) = sok.Saver(), read(kind, folder)
    train(table, optimizer, [step], kind)
    saver.dump(table, folder, since="last")
    check_same(content_read(kind, folder), content(table), "another delta")
    saver.compact(table, folder)
    check_same(content_read(kind, folder), content(table), "compacted")
    train(table, optimizer, [step + 1], kind)
    saver.dump(table, folder, since="last")
    check_same(content_read(kind, folder), content(table), "a delta of the compacted one")


@pytest.mark.parametrize("kind", ["dense", "evicted"])
@pytest.mark.parametrize("way, writers", [(chain, 1), (chain, 2), (in_the_background, 2)])
def test_what_was_written_is_the_table_bit_for_bit(on_processes, tmp_path, way, kind, writers):
    found = on_processes(writers, way, kind, tmp_path)
    at, (step,) = by_key([each for each, _ in found]), {step for _, step in found}
    assert len(at["keys"]) and at["initial_row_scale"] < 1
    if kind == "dense":  # keys are missing that were there
        assert set(range(NUM_KEYS)) - set(at["keys"]) & set(batch(0))
    for readers in (1, 2):
        parts = on_processes(readers, content_read, kind, tmp_path)
        check_same(by_key(parts), at, f"{kind} {readers}")
        for rank, part in enumerate(parts):
            assert (part["keys"].view(np.uint64) % np.uint64(readers) == rank).all()
    if way is chain:
        on_processes(3 - writers, go_on, kind, tmp_path, step)


def failing(folder):
    """A rank's thread fails: `finish` raises on both, and leaves what there was."""
    saver, (table, optimizer) = sok.Saver(), make("dense")
    train(table, optimizer, range(2), "dense")
    saver.dump(table, folder)
    before, names = content(table), sorted(each.name for each in folder.iterdir())
    own = background.BackgroundPart.write_file
    for rank in (0, 1):

        def fail(self, rank=rank):
            if comm.current().rank == rank:
                raise OSError(28, "No space left on device", "somewhere")
            own(self)

        with mock.patch.object(background.BackgroundPart, "write_file", fail):
            dump = saver.begin_dump(table, folder)
            train(table, optimizer, [2], "dense")
            for _ in range(2):  # and again
                with pytest.raises(RuntimeError, match=f"(?s)^rank {rank}: .*No space left"):
                    dump.finish()
            assert dump.failed
        comm.current().barrier()
    assert sorted(each.name for each in folder.iterdir()) == names
    check_same(content_read("dense", folder), before)
    saver.begin_dump(table, folder).finish()
    check_same(content_read("dense", folder), content(table))


def test_an_error_of_one_rank_s_thread_is_raised_on_both(on_processes, tmp_path):
    on_processes(2, failing, tmp_path)
