"""A rank that is frozen, or behind a cut network, is named, and the job ends with a status."""

import os
import signal
import threading
import time

import pytest
import tensorflow as tf

from tests.ranks import RanksFailed, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.beside]


def _call(how):
    """A function without arguments that looks up, eagerly, in a function or in a session."""
    import sok_like as sok
    from sok_like.runtime import comm, stalls

    stalls._SHUTS_DOWN = 2.0  # seconds; enough, because what is frozen never answers
    sok.Init(global_batch_size=8)
    assert stalls._watch is not None and comm.current().world_size > 1

    def layer():
        return sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="cold")

    keys = tf.constant([1], tf.int64)
    if how == "session":
        with tf.Graph().as_default():
            rows = layer()(tf.constant([1], tf.int64))
            session = tf.compat.v1.Session()
            session.run(tf.compat.v1.global_variables_initializer())
        return lambda: session.run(rows)
    lookup = layer()
    return lambda: (tf.function(lookup) if how == "function" else lookup)(keys)


def freezes(rank, how, inside, wakes=False):
    """`rank` stops after some lookups, inside of one or outside; the others look up again."""
    from sok_like.runtime import comm

    call = _call(how)
    for _ in range(3):
        call()
    if comm.current().rank == rank:
        if wakes:  # the launcher, stopped meanwhile, cannot end it
            me, launcher = os.getpid(), os.getppid()
            script = f"sleep 12; kill -CONT {me}; sleep 6; kill -CONT {launcher}"
            os.spawnlp(os.P_NOWAIT, "setsid", "setsid", "sh", "-c", script)
            os.kill(launcher, signal.SIGSTOP)
        if inside:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    elif inside:
        time.sleep(2)
    call()


@pytest.mark.parametrize(
    "num_ranks, rank, how, inside",
    [(2, 1, "eager", True), (2, 0, "function", False), (3, 2, "session", False)],
)
def test_a_frozen_rank_is_named_and_the_job_ends(num_ranks, rank, how, inside):
    args = {"rank": rank, "how": how, "inside": inside}
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="ended with 75") as raised:
        run_ranks(
            "tests.runtime.test_frozen_ranks:freezes",
            num_ranks,
            args=args,
            env={"SOK_STALL_TIMEOUT": "2"},
            alone=False,
        )
    print(raised.value, time.monotonic() - start)
