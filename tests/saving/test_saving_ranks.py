"""Two ranks that save and restore, together or not at all; their part is in checks/saving.py."""

import os
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from sok_like.saving.format import durable, manifest, shard_file
from sok_like.table.content import TableShard

pytestmark = [pytest.mark.ranks]


def together():
    """All of it over one folder, which the ranks share."""
    rank = comm.current().rank
    # The ranks of a test run on one machine, under one launcher.
    folder = pathlib.Path(tempfile.gettempdir()) / f"sok_saving_{os.getppid()}"
    found = {"order": order(sok, rank, folder / "order")}
    found["shared"] = not_shared(sok, rank, folder / "shared")
    found["uneven"] = uneven(sok, rank, folder / "uneven")
    found["several"] = several(sok, rank, folder / "several")
    found["elsewhere"] = elsewhere(sok, rank, folder / "elsewhere")
    found["unseen"] = unseen(sok, rank, folder / "unseen")
    found["alone"] = alone(sok, rank, folder / "alone")
    found["graph"] = graph(sok, rank, folder / "graph")
    return found


def message_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def keys_of(table):
    return sok_export(table)[0].numpy().tolist()


def sok_export(table):
    return sok.export(table)


def filled(sok, name, keys, value=1.0, **options):
    table = sok.EmbeddingVariable(2, name=name, **options)
    sok.assign(table, list(keys), tf.fill([len(keys), 2], value))
    return table


def names_in(folder):
    """Its files, while no rank writes or removes one."""
    comm.current().barrier()
    names = sorted(path.name for path in folder.iterdir())
    comm.current().barrier()
    return names


def order(sok, rank, folder):
    """Rank 1 dumps two tables in another order than rank 0."""
    tables = [filled(sok, f"t{i}", range(6), i + 1.0) for i in range(2)]
    saver = sok.Saver()
    for table in tables:
        saver.dump_to_file(table, folder)
        sok.assign(table, [0, 1], tf.zeros([2, 2]))
    files = names_in(folder)
    swapped = tables if rank == 0 else tables[::-1]
    messages = [message_of(saver.dump_to_file, table, folder) for table in swapped]
    messages.append(message_of(saver.restore_from_file, swapped[0], folder))
    kept = names_in(folder) == files
    for table in tables:
        saver.restore_from_file(table, folder)
    rows = [float(tf.reduce_min(sok.export(table)[1])) for table in tables]
    return {"messages": messages, "kept": kept, "rows": rows}


def not_shared(sok, rank, folder):
    """Each rank has a folder of its own; each holds a dump of this rank alone before."""
    mine = folder / str(rank)
    part = TableShard(
        *(np.array([3], np.int64), np.ones([1, 2], np.float32), np.zeros([1, 0], np.float32)),
        *([], []),
    )
    name = manifest.shard_name("apart", f"0{rank}", 0, 1)
    entry = shard_file.write_shard(mine, name, part)
    manifest.write_manifest(mine, manifest.Head("apart", 2, "int64", f"0{rank}"), [entry])
    before = sorted(path.name for path in mine.iterdir())
    table = filled(sok, "apart", range(6))
    messages = [message_of(sok.Saver().dump_to_file, table, mine)]
    messages.append(message_of(sok.Saver().restore_from_file, table, mine))
    after = sorted(path.name for path in mine.iterdir())
    return {"messages": messages, "kept": before == after, "keys": keys_of(table)}


def uneven(sok, rank, folder):
    """Rank 0 has no room for its part, or a shard is damaged for rank 1 only."""
    sok.Saver().dump_to_file(filled(sok, "uneven", [0, 2, 4, 6, 1]), folder)
    table = filled(sok, "uneven", [10, 11], 5.0, capacity=2)
    message = message_of(sok.Saver().restore_from_file, table, folder)
    rows = sok.export(table)[1].numpy().tolist()
    return {"message": message, "keys": keys_of(table), "rows": rows}


