"""The connections between the watch threads, which strangers cannot join, read into or break.

Rank 0 listens at the address at which the other hosts reach its own (`host_address`).

    rank r                          rank 0
           <-- nonce (16 bytes) --         a new one per connection
           <-- size, tag, JSON -->         messages, parsed after their tag was checked

The first message of rank r says so and brings a nonce of its own. Rank 0 answers it. A tag is an
HMAC-SHA256 with the job's secret. It covers both nonces (that of the first message only rank 0's),
the sender and the message's number, so a recorded message is refused at any other place. Messages
are not encrypted.
"""

import asyncio
import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from sok_like.runtime.ranks import launchers

_NONCE = 16  # bytes
_HEAD = struct.Struct("!I32s")  # size of a message in bytes, its tag
_LARGEST = 1 << 20  # bytes of a message: names of what thousands of ranks do
_LARGEST_FIRST = 100  # bytes of a stranger's
_PATIENCE = 5.0  # seconds until a stranger must have said who it is
# Strangers at a time, beyond the number of ranks, which may all come at once. One more pushes out
# the oldest, so that those who only wait cannot keep the ranks out.
_MOST_STRANGERS = 64
LOOPBACK = "127.0.0.1"
_FAILURES = (OSError, EOFError, asyncio.TimeoutError)  # of a connection
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Line:
    """A connection to another `rank` of the job, by streams of asyncio; rank 0 is the server."""

    def __init__(self, reader: Any, writer: Any, secret: str, nonce: bytes, is_server: bool):
        self.rank = 0
        self._reader, self._writer = reader, writer
        self._key = hmac.digest(secret.encode(), nonce, "sha256")
        self._me, self._other = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = self.heard = 0  # messages

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; drops it while the other side does not read."""
        # A rank that reads nothing is noticed by its silence, a broken connection by `messages`.
        if self._writer.is_closing() or self._writer.transport.get_write_buffer_size():
            return
        text = json.dumps(message).encode()
        self._writer.write(_HEAD.pack(len(text), self._tag(self._me, self._sent, text)) + text)
        self._sent += 1

    async def hear(self, largest: int = _LARGEST) -> dict[str, Any]:
        """The next message; ConnectionError at one of somebody else."""
        size, tag = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
        text = await self._reader.readexactly(size) if size <= largest else b""
        if not hmac.compare_digest(tag, self._tag(self._other, self.heard, text)):
            raise ConnectionError("the other side does not know the job's secret")
        self.heard += 1
        return json.loads(text)

    def bind(self, nonce: str) -> None:
        """Has further tags cover the nonce of the first message, too."""
        self._key = hmac.digest(self._key, nonce.encode(), "sha256")

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """The messages that arrive; closes the line at its end, or at one of somebody else."""
        with contextlib.closing(self._writer), contextlib.suppress(OSError, EOFError):
            while True:
                yield await self.hear()

    def _tag(self, sender, number, text):
        return hmac.digest(self._key, sender + struct.pack("!Q", number) + text, "sha256")


async def connect(address: tuple[str, int], secret: str, rank: int, seconds: float) -> Line:
    """The connection of `rank` to rank 0; OSError if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            return await asyncio.wait_for(_introduce(address, secret, rank), left)
        except _FAILURES as error:  # a flood of strangers may have pushed it out
            if time.monotonic() > deadline - 1:
                raise ConnectionError(str(error) or "it does not answer") from error
            await asyncio.sleep(0.1)


async def _introduce(address, secret, rank):
    reader, writer = await asyncio.open_connection(*address)
    with contextlib.ExitStack() as at_failure:
        at_failure.callback(writer.close)
        line = Line(reader, writer, secret, await reader.readexactly(_NONCE), is_server=False)
        line.send({"rank": rank, "nonce": (own_nonce := secrets.token_hex(_NONCE))})
        line.bind(own_nonce)
        await line.hear()
        at_failure.pop_all()
    return line


class Door:
    """Rank 0's port. It lets each of the other ranks in once, and is closed when all are in."""

    def __init__(self, host: str, secret: str, world_size: int):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret = secret
        self._missing = set(range(1, world_size))
        self._most = world_size + _MOST_STRANGERS
        # Tasks of connections whose other side has not shown that it knows the secret, by age.
        self._strangers: list[Any] = []

    async def open(self, serve: Callable[[Line], Awaitable[None]]) -> None:
        """Lets ranks in from now on, and calls `serve` with the line of each."""
        self._serve = serve
        self._server = await asyncio.start_server(self._admit, sock=self._listener)

    async def _admit(self, reader, writer):
        task = asyncio.current_task()
        self._strangers.append(task)
        if len(self._strangers) > self._most:
            self._strangers.pop(0).cancel()
        try:
            line = await asyncio.wait_for(self._examine(reader, writer), _PATIENCE)
        except (*_FAILURES, asyncio.CancelledError):
            writer.close()
            return
        finally:
            if task in self._strangers:
                self._strangers.remove(task)
        if not self._missing:
            self.close()
        with contextlib.suppress(asyncio.CancelledError):  # asyncio would print it
            await self._serve(line)

    async def _examine(self, reader, writer):
        nonce = secrets.token_bytes(_NONCE)
        writer.write(nonce)
        line = Line(reader, writer, self._secret, nonce, is_server=True)
        first = await line.hear(_LARGEST_FIRST)
        line.rank = first["rank"]
        line.bind(first["nonce"])
        if line.rank not in self._missing:
            raise ConnectionError
        line.send({})
        self._missing.remove(line.rank)
        return line

    def close(self) -> None:
        """Nobody else gets in."""
        for stranger in self._strangers:
            stranger.cancel()
        self._server.close()


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
