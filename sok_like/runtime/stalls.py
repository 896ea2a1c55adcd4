"""Names the rank that others wait for in vain, and ends their waiting.

A collective cannot be ended from outside, and the transport does not know about lookups. So each
process has a thread beside the program. It tells rank 0's thread, over a connection of its own,
what the process waits for and for how long. Rank 0 compares. If a rank has waited for
`SOK_STALL_TIMEOUT` seconds, or waits for a rank that has ended, or all ranks wait for different
things, rank 0 sends all of them the reason. They print it and raise it where they wait. The
transport is shut down once all have done so: earlier, some would raise the transport's error.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime import native, stall_verdict
from sok_like.runtime.checks import as_integer
from sok_like.runtime.comm import Communicator

_PERIOD = 0.25  # seconds from one report to the next
# A rank that ends stays for some seconds, so that the others know before a collective fails. Then
# it says that it leaves, and no exchange begins anywhere. One that has begun gets its verdict
# first.
_STAYS = 4.0
_LEAVES = 1.0
_LONGEST = 25.0
_LATE_TO_STOP = 5.0  # seconds that the others wait for a rank to stop, before they shut down
_MAX_LINE = 4096

_watch: _Watch | None = None


def timeout() -> float:
    """Seconds that a rank may wait for others: `SOK_STALL_TIMEOUT`, by default 120; 0: forever."""
    text = os.environ.get("SOK_STALL_TIMEOUT", "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            "SOK_STALL_TIMEOUT must be seconds, or 0 to wait without end. "
            f"Received: SOK_STALL_TIMEOUT={text!r}"
        )
    return seconds


def start(communicator: Communicator) -> None:
    """Starts this process's thread, once; every rank must call it. No effect on one rank."""
    global _watch
    if _watch is not None or communicator.world_size == 1:
        return
    limit = timeout()
    listener = _listen() if communicator.rank == 0 else None
    mine = _address(listener) if listener else ""
    host, port, secret = json.loads(_from_rank_0(mine, communicator))
    if limit == 0:
        return
    _watch = _Watch(communicator, limit, listener, (host, port), secret)
    _watch.start()
    atexit.register(_watch.say_goodbye)


def raise_reason(error: Exception) -> None:
    """If waiting was ended, raises the reason in the place of the transport's `error`."""
    if _watch is not None:
        _watch.told.wait(2 * _PERIOD)
        if _watch.reason:
            raise tf.errors.DeadlineExceededError(None, None, _watch.reason) from error


