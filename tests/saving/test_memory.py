"""What a dump and a restore take beside the table, as the process itself sees it."""

import pathlib
import re

import numpy as np
import tensorflow as tf

from sok_like.table import table_reader
from sok_like.table.content import TableShard

MIB = 2**20


def status(field):
    """Bytes of this process, as the system counts them."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024


def beside(call):
    """The most that the process held during the call, less what it held before."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def filled(sok, name, num_keys, dim):
    table = sok.EmbeddingVariable(dim, name=name, initial_capacity=num_keys)
    for begin in range(0, num_keys, 2**17):
        keys = np.arange(begin, min(begin + 2**17, num_keys))
        sok.assign(table, keys * 7 - 3, tf.fill([len(keys), dim], float(begin)))
    return table


def test_files_take_parts_of_a_table_beside_it(sok, tmp_path):
    dim, rows = 64, 144 * MIB
    num_keys = rows // (4 * dim)
    table, saver = filled(sok, "streamed", num_keys, dim), sok.Saver()
    assert table.stats().bytes > rows
    taken = {
        call: beside(lambda call=call: getattr(saver, call)(table, tmp_path / call))
        for call in ("dump_to_file", "dump")
    }
    sok.assign(table, np.arange(100) * 7 - 3, tf.ones([100, dim]))
    folder = tmp_path / "dump"
    taken["delta"] = beside(lambda: saver.dump(table, folder, since="last"))
    sok.assign(table, np.arange(50, 200) * 7 - 3, tf.ones([150, dim]))
    table.erase([7 * 1000 - 3])
    saver.dump(table, folder, since="last")
    taken["compact"] = beside(lambda: saver.compact(table, folder))
    # The new content is made beside the old one.
    size = table.stats().bytes
    taken["restore"] = beside(lambda: saver.restore(table, folder)) - size
    keys, found = sok.export(table)
    assert len(keys) == num_keys - 1 and found[:199].numpy().min() == 1
    again = lambda: saver.restore_from_file(table, tmp_path / "dump_to_file")  # noqa: E731
    taken["restore_from_file"] = beside(again) - size
    assert max(taken.values()) < 112 * MIB, taken
    keys, found = sok.export(table)  # -3 is the last of them as an unsigned number
    assert len(keys) == num_keys and float(found[-2, 0]) == (num_keys - 1) // 2**17 * 2**17


def test_restores_that_were_cancelled_leave_no_more_than_one_content(sok):
    """What is staged and never taken: once per table, and no longer than the table is there."""
    num_keys, dim = 2**18, 32
    table = filled(sok, "cancelled", 1000, dim)
    keys, rows = np.arange(num_keys), np.ones([num_keys, dim], np.float32)
    rest = TableShard(keys[:0], rows[:0], rows[:0, :0], [], [])
    part = TableShard(keys, rows, rows[:, :0], [], [])

    def make(table):
        return table_reader.stage_parts(int(table.register_for_read()), rest, num_keys, [part])

    make(table)
    before = status("VmRSS")
    taken = [make(table) for _ in range(4)]
    assert status("VmRSS") - before < rows.nbytes
    _, problem = table.stage(taken[0])
    assert b"Only one restore of a table may run at a time" in problem.numpy()
    staged, problem = table.stage(taken[-1])
    assert not problem.numpy()
    table.commit_staged(staged)
    assert int(table.size()) == num_keys
    make(table)
    held = status("VmRSS")
    del staged, table
    assert held - status("VmRSS") > 1.5 * rows.nbytes
