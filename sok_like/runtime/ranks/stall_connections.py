"""The connections between the watch threads, which strangers cannot join, read into or break.

Rank 0 listens at the address at which the other hosts reach its own (`host_address`).

    rank r                          rank 0
           <-- nonce (16 bytes) --         a new one per connection
           -- nonce, r, tag ----->         52 bytes; rank 0 takes no more from a stranger
           <-- size, tag, JSON -->         messages, parsed after their tag was checked

Both sides derive a connection's key from the job's secret, both nonces and r. A tag is an
HMAC-SHA256 with this key. That of a message also covers its sender and its number, so a recorded
message is refused at any other place. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sok_like.runtime.ranks import launchers

_NONCE = 16  # bytes
_HELLO = struct.Struct("!16sI32s")  # the rank's nonce, its number, a tag
_HEAD = struct.Struct("!I32s")  # size of a message in bytes, its tag
_LARGEST = 1 << 20  # bytes of a message: names of what thousands of ranks do
_PIECE = 1 << 16  # bytes received at once
_PATIENCE = 5.0  # seconds until a stranger must have said who it is
# Strangers at a time, beyond the number of ranks, which may all come at once. One more pushes out
# the oldest, so that those who only wait cannot keep the ranks out.
_MOST_STRANGERS = 64
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Line:
    """A connection to another `rank` of the job, with a key that both sides only know."""

    def __init__(self, connection: socket.socket, key: bytes, rank: int, is_server: bool):
        connection.setblocking(False)
        self.rank = rank  # of the other side; rank 0 is the server
        self.open = True  # until the other side closes it, or was not who it should be
        self._connection, self._key = connection, key
        self._me, self._other = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = self.heard = 0  # messages
        self._unsent, self._read = b"", b""

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; drops it while the other side does not read."""
        if not self.open:
            return
        if not self._unsent:
            text = json.dumps(message).encode()
            self._unsent = _HEAD.pack(len(text), self._tag(self._me, self._sent, text)) + text
            self._sent += 1
        # A rank that reads nothing is noticed by its silence, a broken connection by `messages`.
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self._connection.send(self._unsent) :]

    def messages(self) -> list[dict[str, Any]]:
        """The messages that have arrived; closes the line at one that is not the other side's."""
        try:
            received = self._connection.recv(_PIECE)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        self._read += received
        messages = list(iter(self._next, None))
        if not received:
            self.close()
        return messages

    def _next(self):
        if not self.open or len(self._read) < _HEAD.size:
            return None
        size, tag = _HEAD.unpack_from(self._read)
        end = _HEAD.size + size
        if size <= _LARGEST and len(self._read) < end:
            return None
        text, self._read = self._read[_HEAD.size : end], self._read[end:]
        if size > _LARGEST or not hmac.compare_digest(
            tag, self._tag(self._other, self.heard, text)
        ):
            self.close()
            return None
        self.heard += 1
        return json.loads(text)

    def _tag(self, sender, number, text):
        return hmac.digest(self._key, sender + struct.pack("!Q", number) + text, "sha256")

    def close(self) -> None:
        self.open = False
        self._connection.close()


