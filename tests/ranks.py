"""Runs a function on several real ranks and collects what each of them found.

    results = run_ranks("tests.runtime.ranks.test_comm:collectives", 2, args={"num_keys": 8})
    results[1]["sum"]  # what rank 1 returned

The function runs in a process with TensorFlow loaded, by `python -m tests.ranks`.
"""

import importlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import pytest

from sok_like.runtime.ranks.launchers import launch_line, search_path
from tests import emulated, forks, speed
from tests.forks import ROOT

# Seconds. Nothing takes so long that does not hang, on a machine ten times slower either.
HANG_LIMIT = 1200
# A rank that waits for another one sleeps (a time in ns); by default Open MPI keeps a core from the
# rank that it waits for. Horovod's cycles are in ms. Ranks spend most of a test tracing functions:
# waking up more often slows this down by more than it speeds up the exchanges.
_WAITING = {
    "HOROVOD_CYCLE_TIME": "2",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "200000",
}
# A program that becomes another one. Linux sends it SIGTERM when the process `argv[1]`, which has
# started it, ends in any way: so a launcher and its ranks end with a pytest that is killed.
_ENDS_WITH = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_TAIL = 12000  # characters of a rank's output shown when a run fails


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds every rank's last output."""


def skip_many_ranks(world_size):
    """3 ranks and more take minutes on 2 cores, and what they add does not depend on the Keras."""
    if world_size > 2 and os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        pytest.skip("3 ranks and more are for Keras 3 alone")
    if world_size > int(os.environ.get("SOK_MOST_RANKS", world_size)):
        pytest.skip(f"{world_size} ranks are more than SOK_MOST_RANKS")


def run_ranks(target, num_ranks, *, launcher="mpirun", args=None, env=None, timeout=HANG_LIMIT):
    """What `target`, `"package.module:function"`, returns on each of so many processes.

    `launcher`: `"mpirun"`, or `"gloo"` for `horovodrun --gloo`; or the words before the program,
    which then does not begin with TensorFlow loaded. `args`, keyword arguments, are JSON values.
    RanksFailed if a rank raised, ended with an error or was still running after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="sok_ranks_") as folder:
        folder = pathlib.Path(folder)
        process = start(target, num_ranks, folder, launcher=launcher, args=args, env=env)
        late = False
        try:
            launcher_output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            late = True
            launcher_output = stop(process, folder)
        except BaseException:  # pytest-timeout or Ctrl-C: leave no process behind
            stop(process, folder)
            raise
        silent = [r for r in range(num_ranks) if not (folder / f"rank{r}.pickle").exists()]
        if late or process.returncode != 0 or silent:
            what = f"ended with {process.returncode}, without a result of ranks {silent}"
            what = f"ran longer than {timeout} s: {slow_machine()}" if late else what
            raise RanksFailed(
                f"{target} on {num_ranks} ranks ({launcher}) {what}.\n"
                + outputs(folder, num_ranks)
                + f"--- {launcher}\n{launcher_output[-_TAIL:]}"
            )
        results = [folder / f"rank{rank}.pickle" for rank in range(num_ranks)]
        return [pickle.loads(result.read_bytes()) for result in results]


def start(target, num_ranks, folder, *, launcher="mpirun", args=None, env=None):
    """The process of the launcher, whose ranks write into `folder`; see `run_ranks`."""
    words = ["-m", "tests.ranks", str(target), str(folder), json.dumps(args)]
    if isinstance(launcher, str):
        line = [*launch_line(num_ranks, launcher), *forks.command(*words)]
    else:
        line = [*launcher, sys.executable, *words]
    # In /tmp mpirun would fail where a killed one of the same process number has left a folder.
    env = {"PRTE_MCA_prte_local_tmpdir_base": folder, **(env or {})}
    return subprocess.Popen(
        ending_with_this_process(line),
        cwd=ROOT,
        env=_environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ending_with_this_process(command):
    """The command, which gets SIGTERM when this process ends, killed or not."""
    return [sys.executable, "-S", "-c", _ENDS_WITH, str(os.getpid()), *command]


def wait_for(holds):
    """Waits until a function holds."""
    limit = time.monotonic() + HANG_LIMIT / 2
    while not holds():
        assert time.monotonic() < limit, slow_machine()
        time.sleep(0.02)


def state_of(pid):
    """The state of a process; Z: it has ended, whether somebody has asked how or not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def check_ended(pids):
    wait_for(lambda: all(state_of(pid) == "Z" for pid in pids))


def slow_machine():
    """The question to ask where a time limit was passed, with the load that answers it."""
    load = os.getloadavg()[0]
    return (
        f"does it hang, or is the machine slow (load average {load:.1f}, {os.cpu_count()} cores)?"
    )


def _environment(env):
    return {
        **os.environ,
        "PATH": search_path(),
        "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # One thread a rank: the ranks of a test share a few cores.
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        **_WAITING,
        **{name: str(value) for name, value in env.items()},
    }


def stop(process, folder):
    """Ends the launcher and every rank, and returns what the launcher printed."""
    process.send_signal(signal.SIGTERM)  # lets the launcher end its ranks
    try:
        return process.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        pass
    os.killpg(process.pid, signal.SIGKILL)
    # mpirun gives each rank a process group of its own, so the ranks are ended by their pids.
    for file in folder.glob("rank*.pid"):
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            pass
    return process.communicate()[0]


def outputs(folder, num_ranks):
    parts = []
    for rank in range(num_ranks):
        log = folder / f"rank{rank}.log"
        text = log.read_text(errors="replace")[-_TAIL:] if log.exists() else "(never started)\n"
        parts.append(f"--- rank {rank}\n{text}")
    return "".join(parts)


def rank_of_process():
    """That of this process."""
    for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit("a rank must be started by mpirun or horovodrun")


def main(target, folder, args):
    """Runs a function on this rank, and leaves its result in the folder."""
    speed.collect_seldom()
    folder, rank = pathlib.Path(folder), rank_of_process()
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    # At the level of file descriptors, because the C++ side writes too.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    log = os.open(folder / f"rank{rank}.log", flags, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if emulated.asked_for():
            emulated.install()
        module, function = target.split(":")
        function = getattr(importlib.import_module(module), function)
        result = pickle.dumps(function(**(json.loads(args) or {})))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: leaving normally waits for the other ranks in MPI's finalizer, and they may
        # be waiting for this one.
        os._exit(1)
    # Written aside and renamed: a rank killed while writing leaves no half result.
    aside = folder / f"rank{rank}.aside"
    aside.write_bytes(result)
    aside.rename(folder / f"rank{rank}.pickle")


if __name__ == "__main__":
    main(*sys.argv[1:])
