"""Ranks of the job talk to each other; strangers cannot join, replay, or keep them from it.

And at which of its addresses a host is reached by the others of a job.
"""

import asyncio
import contextlib
import itertools
import socket
import threading

import pytest

from sok_like.runtime.ranks import launchers, stall_connections
from sok_like.runtime.ranks.stall_connections import Door, Line, connect
from tests.ranks import wait_for

SECRET = "secret"
NOISE = [b'{"secret":"\xc3\xa9"}\n', b"[" * 4000, b"", b"\x00" * 20, b"\xff" * 52, b"GET / HTTP"]
# Of hosts: names and addresses; which of its own a host sends from, and has.
MINE = ["mine", "10.0.0.1", "172.17.0.1"]
OTHER = ["other", "10.0.0.2", "172.17.0.1"]
ROUTES = {
    "other": "10.0.0.1",
    "10.0.0.2": "10.0.0.9",
    "10.1.0.1": "10.1.0.5",
    "10.2.0.1": "10.0.0.1",
}
INTERFACES = {"ib0": "10.1.0.5", "lo": "127.0.0.1"}


class CountingDoor(Door):
    most = 0  # strangers at a time

    async def _examine(self, reader, writer):
        self.most = max(self.most, len(self._strangers))
        return await super()._examine(reader, writer)


class Tap:
    """Keeps what a stream's writer has sent."""

    def __init__(self, writer):
        self._writer, self.sent = writer, b""

    def write(self, data):
        self.sent += data
        self._writer.write(data)

    def __getattr__(self, name):
        return getattr(self._writer, name)


class Server(threading.Thread):
    """Rank 0's side, as the watch thread serves it, and in the same loop the other ranks'."""

    def __init__(self, world_size):
        super().__init__(daemon=True)
        self.loop = asyncio.new_event_loop()
        self.door = CountingDoor("127.0.0.1", SECRET, world_size)
        self.lines, self.heard, self.answers, self.ended = {}, [], [], set()
        self.start()
        self.do(self.door.open(self.serve))

    def run(self):
        self.loop.run_forever()

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def call(self, function, *arguments):
        async def called():
            return function(*arguments)

        return self.do(called())

    async def serve(self, line):
        self.lines[line.rank] = line
        async for message in line.messages():
            self.heard.append((line.rank, message))
        self.ended.add(line.rank)

    async def join_as(self, rank):
        line = await connect(self.door.address, SECRET, rank, 10)
        self.reading = asyncio.create_task(self.read(line))
        return line

    async def read(self, line):
        async for message in line.messages():
            self.answers.append(message)


@pytest.fixture
def server():
    made = Server(3)
    yield made
    made.call(made.door.close)
    made.loop.call_soon_threadsafe(made.loop.stop)
    made.join()


def talks(server, rank=1):
    """A rank comes in, is heard and answered."""
    line = server.do(server.join_as(rank))
    server.call(line.send, {"what": "é", "rank": rank})
    wait_for(lambda: (rank, {"what": "é", "rank": rank}) in server.heard)
    server.call(server.lines[rank].send, {"to": rank})
    wait_for(lambda: {"to": rank} in server.answers)
    return line


def closed(connection):
    """Whether the other side closes the connection, after its nonce."""
    connection.settimeout(60)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return True


def noise(address, sent):
    """A stranger's connection that says `sent`, as far as it is taken."""
    connection = socket.create_connection(address)
    with contextlib.suppress(OSError):
        connection.sendall(sent)
    return connection


@pytest.mark.parametrize("sent", NOISE)
def test_noise_is_ignored(server, sent, monkeypatch):
    monkeypatch.setattr(stall_connections, "_PATIENCE", 0.3)
    with noise(server.door.address, sent) as stranger:
        assert closed(stranger)  # the shorter ones when they took too long
        talks(server)
    assert server.is_alive()


def test_a_line_of_100_megabytes_is_not_stored(server):
    with socket.create_connection(server.door.address) as stranger, pytest.raises(OSError):
        for _ in range(100):
            stranger.sendall(b"x" * (1 << 20))
    talks(server)


def test_strangers_who_only_wait_keep_nobody_out(server):
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(server.door.address))
        talks(server)
    assert server.door.most <= server.door._most == 3 + stall_connections._MOST_STRANGERS


def test_nobody_gets_in_when_all_ranks_are_in(server):
    waits = socket.create_connection(server.door.address)
    for rank in (1, 2):
        talks(server, rank)
    assert closed(waits) and not server.ended
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.door.address)


@pytest.mark.parametrize("secret, rank", [("other", 1), (SECRET, 0), (SECRET, 3), (SECRET, 2)])
def test_who_does_not_belong_to_the_job_is_refused(server, secret, rank):
    first = talks(server, 2)
    with pytest.raises(OSError):
        server.do(connect(server.door.address, secret, rank, 0.5))
    server.call(first.send, {"still": "here"})
    wait_for(lambda: (2, {"still": "here"}) in server.heard)


