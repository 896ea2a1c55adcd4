"""The launcher of multi-rank tests itself: results, failures and time limits."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from sok_like.runtime.ranks import launchers
from tests import ranks, ready_ranks
from tests.ranks import RanksFailed, check_ended, run_ranks, wait_for

pytestmark = pytest.mark.ranks


def gather_ranks(scale):
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    gathered = hvd.allgather(tf.constant([hvd.rank() * scale]), name="ranks")
    return {"rank": hvd.rank(), "size": hvd.size(), "gathered": gathered.numpy().tolist()}


def fail_on_rank(rank):
    me = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if me == rank:
        raise ValueError(f"rank {me} cannot go on")
    time.sleep(2 * ranks.HANG_LIMIT)  # must be ended by the failure of the other


def leave_without_result():
    os._exit(0)


def sleep_and_tell(folder, seconds):
    me = os.environ["OMPI_COMM_WORLD_RANK"]
    (pathlib.Path(folder) / f"pid{me}").write_text(str(os.getpid()))
    print(f"rank {me} sleeps", flush=True)
    time.sleep(seconds)


def test_horovod_ranks_exchange():
    results = run_ranks("tests.test_ranks:gather_ranks", 2, launcher="gloo", args={"scale": 10})
    assert results == [{"rank": rank, "size": 2, "gathered": [0, 10]} for rank in range(2)]


def test_failing_rank_stops_all_with_its_message():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="ValueError: rank 1 cannot go on"):
        run_ranks("tests.test_ranks:fail_on_rank", 2, args={"rank": 1})
    assert time.monotonic() - start < ranks.HANG_LIMIT / 2


def test_rank_that_leaves_without_a_result_fails():
    with pytest.raises(RanksFailed, match=r"without a result of ranks \[0, 1\]"):
        run_ranks("tests.test_ranks:leave_without_result", 2)


def test_time_limit_ends_every_process(tmp_path):
    args = {"folder": str(tmp_path), "seconds": 2 * ranks.HANG_LIMIT}
    for timeout in (2, 20, 200):  # until the ranks have begun before it, on a slow machine
        with pytest.raises(RanksFailed) as raised:
            run_ranks("tests.test_ranks:sleep_and_tell", 2, args=args, timeout=timeout)
        if "rank 1 sleeps" in str(raised.value) and len(list(tmp_path.glob("pid*"))) == 2:
            break
    raised.match(rf"longer than {timeout} s(.|\n)*load average(.|\n)*rank 1 sleeps")
    check_ended([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)])


def test_a_killed_test_leaves_no_launcher_and_no_ranks(tmp_path):
    args = {"folder": str(tmp_path), "seconds": ranks.HANG_LIMIT}
    # Processes of the launcher, not forks, whose parent is their server.
    launcher = launchers.launch_line(2, "mpirun")
    call = f"run_ranks('tests.test_ranks:sleep_and_tell', 2, launcher={launcher}, args={args!r})"
    command = [sys.executable, "-c", f"from tests.ranks import run_ranks; {call}"]
    process = subprocess.Popen(command, cwd=ranks.ROOT, start_new_session=True)
    wait_for(lambda: all(_told(tmp_path / f"pid{rank}") for rank in range(2)))
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    parent = pathlib.Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]
    pids.append(int(parent))  # the launcher
    process.kill()
    process.wait()
    check_ended(pids)


def part(how):
    from sok_like.runtime.ranks import comm

    if ranks.rank_of_process() == 1:
        os._exit(3) if how == "ends" else None
        raise ValueError("rank 1 cannot go on")
    comm.current().barrier()


def number_after_init():
    import sok_like as sok

    return sok.rank(), sok.Init(global_batch_size=12, seed=ready_ranks.SEED) is not None


def test_ready_ranks_go_on_after_a_failure_and_after_an_end(monkeypatch):
    monkeypatch.setattr(ready_ranks, "_ready", {})
    monkeypatch.setattr(ready_ranks, "PATIENCE", 1)
    try:
        with pytest.raises(RanksFailed, match="ended a rank"):
            ready_ranks.run(2, part, ("ends",))
        assert ready_ranks.run(2, number_after_init, ()) == [(0, True), (1, True)]
        with pytest.raises(RanksFailed, match="rank 1 cannot go on"):
            ready_ranks.run(2, part, ("fails",))
        assert ready_ranks._ready == {}
    finally:
        ready_ranks.close()


def _told(file):
    return file.exists() and file.read_text()
