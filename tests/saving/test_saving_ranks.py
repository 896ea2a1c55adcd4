"""Two ranks that save and restore, together or not at all."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable, shard_file
from sok_like.saving.parts import table_dumps
from sok_like.table.content import TableShard
from tests.checks.files import flipped, on_rank
from tests.saving import in_memory
from tests.training import rows_by_key


@pytest.fixture(autouse=True)
def owners(monkeypatch):
    """Ranks that are threads have tables of one name in one process."""
    place = table_dumps._place
    monkeypatch.setattr(table_dumps, "_place", lambda *given: (place(*given), sok.rank()))


def filled(name, keys, value=1.0, **options):
    table = sok.EmbeddingVariable(2, name=name, **options)
    sok.assign(table, list(keys), tf.fill([len(keys), 2], value))
    return table


def content(*tables):
    """The first number of each key's row, of this rank."""
    return [{key: row[0] for key, row in rows_by_key(table).items()} for table in tables]


def names_in(folder):
    """Its files, while no rank writes or removes one."""
    comm.current().barrier()
    names = sorted(path.name for path in folder.iterdir())
    comm.current().barrier()
    return names


def test_tables_dumped_in_another_order_raise_and_the_old_dumps_stay(on_threads, tmp_path):
    def check():
        tables, saver = [filled(f"t{i}", range(6), i + 1.0) for i in range(2)], sok.Saver()
        for table in tables:
            saver.dump_to_file(table, tmp_path)
            sok.assign(table, [0, 1], tf.zeros([2, 2]))
        files, swapped = names_in(tmp_path), tables if sok.rank() == 0 else tables[::-1]
        words = "All ranks must make the same calls(?=.*{0} of table 't0' on rank 0)"
        words += "(?=.*{0} of table 't1' on rank 1)"
        with pytest.raises(RuntimeError, match=words.format("dump_to_file")):
            saver.dump_to_file(swapped[0], tmp_path)
        with pytest.raises(RuntimeError, match="All ranks must make the same calls"):
            saver.dump_to_file(swapped[1], tmp_path)
        with pytest.raises(RuntimeError, match=words.format("restore_from_file")):
            saver.restore_from_file(swapped[0], tmp_path)
        assert names_in(tmp_path) == files
        for table in tables:
            saver.restore_from_file(table, tmp_path)
        assert [{*each.values()} for each in content(*tables)] == [{1.0}, {2.0}]

    on_threads(2, check)


def test_a_folder_that_is_not_shared_raises_and_the_old_dumps_stay(on_threads, tmp_path):
    def check():
        """Each rank has a folder of its own; each holds a dump of this rank alone before."""
        rank, mine = sok.rank(), tmp_path / str(sok.rank())
        part = TableShard(np.array([3]), np.ones([1, 2], "f"), np.zeros([1, 0], "f"), [], [])
        in_memory.write_dump(mine, [part], "apart", 2, f"0{rank}")
        before, table = sorted(mine.iterdir()), filled("apart", range(6))
        must = "rank 0: FileNotFoundError: The folder of a dump must be on a file system"
        with pytest.raises(RuntimeError, match=f"{must}.*which rank 1 has written"):
            sok.Saver().dump_to_file(table, mine)
        with pytest.raises(RuntimeError, match="All ranks must read the same dump"):
            sok.Saver().restore_from_file(table, mine)
        assert sorted(mine.iterdir()) == before
        assert [*content(table)[0]] == [rank, rank + 2, rank + 4]

    on_threads(2, check)


def test_a_folder_that_one_rank_does_not_find_raises_on_all(on_threads, tmp_path):
    def check():
        table, saver = filled("missing", range(6)), sok.Saver()
        saver.dump_to_file(table, tmp_path)
        before = content(table)
        with pytest.raises(RuntimeError, match="rank 1: FileNotFoundError"):
            saver.restore_from_file(table, tmp_path / "no" if sok.rank() else tmp_path)
        with pytest.raises(RuntimeError, match="rank 0: "):
            saver.dump_to_file(table, "/proc/no/such/folder")
        assert content(table) == before

    on_threads(2, check)


@pytest.mark.parametrize("by", ["os", "TensorFlow"])
def test_file_uris_are_written_where_they_say(on_threads, tmp_path, monkeypatch, by):
    local = durable.local
    if by == "TensorFlow":
        foreign = lambda path: None if "file://" in str(path) else local(path)  # noqa: E731
        monkeypatch.setattr(durable, "local", foreign)

    monkeypatch.setattr(shard_file, "CHUNK_BYTES", 2**14)  # a file is read in several parts

    def check():
        saver, table, path = sok.Saver(), filled("elsewhere", range(6000)), f"file://{tmp_path}/a"
        saver.dump(table, path)
        sok.assign(table, [0, 1], tf.fill([2, 2], 7.0))
        table.erase([4])
        saver.dump(table, path, since="last")
        expected = [{key: 1.0 + 6 * (key < 2) for key in range(sok.rank(), 6000, 2) if key != 4}]
        for call in (saver.restore, saver.compact, saver.restore):
            if call == saver.restore:
                table.clear()
            call(table, path)
            assert content(table) == expected
        assert len(names_in(tmp_path / "a")) == 3  # those that were replaced are gone
        shard = next((tmp_path / "a").glob("*.0-of-2.npz"))
        with on_rank(0, flipped(shard, shard.stat().st_size - 9000)):
            with pytest.raises(RuntimeError, match=rf"{shard} must be a whole.*checksum"):
                saver.restore(table, path)
        assert content(table) == expected
        saver.dump_to_file(table, path + "/whole")
        for file in durable.names(path + "/whole") if sok.rank() == 0 else ():
            if not file.endswith(".file"):  # those of SOK 1.x are left
                durable.remove(durable.join(path, "whole", file))
        saver.restore_from_file(table, path + "/whole")
        assert content(table) == expected

    on_threads(2, check)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def paths_that_no_rank_shares(folder):
    table, saver = filled("elsewhere", range(6)), sok.Saver()
    with pytest.raises(RuntimeError, match="rank 0: ValueError.*is registered for 's3'"):
        saver.dump(table, "s3://bucket/model")
    for call in (saver.dump, saver.dump_to_file):
        with pytest.raises(RuntimeError, match="must be on a file system that all ranks share"):
            call(table, "ram://bucket/model")
    for call in (saver.restore, saver.compact):
        with pytest.raises(RuntimeError):
            call(table, "ram://bucket/model")


