"""What a dump and a restore take beside the table, as the process itself sees it."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

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


FORMS = [
    pytest.param(144 * MIB, 112 * MIB, id="144 MiB"),
    pytest.param(400 * MIB, 256 * MIB, id="400 MiB", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rows", "limit"), FORMS)
def test_files_take_parts_of_a_table_beside_it(sok, tmp_path, rows, limit):
    dim = 64
    num_keys = rows // (4 * dim)
    table, saver = filled(sok, "streamed", num_keys, dim), sok.Saver()
    assert table.stats().bytes > rows
    taken = {
        "dump_to_file": beside(lambda: saver.dump_to_file(table, tmp_path / "a")),
        "dump": beside(lambda: saver.dump(table, tmp_path / "b")),
    }
    sok.assign(table, np.arange(100) * 7 - 3, tf.ones([100, dim]))
    taken["delta"] = beside(lambda: saver.dump(table, tmp_path / "b", since="last"))
    # The new content is made beside the old one.
    size = table.stats().bytes
    taken["restore"] = beside(lambda: saver.restore(table, tmp_path / "b")) - size
    taken["restore_from_file"] = (
        beside(lambda: saver.restore_from_file(table, tmp_path / "a")) - size
    )
    print({call: f"{num_bytes / MIB:.0f} MiB" for call, num_bytes in taken.items()})
    assert max(taken.values()) < limit, taken
    keys, found = sok.export(table)  # -3 is the last of them as an unsigned number
    assert len(keys) == num_keys and float(found[-2, 0]) == (num_keys - 1) // 2**17 * 2**17
