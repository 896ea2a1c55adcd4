"""Ranks of the job talk to each other; strangers cannot join, replay, or keep them from it.

And at which of its addresses a host is reached by the others of a job.
"""

import contextlib
import resource
import selectors
import socket
import threading
import time

import pytest

from sok_like.runtime.ranks import launchers, stall_connections
from sok_like.runtime.ranks.stall_connections import Door, Line, connect

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


class Server(threading.Thread):
    """Rank 0's side, as the watch thread serves it."""

    def __init__(self, world_size):
        super().__init__(daemon=True)
        self.selector = selectors.DefaultSelector()
        self.door = Door("127.0.0.1", SECRET, world_size, self.selector)
        self.lines, self.heard, self.over, self.most = {}, [], False, 0
        self.start()

    def run(self):
        while not self.over:
            for key, _ in self.selector.select(0.05):
                if not isinstance(key.data, Line):
                    line = self.door.answer(key.data)
                    if line is not None:
                        self.lines[line.rank] = line
                    continue
                self.heard += [(key.data.rank, message) for message in key.data.messages()]
                if not key.data.open:
                    self.selector.unregister(key.data)
            self.most = max(self.most, len(self.door._strangers))
            self.door.dismiss_slow()


@pytest.fixture
def server():
    made = Server(3)
    yield made
    made.over = True
    made.join()
    made.door.close()


def until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def talks(server, rank=1):
    """A rank comes in and is heard."""
    line = connect(server.door.address, SECRET, rank, 10)
    line.send({"what": "é", "rank": rank})
    until(lambda: (rank, {"what": "é", "rank": rank}) in server.heard)
    server.lines[rank].send({"left": ""})
    until(line.messages)
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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                stack.enter_context(socket.create_connection(server.door.address))
            talks(server)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server.most <= server.door._most == 3 + stall_connections._MOST_STRANGERS


def test_nobody_gets_in_when_all_ranks_are_in(server):
    waits = socket.create_connection(server.door.address)
    lines = [talks(server, rank) for rank in (1, 2)]
    assert closed(waits) and all(line.open for line in lines)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.door.address)


@pytest.mark.parametrize("secret, rank", [("other", 1), (SECRET, 0), (SECRET, 3), (SECRET, 2)])
def test_who_does_not_belong_to_the_job_is_refused(server, secret, rank):
    first = talks(server, 2)
    with pytest.raises(OSError):
        connect(server.door.address, secret, rank, 0.5)
    first.send({"still": "here"})
    until(lambda: (2, {"still": "here"}) in server.heard)


class Tap(socket.socket):
    """Keeps what was sent."""

    sent: bytes

    def send(self, data):
        self.sent = getattr(self, "sent", b"") + data
        return super().send(data)


@pytest.mark.parametrize("what", ["twice", "altered", "reflected", "of another line", "too long"])
def test_a_message_is_heard_once_and_only_as_it_was_sent(server, what):
    line = talks(server)
    line._connection = Tap(fileno=line._connection.detach())
    line.send({"count": 1})
    until(lambda: (1, {"count": 1}) in server.heard)
    message = line._connection.sent
    if what == "altered":
        message = message.replace(b"1", b"2")
    elif what == "of another line":
        other = talks(server, 2)
        other._sent = line._sent - 1
        other._connection = Tap(fileno=other._connection.detach())
        other.send({"count": 1})
        message = other._connection.sent
    elif what == "too long":
        message = b"\x7f" + message[1:]
    elif what == "reflected":
        server.lines[1]._connection = Tap(fileno=server.lines[1]._connection.detach())
        server.lines[1]._sent = line._sent
        server.lines[1].send({"count": 1})
        message = server.lines[1]._connection.sent
    line._connection.sendall(message)
    until(lambda: not server.lines[1].open)
    assert [message for rank, message in server.heard if rank == 1][1:] == [{"count": 1}]


def test_a_recorded_introduction_is_refused(server):
    with socket.create_connection(server.door.address) as first:
        nonce = stall_connections._receive(first, 16)
        key = stall_connections._key(SECRET, nonce, b"n" * 16, 1)
        hello = stall_connections._HELLO.pack(
            b"n" * 16, 1, stall_connections._proof(key, b"client")
        )
        with socket.create_connection(server.door.address) as second:
            second.sendall(hello)
            assert closed(second) and 1 not in server.lines
        first.sendall(hello)  # where it belongs
        until(lambda: 1 in server.lines)


def test_a_false_rank_0_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend():
            connection, _ = false.accept()
            connection.sendall(b"n" * 16 + b"t" * 32)
            connection.recv(100)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not know the job's secret"):
            connect(false.getsockname(), SECRET, 1, 0.5)


def test_a_rank_that_does_not_read_delays_nobody_and_later_reads_whole_messages(server):
    line = talks(server)
    sender, text = server.lines[1], "x" * 10_000
    for number in range(1000):  # 10 MB, more than sockets hold
        sender.send({"number": number, "text": text})
    found = []
    for number in range(1000, 100_000):
        if found and found[-1]["number"] >= 1000:
            break
        found += line.messages()
        sender.send({"number": number, "text": text})
    numbers = [message["number"] for message in found]
    assert line.open and numbers == sorted(set(numbers)) and 1 < len(numbers)
    assert numbers[-1] - numbers[0] >= len(numbers)  # some were dropped


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
