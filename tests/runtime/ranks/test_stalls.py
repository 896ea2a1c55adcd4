"""A rank that others wait for in vain is named, and the others stop."""

import time

import pytest
import tensorflow as tf

from tests import thread_ranks
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.beside]


def _layer(name):
    import sok_like as sok

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
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    model = tf.keras.Sequential([tf.keras.Input([], dtype="int64"), _layer("early")])
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    keys = tf.range(2 if comm.current().rank == 1 else 3, dtype=tf.int64)
    targets = tf.zeros([len(keys), 2])
    return _tried(lambda *data: model.fit(*data, batch_size=1, verbose=0), keys, targets)


def comes_late():
    """Rank 1 looks up once and ends; rank 0 looks up again after rank 1 has left."""
    from sok_like.runtime.ranks import comm, stalls

    stalls._STAYS = 0.0
    layer = _layer("late")
    assert _tried(layer)[0] == "fine"
    if comm.current().rank == 1:
        return None
    time.sleep(4)
    return _tried(layer), _tried(tf.function(layer))


def hangs():
    """Rank 1 sleeps while rank 0 looks up in a function; then it looks up as well."""
    from sok_like.runtime.ranks import comm

    call = tf.function(_layer("hung"))
    assert _tried(call)[0] == "fine"
    if comm.current().rank == 1:
        time.sleep(12)
    return _tried(call)


def session_beside_eager():
    """Rank 1 looks up in a session, rank 0 eagerly."""
    from sok_like.runtime.ranks import comm

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
    (message, seconds), (fine, _) = run_ranks(
        "tests.runtime.ranks.test_stalls:one_batch_less", 2, alone=False
    )
    assert fine == "fine"
    assert "DeadlineExceededError" in message
    assert (
        "'early_keys': rank 0 reached it" in message and "rank 1 has finished its steps" in message
    )
    assert seconds < 40


def test_a_rank_that_has_left_is_named():
    tried, _ = run_ranks("tests.runtime.ranks.test_stalls:comes_late", 2, alone=False)
    for message, _ in tried:
        assert message.startswith("DeadlineExceededError")
        assert "the exchange 'late_keys': rank 1 has finished its steps" in message


@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_a_rank_that_hangs_is_named_after_the_time_limit(engine):
    env = {"SOK_STALL_TIMEOUT": "3", "SOK_ENGINE": engine}
    (first, seconds), (second, _) = run_ranks(
        "tests.runtime.ranks.test_stalls:hangs", 2, env=env, alone=False
    )
    for message in (first, second):
        assert "DeadlineExceededError" in message and "'hung_keys': rank 0 reached it" in message
        assert "rank 1 did not reach it and is in no exchange" in message
    assert 3 <= seconds < 12


def test_a_session_does_not_meet_an_eager_call():
    for message, seconds in run_ranks(
        "tests.runtime.ranks.test_stalls:session_beside_eager", 2, alone=False
    ):
        assert "DeadlineExceededError" in message and "has finished" not in message
        assert "(in a session)" in message and "all ranks are in it" not in message
        assert seconds < 60


def interrupted(how):
    """Rank 0 gets SIGINT while it waits for rank 1, and ends."""
    import os
    import signal
    import threading

    from sok_like.runtime.ranks import comm

    layer = _layer("hung")
    call = tf.function(layer) if how == "function" else layer
    assert _tried(call)[0] == "fine"
    if comm.current().rank == 1:
        time.sleep(6)
        return _tried(call)
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    start = time.monotonic()
    try:
        call(tf.constant([1], tf.int64))
    except KeyboardInterrupt:
        return "KeyboardInterrupt", time.monotonic() - start


def test_ctrl_c_works_while_a_rank_waits():
    env = {"SOK_ENGINE": "mpi"}
    for how in ("function", "eager"):
        (raised, seconds), (message, _) = run_ranks(
            "tests.runtime.ranks.test_stalls:interrupted",
            2,
            args={"how": how},
            env=env,
            alone=False,
        )
        assert raised == "KeyboardInterrupt" and seconds < 5
        assert "DeadlineExceededError" in message and "rank 0 has finished its steps" in message


@pytest.fixture
def watch(monkeypatch):
    """Rank 1's thread, not started, whose wait is `watch.wait` and whose verdicts `watch.reasons`.

    Rank 0 has let it in and ended.
    """
    import selectors
    import threading
    import types

    from sok_like.runtime.ranks import stalls
    from sok_like.runtime.ranks.stall_connections import Door, Line

    calls = selectors.DefaultSelector()
    door = Door("127.0.0.1", "secret", 2, calls)

    def let_in_and_end():
        while not isinstance(line := door.answer(calls.select()[0][0].data), Line):
            pass
        line.close()

    rank_0 = threading.Thread(target=let_in_and_end)
    rank_0.start()
    made = stalls._Watch(
        types.SimpleNamespace(rank=1, world_size=2),
        60.0,
        door.address,
        "secret",
        selectors.DefaultSelector(),
    )
    rank_0.join()

    def longest_wait(text, size, number):
        text.value = made.wait[0].encode()
        return made.wait[1]

    def end(reason):
        made.reasons.append(reason)
        made._closed.set()

    made._library = types.SimpleNamespace(sok_longest_wait=longest_wait)
    made.wait, made.reasons, made._end_waits = ("", 0.0), [], end
    return made


@pytest.mark.parametrize("what", ["early_keys", ""])
def test_the_end_of_rank_0_names_the_exchange(watch, what):
    watch.wait = (what, 1.0)
    watch.run()
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
    import threading

    from sok_like.runtime.ranks import stalls

    own = {name for name in vars(stalls._Watch) if not name.startswith("__")}
    assert own & set(dir(threading.Thread)) == {"run"}


def test_threads_that_are_ranks_have_no_watch():
    from sok_like.runtime.ranks import comm, stalls

    assert thread_ranks.run(2, lambda: stalls.start(comm.current())) == [None, None]
    assert stalls._watch is None


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_the_time_limit_must_be_seconds(monkeypatch, text):
    from sok_like.runtime.ranks import stalls

    monkeypatch.setenv("SOK_STALL_TIMEOUT", text)
    with pytest.raises(ValueError, match=r"SOK_STALL_TIMEOUT must be seconds.*Received"):
        stalls.timeout()
