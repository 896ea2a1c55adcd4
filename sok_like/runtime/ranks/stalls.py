"""Names the rank that others wait for in vain, and ends their waiting.

The transport does not know about lookups. So each process has a thread beside the program. It tells
rank 0's thread, over a connection of its own, what the process waits for and for how long. Rank 0
compares. If a rank has waited for `SOK_STALL_TIMEOUT` seconds, or waits for a rank that has ended,
or all ranks wait for different things, rank 0 sends all of them the reason. They print it and raise
it where they wait. Collectives are ended once all have done so: earlier, some would raise the
transport's error.

Some transports can end them only by shutting down, and not while they wait for a frozen rank, or
for one behind a cut network. Then the process prints this, and ends with the status `STALLED`.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import ctypes
import json
import os
import secrets
import sys
import threading
import time
import warnings

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, stall_connections, stall_verdict
from sok_like.runtime.ranks.comm import Communicator, run_now
from sok_like.runtime.ranks.stall_connections import Door, Line, connect

_PERIOD = 0.25  # seconds from one report to the next
# A rank that ends stays for some seconds, so that the others know before a collective fails. Then
# it says that it leaves, and no exchange begins anywhere. One that has begun gets its verdict
# first.
_STAYS = 4.0
_LEAVES = 1.0
_LONGEST = 25.0
_LATE_TO_STOP = 5.0  # seconds that the others wait for a rank to stop, before they shut down
_CONNECTS = 30.0  # seconds that a rank tries to reach rank 0
_SHUTS_DOWN = 10.0  # seconds that the transport gets to shut down after a verdict
# The exit status of a process that cannot leave a collective, as docs/semantics/ranks.md says: that
# of a failure which may not happen again (EX_TEMPFAIL), so a scheduler may start the job again.
STALLED = 75
_THE_END = "the end of the program"  # what a rank waits for that shuts the transport down

_watch: _Watch | None = None


def timeout() -> float:
    """Seconds that a rank may wait for others: `SOK_STALL_TIMEOUT`, by default 120; 0: forever."""
    text = os.environ.get("SOK_STALL_TIMEOUT", "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        required = "be seconds, or 0 to wait without end"
        raise unmet("SOK_STALL_TIMEOUT", required, f"SOK_STALL_TIMEOUT={text!r}")
    return seconds


def start(communicator: Communicator) -> None:
    """Starts this process's thread, once, on several ranks; every rank must call it."""
    global _watch
    if _watch is not None or communicator.world_size == 1 or comm.line():
        return
    limit, door, own_address = timeout(), None, None
    names = _gather(stall_connections.host_names(), communicator)
    if communicator.rank == 0 and limit:
        secret, host = secrets.token_hex(32), stall_connections.LOOPBACK
        if communicator.local_size != communicator.world_size:
            host = stall_connections.host_address(names)
        door = Door(host, secret, communicator.world_size)
        own_address = [*door.address, secret]
    address = _gather(own_address, communicator)[0]
    if limit == 0 or address is None:
        return
    host, port, secret = address
    _watch = _Watch(communicator, limit, door, (host, port), secret)
    _watch.start()
    _watch.connected.wait()
    if _watch.problem is not None:
        warnings.warn(
            f"sok_like: rank {communicator.rank} cannot reach rank 0 at {host}:{port} "
            f"({_watch.problem}); if ranks stop waiting for another rank, the reason is unknown.",
            stacklevel=2,
        )
    atexit.register(_watch.say_goodbye)


def raise_reason(error: Exception) -> None:
    """If waiting was ended, raises the reason in the place of the transport's `error`."""
    if _watch is not None:
        _watch.settled.wait(2 * _PERIOD)
        if _watch.reason:
            raise tf.errors.DeadlineExceededError(None, None, _watch.reason) from error