@pytest.mark.parametrize("what", ["twice", "altered", "reflected", "of another line", "too long"])
def test_a_message_is_heard_once_and_only_as_it_was_sent(server, what):
    line = talks(server)
    line._writer = tap = Tap(line._writer)
    server.call(line.send, {"count": 1})
    wait_for(lambda: (1, {"count": 1}) in server.heard)
    message = tap.sent
    if what == "altered":
        message = message.replace(b"1", b"2")
    elif what == "too long":
        message = b"\x7f" + message[1:]
    elif what in ("reflected", "of another line"):
        other = server.lines[1] if what == "reflected" else talks(server, 2)
        other._sent, other._writer = line._sent, Tap(other._writer)
        server.call(other.send, {"count": 1})
        message = other._writer.sent
    server.call(tap.write, message)
    wait_for(lambda: 1 in server.ended)
    assert [message for rank, message in server.heard if rank == 1][1:] == [{"count": 1}]


FIRST = b'{"rank": 1, "nonce": "0"}'


def test_a_recorded_introduction_is_refused(server):
    with socket.create_connection(server.door.address) as first:
        line, text = Line(None, None, SECRET, first.recv(16), is_server=False), FIRST
        hello = stall_connections._HEAD.pack(len(text), line._tag(b"client", 0, text)) + text
        with socket.create_connection(server.door.address) as second:
            second.sendall(hello)
            assert closed(second) and 1 not in server.lines
        first.sendall(hello)  # where it belongs
        wait_for(lambda: 1 in server.lines)


def test_a_recorded_answer_is_refused_by_other_ranks(server):
    with socket.create_server(("127.0.0.1", 0)) as between:

        def record():
            rank_1, _ = between.accept()
            with socket.create_connection(server.door.address) as rank_0:
                nonce = rank_0.recv(16)
                rank_1.sendall(nonce)
                rank_0.sendall(rank_1.recv(1000))
                answer = rank_0.recv(1000)
                rank_1.sendall(answer)
                rank_2, _ = between.accept()
                rank_2.sendall(nonce + answer)

        threading.Thread(target=record, daemon=True).start()
        server.do(connect(between.getsockname(), SECRET, 1, 10))
        with pytest.raises(ConnectionError, match="does not know the job's secret"):
            asyncio.run(connect(between.getsockname(), SECRET, 2, 0.5))


def test_a_false_rank_0_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend():
            connection, _ = false.accept()
            connection.sendall(b"n" * 16 + b"t" * 36)
            connection.recv(100)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not know the job's secret"):
            asyncio.run(connect(false.getsockname(), SECRET, 1, 0.5))


def test_a_rank_that_does_not_read_delays_nobody_and_later_reads_whole_messages(server):
    line, text = server.do(connect(server.door.address, SECRET, 1, 10)), "x" * 10_000
    wait_for(lambda: server.lines)
    sender, numbers = server.lines[1], itertools.count()

    async def send_and_read():
        for _ in range(1000):  # 10 MB, more than sockets hold
            sender.send({"number": next(numbers), "text": text})
        found = []
        async for message in line.messages():
            found.append(message["number"])
            if found[-1] >= 1000:
                return found
            sender.send({"number": next(numbers), "text": text})

    found = server.do(send_and_read())
    assert found == sorted(set(found)) and 1 < len(found)
    assert found[-1] - found[0] >= len(found)  # some were dropped


@pytest.fixture
def network(monkeypatch):
    """A host with these routes and interfaces; other names lead nowhere."""
    for variable in launchers.INTERFACES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(stall_connections, "host_names", lambda: MINE)
    monkeypatch.setattr(stall_connections, "_towards", lambda word: ROUTES.get(word, ""))
    monkeypatch.setattr(stall_connections, "_of_interface", lambda word: INTERFACES.get(word, ""))


@pytest.mark.parametrize(
    "variable, value, others, expected",
    [
        (0, "", [MINE, OTHER], "10.0.0.1"),
        (0, "", [MINE, ["unknown", *OTHER[1:]]], "10.0.0.9"),
        (0, "", [["mine", "10.0.0.2"]], "10.0.0.9"),  # another host of the same name
        (0, "", [MINE, ["unknown", "172.17.0.1"]], stall_connections.LOOPBACK),
        (0, "ib0", [MINE, OTHER], "10.1.0.5"),
        (0, "lo", [MINE, OTHER], "10.0.0.1"),
        (1, "none,ib0", [MINE, OTHER], "10.1.0.5"),
        (1, "10.1.0.0/24", [MINE, OTHER], "10.1.0.5"),
        (1, "10.2.0.0/24", [MINE, OTHER], "10.0.0.1"),
        (1, "10.2/x", [MINE, OTHER], "10.0.0.1"),
    ],
)
def test_the_interface_named_to_the_launcher_else_the_one_towards_another_host(
    network, monkeypatch, variable, value, others, expected
):
    monkeypatch.setenv(launchers.INTERFACES[variable], value)
    assert stall_connections.host_address(others) == expected


def test_routes_and_interfaces_of_this_machine():
    towards, of_interface = stall_connections._towards, stall_connections._of_interface
    assert towards("127.0.0.1") == of_interface("lo") == "127.0.0.1"
    assert towards("no such host") == of_interface("no such") == ""
    assert "127.0.0.1" not in stall_connections.host_names()