def connect(address: tuple[str, int], secret: str, rank: int, seconds: float) -> Line:
    """The connection of `rank` to rank 0; OSError if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            with contextlib.ExitStack() as at_failure:
                connection = socket.create_connection(address, timeout=left)
                at_failure.callback(connection.close)
                line = _introduce(connection, secret, rank)
                at_failure.pop_all()
                return line
        except OSError:  # a flood of strangers may have pushed it out
            if time.monotonic() > deadline - 1:
                raise
            time.sleep(0.1)


def _introduce(connection, secret, rank):
    nonce_of_0, nonce = _receive(connection, _NONCE), secrets.token_bytes(_NONCE)
    key = _key(secret, nonce_of_0, nonce, rank)
    connection.sendall(_HELLO.pack(nonce, rank, _proof(key, b"client")))
    if not hmac.compare_digest(_receive(connection, 32), _proof(key, b"server")):
        raise ConnectionError("the other side does not know the job's secret")
    return Line(connection, key, 0, is_server=False)


def _receive(connection, size):
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        received += part
    return received


def _key(secret, nonce_of_0, nonce_of_rank, rank):
    nonces = nonce_of_0 + nonce_of_rank
    return hmac.digest(secret.encode(), nonces + struct.pack("!I", rank), "sha256")


def _proof(key, side):
    return hmac.digest(key, side + b" of sok_like", "sha256")


class _Stranger:
    """A connection whose other side has not shown that it knows the secret."""

    def __init__(self, connection):
        connection.setblocking(False)
        self.connection, self.since, self.read = connection, time.monotonic(), b""
        self.nonce = secrets.token_bytes(_NONCE)
        connection.send(self.nonce)  # fits the buffer of a new connection

    def hello(self):
        """What it says; None if it is not complete. Raises OSError if it never will be."""
        try:
            received = self.connection.recv(_HELLO.size - len(self.read))
        except BlockingIOError:
            return None
        if not received:
            raise ConnectionError
        self.read += received
        return _HELLO.unpack(self.read) if len(self.read) == _HELLO.size else None


class Door:
    """Rank 0's port. It lets each of the other ranks in once, and is closed when all are in."""

    # The data of the selector's keys goes to `answer`, if it is no `Line`, which is the caller's.

    def __init__(self, host: str, secret: str, world_size: int, selector: selectors.BaseSelector):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret, self._selector = secret, selector
        self._missing = set(range(1, world_size))
        self._most = world_size + _MOST_STRANGERS
        self._strangers: list[_Stranger] = []  # by age
        selector.register(self._listener, selectors.EVENT_READ, self)

    def answer(self, caller: Door | _Stranger) -> Line | None:
        """Serves who called; returns the line of a rank that has come in, registered."""
        if isinstance(caller, _Stranger):
            return self._examine(caller)
        with contextlib.ExitStack() as at_failure:
            try:
                connection, _ = self._listener.accept()
                at_failure.callback(connection.close)
                stranger = _Stranger(connection)
            except OSError:  # it has gone already, or the process has too many open files
                return None
            at_failure.pop_all()
        self._strangers.append(stranger)
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        if len(self._strangers) > self._most:
            self._dismiss(self._strangers[0])
        return None

    def dismiss_slow(self) -> None:
        """Closes the connections of strangers who have taken too long."""
        late = time.monotonic() - _PATIENCE
        for stranger in [s for s in self._strangers if s.since < late]:
            self._dismiss(stranger)

    def _examine(self, stranger):
        if stranger not in self._strangers:
            return None  # dismissed since it called
        try:
            hello = stranger.hello()
            if hello is None:
                return None
            nonce, rank, tag = hello
            key = _key(self._secret, stranger.nonce, nonce, rank)
            knows_secret = hmac.compare_digest(tag, _proof(key, b"client"))
            if not knows_secret or rank not in self._missing:
                raise ConnectionError
            stranger.connection.send(_proof(key, b"server"))
        except OSError:
            self._dismiss(stranger)
            return None
        self._forget(stranger)
        line = Line(stranger.connection, key, rank, is_server=True)
        self._selector.register(line, selectors.EVENT_READ, line)
        self._missing.remove(rank)
        if not self._missing:
            self.close()
        return line

    def _dismiss(self, stranger):
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger):
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.connection)

    def close(self) -> None:
        """Nobody else gets in."""
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()


def host_names() -> list[str]:
    """This host's name, by which launchers start ranks there, and its addresses."""
    addresses = [_of_interface(interface) for _, interface in socket.if_nameindex()]
    own = os.environ.get(launchers.HOST_NAME) or socket.gethostname()
    return [own, *(address for address in addresses if not _is_loopback(address))]


def host_address(hosts: Sequence[Sequence[str]]) -> str:
    """This host's address in the network of `hosts`, or of the launcher's interface."""
    return next((a for a in _candidates(hosts) if not _is_loopback(a)), LOOPBACK)


def _candidates(hosts) -> Iterator[str]:
    chosen = [os.environ.get(variable, "") for variable in launchers.INTERFACES]
    for word in ",".join(chosen).split(","):
        if "/" in word:
            with contextlib.suppress(ValueError):
                network = ipaddress.ip_network(word.strip(), strict=False)
                own = _towards(str(network.network_address + 1))
                if own and ipaddress.ip_address(own) in network:
                    yield own
        elif word.strip():
            yield _of_interface(word.strip())
    own_names = host_names()
    others = [host for host in hosts if host != own_names]
    yield from (_towards(word) for word in dict.fromkeys(host[0] for host in others))
    # Names that this host does not know. Addresses that are its own, too, are those of bridges.
    addresses = dict.fromkeys(word for host in others for word in host[1:] if word not in own_names)
    yield from map(_towards, addresses)


def _of_interface(interface) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(reply[20:24])


def _towards(host) -> str:
    """The address from which packets go to `host`; none is sent. Empty if there is none."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as unconnected:
                unconnected.connect(target)
                return unconnected.getsockname()[0]
    return ""


def _is_loopback(address) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
