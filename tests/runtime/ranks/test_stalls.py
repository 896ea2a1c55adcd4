"""A rank that others wait for in vain is named, and the others stop.

A rank that hangs, leaves or is stopped does so until the other one has seen it.
"""

import asyncio
import os
import pathlib
import signal
import subprocess
import threading
import time
import types

import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm, stall_verdict, stalls
from tests import thread_ranks
from tests.ranks import run_ranks, wait_for

pytestmark = pytest.mark.ranks


def run(function, arguments=None, **environment):
    """What a function of this file gives on two processes."""
    target = f"tests.runtime.ranks.test_stalls:{function.__name__}"
    return run_ranks(target, 2, args=arguments, env=environment)


def _layer(name):
    stall_verdict._SURE = 0.5  # ranks here end or part for good
    sok.Init(global_batch_size=2)
    return sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name=name)


def _tried(call, *arguments):
    start = time.monotonic()
    try:
        call(*(arguments or [tf.constant([1], tf.int64)]))
        message = "fine"
    except tf.errors.OpError as error:
        message = f"{type(error).__name__}: {error.message}"
    return message, time.monotonic() - start


def one_batch_less():
    """Rank 1 has a batch less in `fit`, then ends."""
    model = tf.keras.Sequential([tf.keras.Input([], dtype="int64"), _layer("early")])
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    keys = tf.range(2 if comm.current().rank == 1 else 3, dtype=tf.int64)
    targets = tf.zeros([len(keys), 2])
    return _tried(lambda *data: model.fit(*data, batch_size=1, verbose=0), keys, targets)


def comes_late():
    """Rank 1 looks up once and ends; rank 0 looks up again after rank 1 has left."""
    stalls._STAYS = 0.0
    layer = _layer("late")
    assert _tried(layer)[0] == "fine"
    if comm.current().rank == 1:
        return None
    wait_for(lambda: stalls._watch._left)
    return _tried(layer), _tried(tf.function(layer))


def hangs(file):
    """Rank 1 is elsewhere until rank 0 has looked up in a function; then it looks up as well."""
    call = tf.function(_layer("hung"))
    assert _tried(call)[0] == "fine"
    if comm.current().rank == 1:
        wait_for(lambda: os.path.exists(file))
        return _tried(call)
    result = _tried(call)
    pathlib.Path(file).touch()
    return result


def session_beside_eager():
    """Rank 1 looks up in a session, rank 0 eagerly."""
    layer = _layer("mixed")
    if comm.current().rank == 0:
        return _tried(layer)

    def in_session(keys):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            layer = _layer("mixed")
            rows = layer(tf.constant(keys.numpy()))
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(rows)

    return _tried(in_session)


@pytest.mark.keras(slow=True)
def test_a_rank_that_has_finished_is_named():
    (message, seconds), (fine, _) = run(one_batch_less)
    assert fine == "fine"
    assert "DeadlineExceededError" in message
    assert (
        "'early_keys': rank 0 reached it" in message and "rank 1 has finished its steps" in message
    )
    assert seconds < 40


def test_a_rank_that_has_left_is_named():
    tried, _ = run(comes_late)
    for message, _ in tried:
        assert message.startswith("DeadlineExceededError")
        assert "the exchange 'late_keys': rank 1 has finished its steps" in message


def test_a_rank_that_hangs_is_named_after_the_time_limit(tmp_path):
    """Horovod's waits end, too; those by MPI do in the other tests."""
    arguments = {"file": str(tmp_path / "named")}
    horovod = {"SOK_STALL_TIMEOUT": "3", "SOK_ENGINE": "horovod"}
    (first, seconds), (second, _) = run(hangs, arguments, **horovod)
    for message in (first, second):
        assert "DeadlineExceededError" in message and "'hung_keys': rank 0 reached it" in message
        assert "rank 1 did not reach it and is in no exchange" in message
    assert 3 <= seconds < 40


def test_a_session_does_not_meet_an_eager_call():
    for message, seconds in run(session_beside_eager):
        assert "DeadlineExceededError" in message and "has finished" not in message
        assert "(in a session)" in message and "all ranks are in it" not in message
        assert seconds < 60