def elsewhere(sok, rank, folder):
    """Paths with schemes: of the disk, also by TensorFlow; of one process; of no file system."""
    found, saver, local = {}, sok.Saver(), durable.local
    table = filled(sok, "elsewhere", range(6))
    for name in ("local", "by TensorFlow"):
        if name != "local":
            durable.local = lambda path: None if "file://" in str(path) else local(path)
        path = f"file://{folder}/{name[:2]}"
        try:
            saver.dump(table, path)
            sok.assign(table, [0, 1], tf.fill([2, 2], 7.0))
            table.erase([4])
            saver.dump(table, path, since="last")
            sok.assign(table, range(6), tf.zeros([6, 2]))
            saver.restore(table, path)
            saver.compact(table, path)
            saver.restore(table, path)
            saver.dump_to_file(table, path + "/whole")
            for file in durable.names(path + "/whole") if rank == 0 else ():
                if not file.endswith(".file"):  # those of SOK 1.x are left
                    durable.remove(durable.join(path, "whole", file))
            saver.restore_from_file(table, path + "/whole")
        finally:
            durable.local = local
        found[name] = dict(zip(keys_of(table), sok.export(table)[1][:, 0].numpy(), strict=True))
    before = sorted(os.listdir("."))
    calls = saver.dump, saver.dump_to_file, saver.restore, saver.compact
    for scheme in ("s3", "ram"):  # each process has a `ram://` of its own
        found[scheme] = [message_of(call, table, f"{scheme}://bucket/model") for call in calls]
    return {**found, "kept": sorted(os.listdir(".")) == before}


def unseen(sok, rank, folder):
    """What rank 1 has written has its size and other bytes: its host has not delivered them yet."""
    own, saver = shard_file.write_shard, sok.Saver()

    def written(*arguments):
        entry = own(*arguments)
        if rank == 1:
            with open(folder / entry["file"], "r+b") as file:
                file.write(bytes(entry["bytes"]))
        return entry

    table = filled(sok, "unseen", range(6))
    saver.dump(table, folder)
    before = names_in(folder)
    sok.assign(table, [0, 1], tf.zeros([2, 2]))
    shard_file.write_shard = written
    try:
        messages = [message_of(saver.dump_to_file, table, folder)]
        messages += [message_of(saver.dump, table, folder, since=since) for since in (None, "last")]
    finally:
        shard_file.write_shard = own
    files = names_in(folder)
    saver.restore(table, folder)
    return {
        "messages": messages,
        "kept": files == before,
        "rows": sok.export(table)[1].numpy().tolist(),
    }


def several(sok, rank, folder):
    """A checkpoint of two tables and a variable: rank 1 has no room for its part of the second."""
    names, messages = ("first", "second"), []

    def tables(keys, value, capacity=None):
        return {
            name: filled(sok, name, keys, value, capacity=most)
            for name, most in zip(names, (None, capacity), strict=True)
        }

    def content(found):
        return [[part.numpy().tolist() for part in sok.export(table)] for table in found.values()]

    path = str(folder / "checkpoint")
    saved = tables([0, 1, 3, 5], 1.0)
    tf.train.Checkpoint(**saved, ordinary=tf.Variable(1.0)).write(path)
    small, ordinary = tables([10, 11], 5.0, capacity=2), tf.Variable(5.0)
    messages.append(message_of(tf.train.Checkpoint(**small, ordinary=ordinary).read, path))
    kept = content(small), float(ordinary)
    again = tables([10, 11], 5.0, capacity=3)
    tf.train.Checkpoint(**again, ordinary=ordinary).read(path)
    same = content(again) == content(saved) and float(ordinary) == 1.0
    return {"messages": messages, "kept": kept, "same": same}


def alone(sok, rank, folder):
    """Rank 0 dumps, or saves a checkpoint, while the others look up; then all look up."""
    layer = sok.All2AllDenseEmbedding(
        None, 2, 1, 1, dynamic_input=True, name="trains_on", embedding_initializer="ones"
    )
    table = layer.embedding_variable
    checkpoint = tf.train.Checkpoint(table=table)
    messages = []
    for save in (
        lambda: sok.Saver().dump_to_file(table, folder),
        lambda: checkpoint.save(str(folder / "checkpoint")),
    ):
        messages.append(message_of(save if rank == 0 else lambda: layer(tf.constant([1]))))
    return {"messages": messages, "after": float(tf.reduce_sum(layer(tf.constant([1, 2]))))}


def graph(sok, rank, folder):
    """A session: a dump, then a restore that fails on rank 0, then one that works."""
    seen = {}
    with tf.Graph().as_default():
        init = sok.Init(global_batch_size=12, seed=7)
        full = sok.EmbeddingVariable(2, name="in_graph")
        small = sok.EmbeddingVariable(2, name="in_graph", capacity=2)
        fill = sok.assign(full, tf.constant([0, 2, 4, 1], tf.int64), tf.ones([4, 2]))
        dump = sok.Saver().dump_to_file(full, folder)
        restore = sok.Saver().restore_from_file(small, folder)
        again = sok.Saver().restore_from_file(full, folder)
        sizes = full.size(), small.size()
        with tf.compat.v1.Session() as session:
            session.run([init, full.initializer, small.initializer])
            session.run(fill)
            seen["dumped"] = session.run(dump)
            seen["message"] = message_of(session.run, restore)
            session.run(full.clear())
            seen["restored"] = session.run(again)
            seen["sizes"] = session.run(sizes)
    return seen


