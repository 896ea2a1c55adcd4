"""Processes killed (-9) while they dump: what is in the folder is the dump before or the new one.

    python -m tests.saving.crash --kills 200 --interrupts 200       (`make crash`)

A child dumps the same table again and again, each time with other rows, and prints what it begins
and what it has finished. It is killed at a random instant, mostly while it writes. Then the dump is
read: all its rows are of one instant, the last one finished or the one begun. The next child dumps
once before it is killed in its turn, which must leave no file of earlier dumps. Two
of three dumps are deltas, here of all keys.

Then every call that writes or removes files is interrupted at so many moments of each kind, in this
process (`interrupts.py`).
"""

import argparse
import collections
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

from sok_like.saving.format import deltas, manifest, shard_file
from sok_like.table.content import TableShard
from tests.saving.in_memory import whole

TABLE, DIM, SIZE, WORLD_SIZE = "items", 16, 20_000, 2


def write(folder, number):
    """A dump of two shards whose rows are all `number`, by the steps of `sok.Saver`."""
    entries, as_delta = [], number % 3 > 0
    for rank in range(WORLD_SIZE):
        keys = np.arange(SIZE, dtype=np.int64) * WORLD_SIZE + rank
        rows = np.full([SIZE, DIM], number, np.float32)
        shard = TableShard(keys, rows, rows, ["momentum"], [DIM], optimizer_step=number)
        if as_delta:
            shard.erased, shard.steps = keys[:0] + SIZE, np.zeros([0, 3])
        name = manifest.shard_name(TABLE, f"{number:016x}", rank, WORLD_SIZE)
        entries.append(shard_file.write_shard(folder, name, shard))
    manifest.check_seen(folder, entries)
    name, step, chain = f"{number:016x}", number, []
    if as_delta:
        base = manifest.read_manifest(folder, TABLE, DIM)
        before = [base.name, *(delta.name for delta in base.deltas)]
        for delta, since in zip(base.deltas, before, strict=False):
            fields = {"dump": delta.name, "since": since, "step": delta.step}
            chain.append({**fields, "shards": delta.entries})
        chain.append({"dump": name, "since": before[-1], "step": step, "shards": entries})
        name, step, entries = base.name, base.step, base.entries
    head = manifest.Head(TABLE, DIM, "int64", name)
    manifest.write_manifest(folder, head, entries, step, chain)


def read(folder):
    """The one number of the rows, momenta and step of the dump that is there."""
    dump = manifest.read_manifest(folder, TABLE, DIM)
    found = whole(deltas.content_of(dump, 0, 1, DIM))
    assert sorted(found.keys) == list(range(SIZE * WORLD_SIZE)), "keys are missing"
    numbers = {*np.unique(found.rows), *np.unique(found.slot_rows), found.optimizer_step}
    assert len(numbers) == 1, f"rows of several dumps: {numbers}"
    return int(numbers.pop())


def num_others(folder):
    """Files in the folder that are none of the dump's."""
    dump = manifest.read_manifest(folder, TABLE, DIM)
    listed = len(dump.files) + sum(len(delta.files) for delta in dump.deltas)
    return len(list(pathlib.Path(folder).iterdir())) - 1 - listed


def child(folder, first):
    """Dumps until it is killed."""
    for number in range(first, first + 10_000):
        print("begin", number, flush=True)
        write(folder, number)
        print("end", number, num_others(folder), flush=True)


def run(num_kills, seed):
    """How many kills left the old dump and how many the new one; AssertionError if neither."""
    draw, counts, first = random.Random(seed), collections.Counter(), 1
    with tempfile.TemporaryDirectory() as folder:
        write(folder, 0)
        for _ in range(num_kills):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.saving.crash", "--child", folder, str(first)],
                stdout=subprocess.PIPE,
                text=True,
            )
            process.stdout.readline()  # the first has begun
            time.sleep(draw.uniform(0, 0.5))
            os.kill(process.pid, signal.SIGKILL)
            begun, ended = first, first - 1
            for line in process.communicate()[0].splitlines():
                what, number, *others = line.split()
                begun, ended = (int(number), ended) if what == "begin" else (begun, int(number))
                assert others in ([], ["0"]), "files pile up"
            found = read(folder)
            assert found in (ended, begun), f"dump {found} where {ended} or {begun} must be"
            counts["new" if found == begun and begun > ended else "old"] += 1
            counts["files left behind"] += num_others(folder) > 0
            first = found + 1
        write(folder, first)
        assert num_others(folder) == 0, "files pile up"
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--interrupts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "FIRST"))
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]))
        return
    counts = run(options.kills, options.seed)
    print(f"{options.kills} kills: {dict(counts)}; every dump that was left is whole")
    interrupt(options.interrupts, options.seed)


def interrupt(limit, seed):
    """Interrupts each case; its module needs TensorFlow, which a child must not wait for."""
    import sok_like as sok
    from tests.saving import interrupts

    sok.Init(global_batch_size=1)
    for name in interrupts.CASES if limit else ():
        with tempfile.TemporaryDirectory() as folder:
            counts = interrupts.run(name, pathlib.Path(folder) / "files", limit, seed)
        print(f"{sum(counts.values())} interrupts of {name}: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
