"""`sok.Saver().begin_dump` on one rank: the dump has the bits of the table when it was begun.

Most tests drive the parts of a dump by hand and change the table after each part, in place of
threads whose order differs from run to run.
"""

import concurrent.futures
import itertools
import os
import threading

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks.agreement import Steps
from sok_like.saving import background
from sok_like.saving.format import shard_file
from sok_like.saving.transaction import Saving
from sok_like.table import table_reader
from tests.checks.files import check_same
from tests.emulated import on_host
from tests.saving.test_deltas import RULES, check_restored, made, restored, train
from tests.training import content, train_step

pytestmark = on_host


def begun(table, folder, monkeypatch, change):
    """A dump that calls `change` before each part of a few keys, and its table's state."""
    monkeypatch.setattr(shard_file, "CHUNK_BYTES", 256)
    monkeypatch.setattr(background.BackgroundPart, "_check_stopped", lambda _: change())
    part = background.BackgroundTableDump(table, folder)
    part.agree([part.begin()])
    part.open()
    return part, content(table)


def complete(part, change):
    change()
    part.write_file()
    change()
    Saving(Steps("dump"), [part]).write()


class Changes:
    """Changes a table, in another way each time it is called."""

    def __init__(self, table, optimizer, others=()):
        self.table, self.optimizer, self.others, self.count = table, optimizer, others, 0

    def __call__(self):
        self.count += 1
        random = np.random.default_rng(self.count)
        train(self.table, self.optimizer, np.unique(random.integers(0, 300, 9)))
        for every, change in self.others:
            if self.count % every == 0:
                change(self.table, self.optimizer, random)


def erase_and_come_back(table, optimizer, random):
    keys = random.integers(0, 300, 12)
    table.erase(keys)
    train(table, optimizer, np.unique(keys[:4]))


def look_up(table, optimizer, random):
    """A step of keys that policies count."""
    ids = tf.constant(np.unique(random.integers(0, 300, 20)))[:, tf.newaxis]
    lookup = sok.group_embedding_lookup_sparse
    loss_of = lambda: tf.reduce_sum(lookup([table], [tf.RaggedTensor.from_tensor(ids)], "sum")[0])  # noqa: E731
    train_step(optimizer, table, loss_of)


OTHERS = {
    "trained": [],
    "plain": [],
    "on disk": [(2, erase_and_come_back)],
    "changed": [
        (2, erase_and_come_back),
        (3, lambda table, *_: table.find(tf.range(300, dtype=tf.int64))),
        (11, lambda table, *_: table.snapshot()),  # brings all rows up to date
        (31, lambda table, *_: table.clear()),
    ],
}
OF_POLICIES = [(1, look_up), (3, erase_and_come_back)]


def policies(**options):
    return {"ev_option": sok.EmbeddingVariableOption(**options)}


OPTIONS = {
    "plain": lambda folder: {"use_hashtable": False, "capacity": 300},
    "on disk": lambda folder: policies(
        storage_option=sok.StorageOption("DRAM_SSDHASH", f"{folder}/rows", [2**20])
    ),
    "filter": lambda folder: policies(filter_option=sok.CounterFilter(2)),
    "bloom": lambda folder: policies(filter_option=sok.CBFFilter(2, 1000, 0.01)),
    "steps": lambda folder: policies(evict_option=sok.GlobalStepEvict(9)),
    "l2": lambda folder: policies(evict_option=sok.L2WeightEvict(0.02)),
}


@pytest.mark.parametrize(
    "kind, rule",
    [
        *itertools.product(["trained", "changed"], [*RULES, "lazy adam"]),
        *((kind, "adam") for kind in ("filter", "bloom", "steps", "l2")),
        *(("plain", "decayed"), ("on disk", "decayed")),
    ],
)
def test_it_has_the_bits_of_its_instant(sok, tmp_path, monkeypatch, rule, kind):
    options, folder = OPTIONS.get(kind, lambda _: {})(tmp_path), tmp_path / "dump"
    table, optimizer = made(sok, rule, **options)
    train(table, optimizer, range(200), 2)
    train(table, optimizer, range(0, 200, 3), 2)  # rows owe different numbers of steps
    change = Changes(table, optimizer, OTHERS.get(kind, OF_POLICIES))
    for _ in range(20):
        change()
    part, at = begun(table, folder, monkeypatch, change)
    complete(part, change)
    assert change.count > 35 and len(at["keys"]) > 20  # in many parts
    options = {} if kind == "on disk" else options  # restored in memory
    check_same(content(restored(sok, folder, rule, **options)[0]), at)
    sok.Saver().dump(table, folder, since="last")
    again, its_optimizer = restored(sok, folder, rule, **options)
    check_same(content(again), content(table))
    for each in ((table, optimizer), (again, its_optimizer)):
        train(*each, range(0, 300, 7), 2)
    check_same(content(again), content(table))


