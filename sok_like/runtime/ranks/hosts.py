"""The address at which the other hosts of a job reach this one.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence

from sok_like.runtime.ranks import launchers

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def names() -> list[str]:
    """This host's name, by which launchers start ranks there, and its addresses."""
    addresses = [_of_interface(interface) for _, interface in socket.if_nameindex()]
    own = os.environ.get(launchers.HOST_NAME) or socket.gethostname()
    return [own, *(address for address in addresses if not _is_loopback(address))]


def address(hosts: Sequence[Sequence[str]]) -> str:
    """This host's address in the network of `hosts`, whose names are given.

    It is that of the interface named to the launcher, if any, or else of the one from which packets
    reach another host. The loopback if there is none.
    """
    return next((a for a in _candidates(hosts) if not _is_loopback(a)), LOOPBACK)


def _candidates(hosts) -> Iterator[str]:
    chosen = [os.environ.get(variable, "") for variable in launchers.INTERFACES]
    for word in ",".join(chosen).split(","):
        if "/" in word:
            with contextlib.suppress(ValueError):
                network = ipaddress.ip_network(word.strip(), strict=False)
                found = _towards(str(network.network_address + 1))
                if found and ipaddress.ip_address(found) in network:
                    yield found
        elif word.strip():
            yield _of_interface(word.strip())
    mine = names()
    others = [host for host in hosts if host != mine]
    yield from (_towards(word) for word in dict.fromkeys(host[0] for host in others))
    # Names that this host does not know. Addresses that are its own, too, are those of bridges.
    addresses = dict.fromkeys(word for host in others for word in host[1:] if word not in mine)
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


def _is_loopback(found) -> bool:
    return not found or ipaddress.ip_address(found.partition("%")[0]).is_loopback