def suspended():
    """All ranks are stopped, as by Ctrl-Z, for longer than rank 0's limit, while it waits."""
    stall_verdict.SILENT = 3.0
    call, line = tf.function(_layer("calm")), comm.current()
    assert _tried(call)[0] == "fine"
    pids = " ".join(map(str, line.all_gather(tf.constant([os.getpid()]), "pids").numpy()))
    if line.rank == 1:
        stop = f"sleep 0.5; kill -STOP {pids}; sleep 5; kill -CONT {pids}"
        subprocess.Popen(["sh", "-c", stop], start_new_session=True).wait()
    else:
        stalls._watch._judge._limit = 4.0
    message, _ = _tried(call)
    door = getattr(stalls._watch._door, "address", ("",))[0]
    return message, stalls._watch.is_alive(), len(stalls._watch._lines), door


def test_a_job_goes_on_after_it_was_suspended():
    assert run(suspended) == [("fine", True, 1, "127.0.0.1"), ("fine", True, 0, "")]


def interrupted(how, file):
    """Rank 0 gets SIGINT while it waits for rank 1, which looks up later, and ends."""
    layer = _layer("hung")
    call = tf.function(layer) if how == "function" else layer
    assert _tried(call)[0] == "fine"
    if comm.current().rank == 1:
        wait_for(lambda: os.path.exists(file))
        return _tried(call)

    def interrupt():
        wait_for(lambda: stalls._watch._longest_wait()[1] > 0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        _tried(call)
        time.sleep(60)  # on a busy machine it comes behind the error of the op
    pathlib.Path(file).touch()
    return None


@pytest.mark.parametrize("how", ["function", "eager"])
def test_ctrl_c_works_while_a_rank_waits(how, tmp_path):
    arguments = {"how": how, "file": str(tmp_path / "interrupted")}
    _, (message, _) = run(interrupted, arguments, SOK_ENGINE="mpi")
    assert "DeadlineExceededError" in message and "rank 0 has finished its steps" in message


@pytest.fixture
def watch():
    """Rank 1's thread, not started, whose wait is `watch.wait` and whose verdicts `watch.reasons`.

    Rank 0 has let it in and ended.
    """

    async def nothing():
        for message in ():
            yield message

    ranks = types.SimpleNamespace(rank=1, world_size=2)
    made = stalls._Watch(ranks, 60.0, None, ("127.0.0.1", 1), "secret")
    made._server = types.SimpleNamespace(messages=nothing, send=lambda report: None)

    def longest_wait(text, size, number):
        text.value = made.wait[0].encode()
        return made.wait[1]

    made._library = types.SimpleNamespace(sok_longest_wait=longest_wait)
    made.wait, made.reasons = ("", 0.0), []
    made._end_waits = made.reasons.append
    return made


@pytest.mark.parametrize("what", ["early_keys", ""])
def test_the_end_of_rank_0_names_the_exchange(watch, what):
    watch.wait = (what, 1.0)
    asyncio.run(watch._hear_rank_0())
    where = f"in the exchange '{what}'" if what else "in no exchange"
    assert watch.reasons == [f"rank 0 has ended without a message; rank 1 was {where}"]


@pytest.mark.parametrize(
    "what, waited, silence, ends",
    [
        ("cold_keys", 61, 70, True),
        ("cold_keys", 59, 70, False),  # rank 0 was busy for long, and the wait is young
        ("cold_keys", 61, 1, False),  # rank 0 will say what to do
        ("", 0, 70, False),
    ],
)
def test_silence_of_rank_0_ends_only_what_waits_for_longer_than_the_limit(
    watch, what, waited, silence, ends
):
    watch.wait = (what, float(waited))
    watch._last_word = time.monotonic() - silence
    watch._report()
    silent = f"the exchange 'cold_keys': rank 0 has not answered for {silence} s"
    assert watch.reasons == ([silent] if ends else [])


def test_a_pause_of_this_process_does_not_count(watch):
    watch.wait = ("cold_keys", 80.0)
    watch._last_word = time.monotonic() - 70
    watch._forgive(70.0)
    watch._report()
    assert watch.reasons == []


def test_the_thread_hides_nothing_of_its_base():
    own = {name for name in vars(stalls._Watch) if not name.startswith("__")}
    assert own & set(dir(threading.Thread)) == {"run"}


def test_threads_that_are_ranks_have_no_watch():
    assert thread_ranks.run(2, lambda: stalls.start(comm.current())) == [None, None]
    assert stalls._watch is None


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_the_time_limit_must_be_seconds(monkeypatch, text):
    monkeypatch.setenv("SOK_STALL_TIMEOUT", text)
    with pytest.raises(ValueError, match=r"SOK_STALL_TIMEOUT must be seconds.*Received"):
        stalls.timeout()