@pytest.mark.ranks
def test_each_process_has_a_file_system_in_memory_of_its_own(on_processes, tmp_path):
    on_processes(2, paths_that_no_rank_shares, tmp_path)


def test_a_shard_that_is_not_seen_as_it_was_written_leaves_the_old_dump(
    on_threads, tmp_path, monkeypatch
):
    own, is_late = shard_file.write_shard, []

    def write(*arguments):
        """Rank 1's file has its size and other bytes: its host has not delivered them yet."""
        entry = own(*arguments)
        if is_late and ".1-of-2." in entry["file"]:
            (tmp_path / entry["file"]).write_bytes(bytes(entry["bytes"]))
        return entry

    monkeypatch.setattr(shard_file, "write_shard", write)

    def check():
        table, saver = filled("unseen", range(6)), sok.Saver()
        saver.dump(table, tmp_path)
        before, expected = names_in(tmp_path), content(table)
        is_late.append(True)
        sok.assign(table, [0, 1], tf.zeros([2, 2]))
        for call in (
            lambda: saver.dump_to_file(table, tmp_path),
            lambda: saver.dump(table, tmp_path),
            lambda: saver.dump(table, tmp_path, since="last"),
        ):
            text = r"rank 0: ValueError: .*\.1-of-2\.npz must have the bytes"
            with pytest.raises(RuntimeError, match=text):
                call()
        assert names_in(tmp_path) == before
        saver.restore(table, tmp_path)
        assert content(table) == expected

    on_threads(2, check)


def test_a_restore_that_one_rank_cannot_take_changes_no_rank(on_threads, tmp_path):
    def check():
        sok.Saver().dump_to_file(filled("uneven", [0, 2, 4, 6, 1]), tmp_path)
        table = filled("uneven", [10, 11], 5.0, capacity=2)
        before, words = content(table), "rank 0: table 'uneven' holds at most 2 keys"
        with pytest.raises(tf.errors.ResourceExhaustedError, match=words):
            sok.Saver().restore_from_file(table, tmp_path)
        assert content(table) == before == [{10 + sok.rank(): 5.0}]

    on_threads(2, check)


def test_a_rank_that_saves_alone_is_told_what_it_waits_for(on_threads, tmp_path):
    """Rank 0 saves while the other looks up; then all look up."""

    def check():
        ones = {"embedding_initializer": "ones", "name": "trains_on"}
        layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, **ones)
        table = layer.embedding_variable
        checkpoint = tf.train.Checkpoint(table=table)
        for save, call in (
            (lambda: sok.Saver().dump_to_file(table, tmp_path), "dump_to_file of table"),
            (lambda: checkpoint.save(str(tmp_path / "c")), "a save of tf.train.Checkpoint"),
        ):
            words = "(?s)rank 1: keys of call.*of 'trains_on"
            if sok.rank() == 0:
                words = f"{words}.*This rank is in {call}.*which all ranks must call$"
            with pytest.raises(tf.errors.FailedPreconditionError, match=words):
                save() if sok.rank() == 0 else layer(tf.constant([1]))
        assert float(tf.reduce_sum(layer(tf.constant([1, 2])))) == 4.0

    on_threads(2, check)


def in_graph(folder):
    """A session: a dump, then a restore that fails on rank 0, then one that works."""
    with tf.Graph().as_default():
        init = sok.Init(global_batch_size=12, seed=7)
        full = sok.EmbeddingVariable(2, name="in_graph")
        small = sok.EmbeddingVariable(2, name="in_graph", capacity=2)
        fill = sok.assign(full, tf.constant([0, 2, 4, 1], tf.int64), tf.ones([4, 2]))
        dump = sok.Saver().dump_to_file(full, folder)
        restore = sok.Saver().restore_from_file(small, folder)
        again = sok.Saver().restore_from_file(full, folder)
        held = *sok.export(full), small.size()
        with tf.compat.v1.Session() as session:
            session.run([init, full.initializer, small.initializer])
            session.run(fill)
            assert session.run(dump) == b"OK"
            words = "rank 0: table 'in_graph' holds at most 2 keys"
            with pytest.raises(tf.errors.ResourceExhaustedError, match=words):
                session.run(restore)
            session.run(full.clear())
            assert session.run(again) == b"OK"
            return session.run(held)


@pytest.mark.ranks
def test_the_same_in_a_session(on_processes, tmp_path):
    for (keys, rows, size), mine in zip(
        on_processes(2, in_graph, tmp_path), ([0, 2, 4], [1]), strict=True
    ):
        assert keys.tolist() == mine and (rows == 1).all() and size == 0