class _Watch(threading.Thread):
    """The thread of one process; on rank 0 with the `door` at this address."""

    def __init__(self, communicator, limit, door, address, secret):
        super().__init__(name="sok_stalls", daemon=True)
        self.reason = ""
        self.settled = threading.Event()  # set when waiting was ended, or all ranks have ended
        self._communicator, self._rank = communicator, communicator.rank
        self._library = libraries.functions()
        self._library.sok_longest_wait.restype = ctypes.c_double
        self.connected = threading.Event()  # set also if there was a problem
        self.problem: OSError | None = None
        self._limit, self._door, self._address, self._secret = limit, door, address, secret
        self._ended = ""  # how this rank ended, if it has
        self._leaves = False  # it has stopped staying for the others
        # When its program had ended, and it shuts the transport down.
        self._closes_at = float("inf")
        self._closed = threading.Event()  # the transport is shut down
        self._closing = threading.Lock()  # held meanwhile: it bears one call at a time
        self._waited_for = False  # some rank is in an exchange
        self._left = ""  # which ranks have left
        self._stop_time = 0.0
        self._give_up = float("inf")  # when this process ends if the transport is not shut down
        self._last_word = time.monotonic()  # from rank 0
        # By wait, the seconds that this process was stopped.
        self._slept: dict[int, float] = collections.defaultdict(float)
        self._server: Line | None = None
        self._judge = stall_verdict.Judge(communicator.world_size, limit)  # rank 0 asks it
        self._lines: dict[int, Line] = {}

    def run(self):
        asyncio.run(self._main())

    async def _main(self):
        try:
            if self._door is not None:
                await self._door.open(self._hear)
            else:
                self._server = await connect(self._address, self._secret, self._rank, _CONNECTS)
                self._hearing = asyncio.create_task(self._hear_rank_0())
        except OSError as error:
            self.problem = error
            return
        finally:
            self.connected.set()
        turn = time.monotonic()
        while not self._closed.is_set():
            if time.monotonic() - turn > stall_verdict.SILENT:
                self._forgive(time.monotonic() - turn)
            turn = time.monotonic()
            self._report()
            if time.monotonic() > self._give_up:
                self._say(
                    "The collectives cannot be shut down, so this process ends with status "
                    f"{STALLED}. The reason: {self.reason}"
                )
                os._exit(STALLED)
            await asyncio.sleep(_PERIOD)

    def _forgive(self, seconds):
        """After this process was stopped, as by Ctrl-Z, perhaps with all others: they may go on."""
        self._slept[self._longest_wait()[2]] += seconds
        self._last_word += seconds
        self._judge.forgive(seconds)

    def say_goodbye(self):
        """Tells the others that this process ends, and how; shuts the transport down."""
        if not self.is_alive():
            return
        failure = getattr(sys, "last_type", None)
        self._ended = f"has ended with {failure.__name__}" if failure else "has finished its steps"
        self.settled.wait(_STAYS)
        self._leaves = True
        self.settled.wait(_LEAVES)
        due = time.monotonic() + _LONGEST
        while self._waited_for and time.monotonic() < due and not self.settled.wait(_PERIOD):
            pass
        self._closes_at = time.monotonic()
        self._close()
        self.join(1.0)

    def _longest_wait(self):
        """What this rank waits for ("" if nothing), for how many seconds, and the wait's number."""
        what, number = ctypes.create_string_buffer(512), ctypes.c_int64()
        size = ctypes.c_int64(len(what))
        seconds = self._library.sok_longest_wait(what, size, ctypes.byref(number))
        seconds = max(0.0, seconds - self._slept.get(number.value, 0.0))
        return what.value.decode(errors="replace"), seconds, number.value

    def _report(self):
        what, seconds, number = self._longest_wait()
        report = {"what": what, "seconds": seconds, "number": number, "ended": self._ended}
        report |= {"leaves": self._leaves, "stopped": bool(self.reason)}
        if self._door is None:
            self._server.send(report)
            silence = time.monotonic() - self._last_word
            waits = max(seconds if what else 0.0, time.monotonic() - self._closes_at)
            if silence > stall_verdict.SILENT and waits > self._limit:
                where = stall_verdict.where(what) if what else _THE_END
                self._end_waits(f"{where}: rank 0 has not answered for {silence:.0f} s")
            return
        self._judge.hear(self._rank, report)
        self._stop_waits(self._judge.verdict())
        late = self._stop_time and time.monotonic() - self._stop_time > _LATE_TO_STOP
        word = self._judge.word()
        word |= {"stop": self.reason, "shut": bool(self.reason and (late or word["stopped"]))}
        if not self._lines and time.monotonic() - self._closes_at > self._limit:
            word["silent"] = "all other ranks have ended"
        for line in self._lines.values():
            line.send(word)
        self._obey(word)

    async def _hear(self, line):
        """On rank 0: takes the reports of another rank, until its connection ends."""
        self._lines[line.rank] = line
        async for report in line.messages():
            self._judge.hear(line.rank, report)
        del self._lines[line.rank]
        if line.heard > 1:  # else the rank gave up before it knew that it was let in
            self._judge.lose(line.rank)

    async def _hear_rank_0(self):
        async for word in self._server.messages():
            self._last_word = time.monotonic()
            self._obey(word)
        what, _, _ = self._longest_wait()
        if self._closes_at < float("inf"):
            return  # it does not answer any more, so the limit holds
        if self._left.startswith("rank 0 ") and not what:
            self.settled.set()  # it announced that, and nothing here waits for it
        else:
            here = f"in {stall_verdict.where(what)}" if what else "in no exchange"
            self._end_waits(f"rank 0 has ended without a message; rank {self._rank} was {here}")

    def _obey(self, word):
        self._waited_for = word["waited_for"]
        if word["left"] != self._left:
            self._left = word["left"]
            self._library.sok_refuse_waits(self._left.encode())
        self._stop_waits(word["stop"])
        if word["silent"] and self._closes_at < float("inf"):
            self._end_waits(f"{_THE_END}: {word['silent']}")
        elif word["shut"]:
            self._shut_down()
        elif word["over"]:
            self.settled.set()

    def _end_waits(self, reason):
        """Ends waiting without rank 0, which would say when all ranks have stopped."""
        if self._give_up == float("inf"):
            self._stop_waits(reason)
            time.sleep(_PERIOD)
            self._shut_down()

    def _stop_waits(self, reason):
        """Raises the reason where this process waits."""
        if self.reason or not reason:
            return
        self.reason, self._stop_time = reason, time.monotonic()
        self._library.sok_stop_waits(reason.encode())
        if not self._ended or self._closes_at < float("inf"):
            self._say(reason)

    def _shut_down(self):
        """Ends the collectives: by itself, or by shutting down, or soon with the process."""
        self.settled.set()
        if self._communicator.end_waits(self.reason):
            return
        if self._give_up == float("inf"):
            self._give_up = time.monotonic() + _SHUTS_DOWN
            threading.Thread(target=self._close, daemon=True).start()

    def _close(self):
        with self._closing:
            give_up = float("inf")
            while not self._communicator.shut_down(_PERIOD) and time.monotonic() < give_up:
                if self.reason:
                    give_up = min(give_up, time.monotonic() + _SHUTS_DOWN)
        self._closed.set()

    def _say(self, text):
        def write():
            try:
                print(f"sok_like, rank {self._rank}: {text}", file=sys.stderr, flush=True)
            finally:
                sys.stdout.flush()  # which `os._exit` does not

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(1.0)  # a launcher that is stopped may read no output


def _gather(value, communicator):
    """The values of all ranks, which JSON can carry."""
    data = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8)
    # By one name eagerly and in sessions: ranks that differ in this must meet here, because only
    # the thread that starts later can name who waits for whom.
    (texts,) = run_now(lambda: [communicator.all_gather(tf.constant(data), "sok_stalls")])
    return [json.loads(line) for line in texts.tobytes().decode().splitlines()]
