"""`python -m sok_like.run`: what ranks are given, what is returned, and how signals end them."""

import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.ranks import HANG_LIMIT, ROOT, check_ended, ending_with_this_process, state_of, wait_for

LAUNCHERS = [
    pytest.param("mpirun", marks=pytest.mark.ranks),
    # horovodrun imports TensorFlow, to see what Horovod was built with.
    pytest.param("gloo", marks=[pytest.mark.ranks, pytest.mark.slow]),
]
# Without TensorFlow, which takes seconds.
PROGRAM = """
import os, signal, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK", "0")
cores = len(os.sched_getaffinity(0))
threads = os.environ.get("TF_NUM_INTRAOP_THREADS")
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
words = (rank, os.getpid(), cores, threads, os.environ["WORDS"], sys.executable, sys.argv[1:])
print("rank of", *map(repr, words), sep="|", flush=True)
if sys.argv[1] == "deaf":
    time.sleep(600)
if sys.argv[1] == "die":  # rank 1, or the only one, in its first starts
    folder, size = os.path.dirname(sys.argv[0]), int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    starts = sum(name.startswith("start" + rank) for name in os.listdir(folder))
    files = [f"{folder}/start{r}_{starts}" for r in range(size)]
    open(files[int(rank)], "w").close()
    if starts < int(sys.argv[2]) and int(rank) == min(1, size - 1):
        while not all(map(os.path.exists, files)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "fail":  # when all have started
    open(sys.argv[0] + rank, "w").close()
    while rank == "1" and not all(os.path.exists(sys.argv[0] + r) for r in "012"):
        time.sleep(0.01)
    sys.exit(7 if rank == "1" else 0)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def start(*words, program=("-m", "sok_like.run"), **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TF_NUM_")}
    return subprocess.Popen(
        ending_with_this_process([sys.executable, *program, *words]),
        cwd=ROOT,
        env={**inherited, "WORDS": "two words, $HOME", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def ranks(lines):
    """What each rank printed: number, process, cores, threads, environment, Python, arguments."""
    said = [line.rstrip().split("rank of|")[1].split("|") for line in lines if "rank of|" in line]
    return sorted([eval(word) for word in words] for words in said)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_get_the_environment_all_cores_and_the_arguments(program, launcher):
    arguments = ["fail", "a b", "--epochs", "-np"]
    run = start("-np", "3", "--launcher", launcher, program, *arguments)
    output = run.communicate(timeout=HANG_LIMIT)[0]
    found = ranks(output.splitlines())
    assert [rank for rank, *_ in found] == ["0", "1", "2"], output
    cores = len(os.sched_getaffinity(0))
    share = str(max(1, cores // 3)) if cores > 1 else None
    assert (f"3 ranks share {cores} cores" in output) == (cores > 1)
    for _, _, *rest in found:
        assert rest == [cores, share, "two words, $HOME", sys.executable, arguments]
    assert run.returncode == {"mpirun": 7, "gloo": 1}[launcher]


@pytest.mark.ranks
def test_threads_that_the_user_chose_are_kept(program):
    output = start("-np", "2", program, "", TF_NUM_INTRAOP_THREADS="5").communicate()[0]
    assert [threads for _, _, _, threads, *_ in ranks(output.splitlines())] == ["5", "5"]
    assert "share" not in output


@pytest.mark.ranks
def test_mpirun_has_a_folder_of_its_own(tmp_path):
    """It is not that of a killed mpirun with the same process number, which stopped the start."""
    program, temporary = tmp_path / "program.py", tmp_path / "temporary"
    program.write_text("import os; print('folder', os.environ['PMIX_SERVER_TMPDIR'], flush=True)")
    temporary.mkdir()
    output = start("-np", "2", str(program), TMPDIR=str(temporary)).communicate()[0]
    folders = re.findall(f"folder {temporary}/(.*)/ompi", output)
    assert len(folders) == 2 and all(f.startswith("sok_like_run_") for f in folders), output
    assert list(temporary.iterdir()) == []


def start_impatient(*words):
    """`start`, which also starts a program again that has failed at once."""
    code = "import sys; from sok_like import run; run._AT_ONCE = 0; run.main(sys.argv[1:])"
    return start(*words, program=["-c", code])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "words, deaths, sizes, status",
    [
        (["-np", "2"], 3, [2, 2, 2, 2], 0),
        (["-np", "3", "--min-np", "2"], 2, [3, 2, 2], 0),
        (["-np", "2", "--min-np", "1"], 4, [2, 1, 1, 1], 137),
        (["-np", "1"], 1, [1, 1], 0),
    ],
)
def test_dead_ranks_are_started_again(program, words, deaths, sizes, status):
    run = start_impatient(*words, "--restarts", "3", program, "die", str(deaths))
    output = run.communicate(timeout=HANG_LIMIT)[0]
    assert run.returncode == status, output
    assert [int(n) for n in re.findall(r"(\d+) ranks ended with status 137", output)] == sizes[
        : len(sizes) - (status == 0)
    ]
    folder = pathlib.Path(program).parent
    assert len(list(folder.glob("start0_*"))) == len(sizes)
    assert ("no restarts are left" in output) == (status != 0)


def test_a_program_that_fails_at_once_is_not_started_again(tmp_path):
    (tmp_path / "wrong.py").write_text("print('begun')\n)")
    run = start("-np", "1", "--restarts", "3", str(tmp_path / "wrong.py"))
    output = run.communicate(timeout=HANG_LIMIT)[0]
    assert run.returncode == 1 and output.count("SyntaxError") == 1
    assert "not started again: it failed within 10 s" in output


SAVING = """
import os, pathlib, signal, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HOROVOD_RANK", "0")
def save(number, frame):
    time.sleep(1.5)  # longer than mpirun leaves to ranks
    pathlib.Path(sys.argv[0] + rank).write_text(str(number))
    while not all(os.path.exists(sys.argv[0] + str(r)) for r in range(int(sys.argv[2]))):
        time.sleep(0.01)  # ranks end together, as those of a backup
    sys.exit(int(sys.argv[1]))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