class _Watch(threading.Thread):
    """The thread of one process; rank 0's has a connection to each of the others."""

    def __init__(self, communicator, limit, listener, address, secret):
        super().__init__(name="sok_stalls", daemon=True)
        self.reason = ""
        self.told = threading.Event()  # set when waiting was ended, or all ranks have ended
        self._rank, self._world_size = communicator.rank, communicator.world_size
        native.ops()  # loads the library
        self._library = ctypes.CDLL(str(native.ops_path()))
        self._library.sok_longest_wait.restype = ctypes.c_double
        self._limit, self._listener, self._secret = limit, listener, secret
        self._ended = ""  # how this rank ended, if it has
        self._leaves = False  # it has stopped staying for the others
        self._waited_for = False  # some rank is in an exchange
        self._left = ""  # which ranks have left
        self._stop_time = 0.0
        self._last_word = time.monotonic()  # from rank 0
        self._selector = selectors.DefaultSelector()
        self._server = None
        if listener is None:
            try:
                self._server = _Line(socket.create_connection(address, timeout=10), self._selector)
                self._server.send({"secret": secret, "rank": self._rank})
            except OSError as error:
                warnings.warn(
                    f"sok_like: rank {self._rank} cannot reach rank 0 at {address[0]}:{address[1]} "
                    f"({error}); if ranks stop waiting for another rank, the reason is unknown.",
                    stacklevel=2,
                )
                self._limit = 0
        else:
            self._selector.register(listener, selectors.EVENT_READ, None)
            self._judge = stall_verdict.Judge(self._world_size, limit)
            self._lines: dict[int, _Line] = {}

    def run(self):
        due = 0.0
        while self._limit and not self.told.is_set():
            for key, _ in self._selector.select(max(0.0, min(_PERIOD, due - time.monotonic()))):
                self._receive(key)
            if time.monotonic() >= due:
                due = time.monotonic() + _PERIOD
                self._report()

    def say_goodbye(self):
        """Tells the others that this process ends, and how; returns soon."""
        if not self.is_alive():
            return
        failure = getattr(sys, "last_type", None)
        how = "has finished its steps"
        self._ended = how if failure is None else f"has ended with {failure.__name__}"
        self.told.wait(_STAYS)
        self._leaves = True
        self.told.wait(_LEAVES)
        due = time.monotonic() + _LONGEST
        while self._waited_for and time.monotonic() < due and not self.told.wait(_PERIOD):
            pass
        self.told.set()
        self.join(1.0)

    def _longest_wait(self):
        """What this rank waits for ("" if nothing), for how many seconds, and the wait's number."""
        what = ctypes.create_string_buffer(512)
        number = ctypes.c_int64()
        seconds = self._library.sok_longest_wait(
            what, ctypes.c_int64(len(what)), ctypes.byref(number)
        )
        return what.value.decode(errors="replace"), seconds, number.value

    def _report(self):
        what, seconds, number = self._longest_wait()
        report = {"what": what, "seconds": seconds, "number": number, "ended": self._ended}
        report |= {"leaves": self._leaves, "stopped": bool(self.reason)}
        if self._listener is None:
            self._server.send(report)
            silence = time.monotonic() - self._last_word
            if what and silence > self._limit:
                self._end_waits(
                    f"{stall_verdict.where(what)}: rank 0 has not answered for {silence:.0f} s"
                )
            return
        self._judge.hear(self._rank, report)
        self._stop_waits(self._judge.verdict())
        late = self._stop_time and time.monotonic() - self._stop_time > _LATE_TO_STOP
        word = {
            "waited_for": self._judge.any_waits(),
            "left": self._judge.left(),
            "stop": self.reason,
            "shut": bool(self.reason and (late or self._judge.all_stopped())),
            "over": self._judge.all_ended(),
        }
        for line in self._lines.values():
            line.send(word)
        self._obey(word)

    def _receive(self, key):
        if key.data is None:
            connection, _ = self._listener.accept()
            _Line(connection, self._selector)
            return
        line = key.data
        for message in line.messages():
            if line is self._server:
                self._last_word = time.monotonic()
                self._obey(message)
            elif line.rank is None:
                known = secrets.compare_digest(str(message.get("secret")), self._secret)
                rank = as_integer(message.get("rank"))
                if not known or rank is None or not 0 < rank < self._world_size:
                    line.close()
                    return
                line.rank = rank
                self._lines[rank] = line
            else:
                self._judge.hear(line.rank, message)
        if not line.open:
            if line is self._server:
                what, _, _ = self._longest_wait()
                if self._left.startswith("rank 0 ") and not what:
                    self.told.set()  # it announced that, and nothing here waits for it
                    return
                here = f"in {stall_verdict.where(what)}" if what else "in no exchange"
                self._end_waits(f"rank 0 has ended without a message; rank {self._rank} was {here}")
            elif line.rank is not None:
                self._judge.lose(line.rank)
                self._lines.pop(line.rank, None)

    def _obey(self, word):
        self._waited_for = bool(word.get("waited_for"))
        left = str(word.get("left") or "")
        if left != self._left:
            self._left = left
            self._library.sok_refuse_waits(left.encode())
        self._stop_waits(str(word.get("stop") or ""))
        if word.get("shut"):
            self._shut_down()
        elif word.get("over"):
            self.told.set()

    def _end_waits(self, reason):
        """Ends waiting without rank 0, which would say when all ranks have stopped."""
        self._stop_waits(reason)
        time.sleep(_PERIOD)
        self._shut_down()

    def _stop_waits(self, reason):
        """Raises the reason where this process waits."""
        if self.reason or not reason:
            return
        self.reason, self._stop_time = reason, time.monotonic()
        self._library.sok_stop_waits(reason.encode())
        if not self._ended:
            print(f"sok_like, rank {self._rank}: {reason}", file=sys.stderr, flush=True)

    def _shut_down(self):
        self.told.set()
        if self._ended:
            return
        import horovod.tensorflow as hvd

        hvd.shutdown()


class _Line:
    """A connection that carries one JSON object per line."""

    def __init__(self, connection, selector):
        connection.setblocking(False)
        self.rank: int | None = None
        self.open = True
        self._connection, self._selector, self._read = connection, selector, b""
        selector.register(connection, selectors.EVENT_READ, self)

    def send(self, message: dict[str, Any]) -> None:
        if not self.open:
            return
        try:
            self._connection.send(json.dumps(message).encode() + b"\n")
        except BlockingIOError:
            pass  # a rank that reads nothing is noticed by its silence
        except OSError:
            self.close()

    def messages(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        try:
            received = self._connection.recv(_MAX_LINE)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        *lines, self._read = (self._read + received).split(b"\n")
        try:
            messages = [message for line in lines if isinstance(message := json.loads(line), dict)]
        except ValueError:
            messages = []
        if not received or len(self._read) > _MAX_LINE:
            self.close()
        return messages

    def close(self) -> None:
        if self.open:
            self.open = False
            self._selector.unregister(self._connection)
            self._connection.close()


def _listen():
    listener = socket.create_server(("", 0))
    listener.setblocking(False)
    return listener


def _address(listener):
    import horovod.tensorflow as hvd

    host = "127.0.0.1"
    if hvd.local_size() != hvd.size():  # several hosts
        try:
            host = socket.gethostbyname(socket.getfqdn())
        except OSError:
            host = socket.gethostname()
    return json.dumps([host, listener.getsockname()[1], secrets.token_hex(16)])


def _from_rank_0(text, communicator):
    """Rank 0's text, on all ranks; uses a session of its own while a v1 graph is being built."""
    data = np.frombuffer(text.encode(), np.uint8)
    if tf.executing_eagerly():
        return communicator.all_gather(tf.constant(data), "sok_stalls").numpy().tobytes().decode()
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        told = session.run(communicator.all_gather(tf.constant(data), "sok_stalls"))
    return told.tobytes().decode()