@pytest.fixture
def found(on_processes):
    return on_processes(2, together)


def test_tables_dumped_in_another_order_raise_and_the_old_dumps_stay(found):
    for seen in (result["order"] for result in found):
        dumps, restore = seen["messages"][:2], seen["messages"][2]
        assert all("RuntimeError: All ranks must make the same calls" in text for text in dumps)
        assert "dump_to_file of table 't0' on rank 0" in dumps[0]
        assert "dump_to_file of table 't1' on rank 1" in dumps[0]
        assert "restore_from_file of table 't1' on rank 1" in restore
        assert seen["kept"] and seen["rows"] == [1.0, 2.0]


def test_a_folder_that_is_not_shared_raises_and_the_old_dumps_stay(found):
    for rank, seen in enumerate(result["shared"] for result in found):
        dump, restore = seen["messages"]
        assert "rank 0: FileNotFoundError: The folder of a dump must be on a file system" in dump
        assert "which rank 1 has written" in dump
        assert "All ranks must read the same dump" in restore
        assert seen["kept"] and seen["keys"] == [rank, rank + 2, rank + 4]


def test_paths_with_a_scheme_are_written_where_they_say_or_raise_on_all_ranks(found):
    for rank, seen in enumerate(result["elsewhere"] for result in found):
        ones = {0: [7.0, 1.0], 1: [7.0, 1.0, 1.0]}[rank]
        expected = dict(zip([k for k in range(rank, 6, 2) if k != 4], ones, strict=True))
        assert seen["local"] == seen["by TensorFlow"] == expected
        for message in seen["s3"]:
            assert "rank 0: ValueError" in message and "is registered for 's3'" in message
        assert "must be on a file system that all ranks share" in seen["ram"][0]
        assert all(seen["ram"]) and seen["kept"]


def test_a_shard_that_is_not_seen_as_it_was_written_leaves_the_old_dump(found):
    for seen in (result["unseen"] for result in found):
        for message in seen["messages"]:
            assert (
                "rank 0: ValueError: " in message and ".1-of-2.npz must have the bytes" in message
            )
        assert seen["kept"] and seen["rows"] == [[1.0, 1.0]] * 3


def test_a_restore_that_one_rank_cannot_take_changes_no_rank(found):
    for rank, seen in enumerate(result["uneven"] for result in found):
        assert seen["message"].startswith("ResourceExhaustedError")
        assert "rank 0: table 'uneven' holds at most 2 keys" in seen["message"]
        assert seen["keys"] == [10 + rank] and seen["rows"] == [[5.0, 5.0]]


def test_a_checkpoint_that_one_rank_cannot_take_changes_no_table_of_any_rank(found):
    for rank, seen in enumerate(result["several"] for result in found):
        assert "rank 1: table 'second' holds at most 2 keys" in seen["messages"][0]
        one = [[10 + rank], [[5.0, 5.0]]]
        assert seen["kept"] == ([one, one], 5.0) and seen["same"]


def test_a_rank_that_saves_alone_is_told_what_it_waits_for(found):
    for rank, seen in enumerate(result["alone"] for result in found):
        for message, call in zip(
            seen["messages"],
            ["dump_to_file of table 'trains_on'", "a save of tf.train.Checkpoint"],
            strict=True,
        ):
            assert message.startswith("FailedPreconditionError")
            assert "rank 1: keys of call" in message and "of 'trains_on" in message
            if rank == 0:
                assert f"This rank is in {call}" in message
                assert message.endswith("which all ranks must call")
        assert seen["after"] == 4.0


def test_the_same_in_a_session(found):
    for rank, seen in enumerate(result["graph"] for result in found):
        assert (seen["dumped"], seen["restored"]) == (b"OK", b"OK")
        assert seen["message"].startswith("ResourceExhaustedError")
        assert "rank 0: table 'in_graph' holds at most 2 keys" in seen["message"]
        assert seen["sizes"] == (3 - 2 * rank, 0)