parent = os.getpid()
child = os.fork()  # such as a worker that loads data: it gets no signal before mpirun ends all
def told(number, frame):
    if not os.path.exists(sys.argv[0] + rank):
        print("a child got a signal", flush=True)
if child == 0:
    signal.signal(signal.SIGTERM, told)
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)
print("rank of", rank, parent, child, sep="|", flush=True)
time.sleep(600)
"""


@pytest.fixture
def saving(tmp_path):
    (tmp_path / "saving.py").write_text(SAVING)
    return tmp_path / "saving.py"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "words, number, status, expected",
    [
        (["-np", "2", "--restarts", "3"], signal.SIGTERM, 143, 143),
        (["-np", "2"], signal.SIGINT, 1, 130),
        (["-np", "2", "-H", "localhost:2"], signal.SIGHUP, 0, 0),  # the program ended well
        (["-np", "1", "--restarts", "1"], signal.SIGTERM, 143, 143),
    ],
)
def test_ranks_save_and_end_after_a_signal(saving, launcher, words, number, status, expected):
    """They lived 0.25 s longer, and the status was 1."""
    run = start(*words, "--launcher", launcher, str(saving), str(status), words[1])
    pids = [pid for _, *found in _first_lines(run, int(words[1])) for pid in found]
    os.killpg(run.pid, number)  # as a terminal does
    output = run.communicate(timeout=HANG_LIMIT)[0]
    assert run.returncode == expected, output
    assert not any(word in output for word in ("start", "killed", "a child")), output
    number = signal.SIGTERM if number == signal.SIGHUP else number
    for rank in range(int(words[1])):
        assert saving.with_name(f"saving.py{rank}").read_text() == str(int(number))
    check_ended(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "words, signals, message",
    [
        (["--grace", "0.5", "--restarts", "3"], 1, "did not end within 0.5 s of SIGTERM"),
        ([], 2, "a second signal came"),
    ],
)
def test_ranks_that_stay_are_killed(program, launcher, words, signals, message):
    run = start("-np", "2", *words, "--launcher", launcher, program, "deaf")
    pids = [pid for _, pid, *_ in _first_lines(run, 2)]
    os.kill(pids[0], signal.SIGSTOP)
    for _ in range(signals):
        os.kill(run.pid, signal.SIGTERM)
        time.sleep(0.3)
    output = run.communicate(timeout=HANG_LIMIT / 2)[0]
    assert run.returncode == 143 and "start" not in output
    assert f"sok_like.run: ranks were killed: {message}" in output.replace("they ", "")
    check_ended(pids)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_end_with_a_launcher_that_is_killed(program, launcher):
    run = start("-np", "2", "--launcher", launcher, program, "deaf")
    pids = [pid for _, pid, *_ in _first_lines(run, 2)]
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=HANG_LIMIT)  # until all who hold the pipe have ended
    check_ended(pids)


@pytest.mark.ranks
def test_ctrl_z_stops_the_ranks_until_the_launcher_goes_on(program):
    run = start("-np", "2", "--grace", "0", program, "deaf")
    pids = [pid for _, pid, *_ in _first_lines(run, 2)]
    for number, states in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "SR")):
        os.kill(run.pid, number)
        wait_for(lambda states=states: all(state_of(pid) in states for pid in pids))
    os.kill(run.pid, signal.SIGTERM)
    run.communicate(timeout=HANG_LIMIT)
    check_ended(pids)


def _first_lines(run, count):
    """What the first ranks print."""
    found = []
    for line in run.stdout:
        found += ranks([line])
        if len(found) == count:
            break
    assert len(found) == count
    return found


def test_one_rank_needs_no_launcher(program):
    run = start("-np", "1", program, "end")
    output = run.communicate(timeout=HANG_LIMIT)[0]
    assert run.returncode == 0
    (found,) = ranks(output.splitlines())
    assert found[1] == run.pid  # not even a process of its own


def test_what_other_hosts_get(monkeypatch):
    from sok_like.runtime.ranks import launchers

    environment = {"SOK_A": "1", "PATH": "/bin", "HOME": "/root", "TF_B": "2"}
    line = launchers.launch_line(8, "mpirun", "host1:4,host2:4", environment)
    words = " ".join(line)
    assert "-H host1:4,host2:4 --prefix /" in words and words.endswith("-np 8")
    assert [b for a, b in itertools.pairwise(line) if a == "-x"] == ["PATH", "SOK_A", "TF_B"]
    monkeypatch.setattr(launchers, "horovod_transports", lambda: ["gloo"])
    monkeypatch.setattr(launchers, "find_program", lambda name: f"/bin/{name}")
    assert "-H host1:4,host2:4" in " ".join(launchers.launch_line(8, "gloo", "host1:4,host2:4"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["-np", "0", "x.py"], "-np must be a positive integer. Received: -np 0"),
        (["-np", "2", "x.py"], "Received: x.py, which does not exist"),
        (["x.py"], "required: -np"),
        (["-np", "2"], "required: program"),
        (["-np", "2", "--launcher", "ssh", "x.py"], "invalid choice: 'ssh'"),
        (["-np", "2", "--restarts", "-1", "x.py"], "Received: --restarts -1"),
        (["-np", "2", "--grace", "-1", "x.py"], "Received: --grace -1"),
        (["-np", "2", "-H", "host1:four", "x.py"], "Received: -H host1:four"),
        (["-np", "2", "--min-np", "1", "x.py"], "--min-np needs --restarts"),
        (["-np", "2", "--restarts", "1", "--min-np", "3", "x.py"], "must be in [1, 2]"),
    ],
)
def test_a_line_that_makes_no_sense_starts_nothing(words, message, capsys):
    from sok_like import run

    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert re.search(re.escape(message), capsys.readouterr().err)
