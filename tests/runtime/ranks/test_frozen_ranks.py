"""A rank that is frozen, or behind a cut network, is named, and the job ends.

By MPI the others raise. Horovod's collectives cannot be ended, so there a status says it.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import time

import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm, stall_verdict, stalls
from sok_like.runtime.ranks.launchers import find_program
from tests import forks
from tests.ranks import RanksFailed, run_ranks, wait_for

pytestmark = pytest.mark.ranks
ON_HOST = """exec ip netns exec "$1" unshare --uts sh -c 'hostname "$1"; shift; "$@"' sh "$@" """
HOSTS = ("10.213.7.1", "10.213.7.2")
# A cut network also keeps mpirun from ending its part on the other host. So when both ranks have
# ended by themselves, the network is mended. (mpirun alone gives up after 15 minutes.)
MENDS_THE_NETWORK = """link=$1; shift
"$@"
status=$?
echo $status >"$0.$OMPI_COMM_WORLD_RANK"
if [ "$OMPI_COMM_WORLD_RANK" = 0 ]; then
  for _ in $(seq 600); do [ -s "$0.1" ] && break; sleep 0.1; done
  ip link set "$link" up
fi
exit $status"""


def _call(how):
    """A function without arguments that looks up: eagerly, in a function or in a session.

    It has been called; from now on ranks wait for each other for 2 s, which is a silence, too.
    """
    sok.Init(global_batch_size=8)

    def layer():
        return sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="cold")

    if how == "session":
        with tf.Graph().as_default():
            rows = layer()(tf.constant([1], tf.int64))
            session = tf.compat.v1.Session()
            session.run(tf.compat.v1.global_variables_initializer())
        call = functools.partial(session.run, rows)
    else:
        function = tf.function(layer()) if how == "function" else layer()
        call = functools.partial(function, tf.constant([1], tf.int64))
    call()
    call()
    comm.current().barrier()
    stalls._SHUTS_DOWN = 0.5  # enough, because what is frozen never answers
    stalls._watch._limit = stall_verdict.SILENT = 3.0
    if comm.current().rank == 0:
        stalls._watch._judge._limit = 2.0
    return call


# Runs the words behind it once the process `$1` has ended, whether somebody has asked how or not.
WHEN_ENDED = """while grep -qs '^State:.[^Z]' /proc/$1/status; do sleep 0.1; done
shift
"$@" """


def _pids():
    return comm.current().all_gather(tf.constant([os.getpid()]), "pids").numpy().tolist()


def _when_ended(pid, *words):
    return ["sh", "-c", WHEN_ENDED, "sh", *map(str, [pid, *words])]


def freezes(rank, how, inside, wakes):
    """`rank` stops inside an exchange, or before it; the others look up."""
    call, pids, own_rank = _call(how), _pids(), comm.current().rank
    if inside and own_rank == 0:  # which the ranks tell that they wait
        done = stalls._watch._longest_wait()[2]
        wait_for(lambda: stalls._watch._judge._ranks[rank].number > done)
        os.kill(pids[rank], signal.SIGSTOP)
    elif not inside and own_rank == rank:
        me, launcher = os.getpid(), forks.launcher()
        if wakes:  # when the other has ended, while the launcher cannot end it, for it is stopped
            for ended, process in ((pids[1 - rank], me), (me, launcher)):
                wake = _when_ended(ended, "kill", "-CONT", process)
                subprocess.Popen(wake, start_new_session=True)
            os.kill(launcher, signal.SIGSTOP)
        time.sleep(0.6)  # two reports
        os.kill(me, signal.SIGSTOP)
    call()


def dies(rank):
    """`rank` is killed while the launcher is stopped and cannot end the others, who look up."""
    call, pids, launcher = _call("function"), _pids(), forks.launcher()
    if comm.current().rank == rank:
        wake = _when_ended(pids[1 - rank], "kill", "-CONT", launcher)
        subprocess.Popen(wake, start_new_session=True)
        os.kill(launcher, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    call()


def ends_beside_a_frozen_rank():
    """Rank 1 stops, and no other rank waits for it in an exchange: rank 0 has finished."""
    stalls._STAYS = stalls._LEAVES = 0.0
    _call("eager")
    if comm.current().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def cuts(link):
    """Rank 0 cuts the network between the hosts, then all look up."""
    call = _call("function")
    assert stalls._watch.is_alive()
    if comm.current().rank == 0:
        assert stalls._watch._door.address[0] == HOSTS[0]  # not another interface, nor all of them
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
    call()


def said(function, num_ranks, launcher="mpirun", engine="horovod", status=None, **args):
    """What each rank printed before the job ended: by Horovod with the status of a stall."""
    status = status or {"horovod": 75, "mpi": 1}[engine]
    with pytest.raises(RanksFailed, match=f"ended with {status}, without") as raised:
        run_ranks(
            f"tests.runtime.ranks.test_frozen_ranks:{function}",
            num_ranks,
            launcher=launcher,
            args=args,
            env={"SOK_ENGINE": engine},
        )
    return re.split(r"--- .*\n", str(raised.value))[1 : num_ranks + 1]


@pytest.mark.parametrize(
    "engine, num_ranks, rank, how, inside",
    [
        ("horovod", 2, 1, "eager", True),
        ("mpi", 2, 1, "function", True),
        pytest.param("horovod", 3, 2, "session", False, marks=pytest.mark.slow),
        pytest.param("mpi", 3, 2, "session", False, marks=pytest.mark.slow),
    ],
)
def test_a_frozen_rank_is_named_and_the_job_ends(engine, num_ranks, rank, how, inside):
    how = {"rank": rank, "how": how, "inside": inside, "wakes": False}
    outputs = said("freezes", num_ranks, engine=engine, **how)
    came = "rank 0" if num_ranks == 2 else "ranks 0, 1"
    before = "in the exchange 'cold_keys'" if inside else "in no exchange"
    # By MPI, what the rank sent before has arrived.
    where = "cold_rows" if engine == "mpi" and inside else "cold_keys"
    assert re.search(rf"'{where}.*: {came} reached it and waited for \d+ s", outputs[0])
    assert re.search(
        rf"; rank {rank} has not answered for \d+ s; its last report: {before}", outputs[0]
    )
    assert "all ranks are in it" not in "".join(outputs)
    assert ("DeadlineExceededError" in outputs[0]) == (engine == "mpi")


def test_a_frozen_rank_0_is_named_and_ends_when_it_wakes():
    rank_0, rank_1 = said("freezes", 2, rank=0, how="function", inside=False, wakes=True)
    assert re.search(r"'cold_keys': rank 0 has not answered for \d+ s", rank_1)
    assert "rank 1 has ended without a message" in rank_0
    assert all("this process ends with status 75" in output for output in (rank_0, rank_1))


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_named_where_no_launcher_ends_the_others(rank):
    other = said("dies", 2, engine="mpi", status=r"-?\d+", rank=rank)[1 - rank]
    assert "DeadlineExceededError" in other
    assert f"rank {rank} has ended without a message" in other


@pytest.mark.slow
def test_a_rank_that_has_finished_does_not_wait_for_a_frozen_one_for_ever():
    rank_0, _ = said("ends_beside_a_frozen_rank", 2)
    assert re.search(r"the end of the program: rank 1 has not answered for \d+ s", rank_0)


@pytest.fixture
def two_hosts():
    """Two network namespaces and the link between them; skipped where they are not permitted."""
    names = [f"sok-host-{side}-{os.getpid()}" for side in "ab"]
    links = [f"sok{os.getpid()}{side}" for side in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout

    def remove(name):
        for pid in ip("netns", "pids", name).split():
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)

    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(remove, name)
            ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for name, link, host in zip(names, links, HOSTS, strict=True):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield names, links[0]


def test_a_cut_network_ends_the_ranks_of_both_hosts(two_hosts, tmp_path):
    if find_program("mpirun") is None:
        pytest.skip("needs mpirun")
    names, link = two_hosts
    scripts = {
        "on": ON_HOST,
        "agent": f'shift; exec {tmp_path}/on {names[1]} sh -c "$*"',  # in place of ssh
        "program": MENDS_THE_NETWORK,
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    mpirun = [find_program("mpirun"), "--allow-run-as-root", "--bind-to", "none", "-np", "2"]
    mpirun += ["-H", ",".join(f"{host}:1" for host in HOSTS)]
    mpirun += ["--prtemca", "plm_ssh_agent", f"{tmp_path}/agent", f"{tmp_path}/program", link]
    rank_0, rank_1 = said("cuts", 2, [f"{tmp_path}/on", names[0], *mpirun], link=link)
    assert re.search(r"rank 1 has not answered for \d+ s; its last report: in", rank_0)
    assert re.search(r"'cold_keys': rank 0 has not answered for \d+ s", rank_1)
    assert [(tmp_path / f"program.{rank}").read_text() for rank in range(2)] == ["75\n", "75\n"]