def test_an_optimizer_that_attaches_meanwhile(sok, tmp_path, monkeypatch):
    table, optimizer = made(sok, "adagrad")
    sok.assign(table, tf.range(200, dtype=tf.int64), tf.ones([200, table.dim]))
    change = Changes(table, optimizer)
    calls = iter([lambda: None] * 4)

    def later():  # the slots are new at the fifth part
        next(calls, change)()

    part, at = begun(table, tmp_path, monkeypatch, later)
    complete(part, later)
    assert change.count > 5 and at["slot_rows"].size == 0
    check_same(content(restored(sok, tmp_path, "adagrad")[0]), at)


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_a_thread_that_trains_all_the_time(sok, tmp_path, rule):
    table, optimizer = made(sok, rule)
    train(table, optimizer, range(20_000))
    random = np.random.default_rng(0)
    for _ in range(2):  # the second one in the memory of the first
        at = content(table)
        dump = sok.Saver().begin_dump(table, tmp_path / "live")
        steps = 0
        while not dump.done or steps < 20:
            train(table, optimizer, np.unique(random.integers(0, 30_000, 500)))
            steps += 1
        name = dump.finish()
        check_same(content(restored(sok, tmp_path / "live", rule)[0]), at)
    assert dump.finish() == name  # nothing more to do
    assert sok.Saver().dump(table, tmp_path / "live", since="last") != name
    check_restored(sok, tmp_path / "live", table, rule)


@pytest.mark.parametrize("end", ["finish", "cancel", "dump", "exit"])
def test_it_rests_no_more_once_somebody_waits(sok, tmp_path, monkeypatch, end):
    hurry, write = table_reader.TableReader.hurry, background.BackgroundPart.write_file
    hurried, written = set(), threading.Event()

    def seen(stream):
        hurry(stream)
        if stream._stream:
            hurried.add(stream)
        if len(hurried) == 2:
            written.set()

    monkeypatch.setattr(table_reader.TableReader, "hurry", seen)
    monkeypatch.setattr(
        background.BackgroundPart, "write_file", lambda part: (written.wait(60), write(part))
    )
    tables = [sok.EmbeddingVariable(2, name=f"one_of_{n}") for n in range(2)]
    for table in tables:
        sok.assign(table, tf.range(100, dtype=tf.int64), tf.ones([100, 2]))
    saver = sok.Saver()
    dump = saver.begin_dump(tables, tmp_path)
    of_dump = {part._reader for part in dump._parts}
    assert not hurried
    {
        "finish": dump.finish,
        "cancel": dump.cancel,
        "dump": lambda: saver.dump(tables[0], tmp_path),
        "exit": background._at_exit,
    }[end]()
    assert dump.done and hurried == of_dump  # before the thread had read anything
    tables[0].clear()
    dump._parts[0].hurry()  # too late, which does no harm


@pytest.fixture
def trained(sok):
    table, optimizer = made(sok, "sgd")
    train(table, optimizer, range(100))
    return table, optimizer, sok.Saver()


def test_the_next_call_finishes_it_first(sok, tmp_path, trained):
    table, optimizer, saver = trained
    first = saver.begin_dump(table, tmp_path)
    train(table, optimizer, range(50))
    second = saver.begin_dump(table, tmp_path)
    assert first.done and saver.restore(made(sok)[0], tmp_path) == b"OK"
    train(table, optimizer, range(50))
    saver.dump(table, tmp_path, since="last")
    assert second.done
    check_restored(sok, tmp_path, table, "sgd")


def test_what_ends_unfinished(tmp_path, capfd, trained):
    table, _, saver = trained
    dump = saver.begin_dump(table, tmp_path)
    dump.cancel()
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="cancelled"):
        dump.finish()
    saver.begin_dump(table, tmp_path)
    background._at_exit()
    assert "'grown'] was not finished: nothing is saved" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_finish_of_three_threads(sok, tmp_path, trained):
    table, optimizer, saver = trained
    for _ in range(10):
        train(table, optimizer, range(100))
        dump = saver.begin_dump(table, tmp_path)
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            running = [threads.submit(dump.finish) for _ in range(3)]
        assert [thread.result() for thread in running] == [dump.finish()] * 3
        check_restored(sok, tmp_path, table, "sgd")


def test_a_child_of_fork_leaves_its_parent_s_dump(sok, tmp_path, monkeypatch, trained):
    table, _, saver = trained
    go_on, read_back = threading.Event(), background.BackgroundPart.read_back
    late = lambda part: (go_on.wait(60), read_back(part))  # noqa: E731
    monkeypatch.setattr(background.BackgroundPart, "read_back", late)
    dump = saver.begin_dump(table, tmp_path)
    assert dump._written.wait(60) and not dump.done
    files = sorted(tmp_path.iterdir())
    with dump._ending:  # of a thread that the child does not have
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dump.cancel()
                dump.finish()
            except RuntimeError as error:
                background._at_exit()  # as `sys.exit` does
                status = int("belongs to the process" not in str(error))
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    assert sorted(tmp_path.iterdir()) == files
    go_on.set()
    dump.finish()
    check_restored(sok, tmp_path, table, "sgd")


def test_arguments(sok, tmp_path):
    table, _ = made(sok)
    saver = sok.Saver()
    for wrong, error in (
        ([], ValueError),
        ([table, table], ValueError),
        (tf.Variable(1), TypeError),
    ):
        with pytest.raises(error, match="embedding_variable"):
            saver.begin_dump(wrong, tmp_path)
    assert not list(tmp_path.iterdir())
