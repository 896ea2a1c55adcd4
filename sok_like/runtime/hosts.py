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

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
# The user's choice among several networks, as docs/install.md says how to make it: interfaces, or
# for Open MPI networks such as 10.0.0.0/8 as well.
_INTERFACES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include")
# This host's name in the launcher's list.
_NAMES = ("HOROVOD_HOSTNAME", "PMIX_HOSTNAME")


def name() -> str:
    """This host's name in the launcher's list, or else its own."""
    return next((os.environ[n] for n in _NAMES if os.environ.get(n)), socket.gethostname())


def address(hosts: Sequence[str]) -> str:
    """This host's address in the network of `hosts`, the names of a job's hosts.

    It is that of the interface named to the launcher, if any, or else of the one from which packets
    reach another host. The loopback if there is none.
    """
    return next((found for found in _candidates(hosts) if not _is_loopback(found)), LOOPBACK)


def _candidates(hosts) -> Iterator[str]:
    chosen = [os.environ.get(variable, "") for variable in _INTERFACES]
    for word in ",".join(chosen).split(","):
        if "/" in word:
            with contextlib.suppress(ValueError):
                network = ipaddress.ip_network(word.strip(), strict=False)
                found = _towards(str(network.network_address + 1))
                if found and ipaddress.ip_address(found) in network:
                    yield found
        elif word.strip():
            yield _of_interface(word.strip())
    yield from (_towards(host) for host in dict.fromkeys(hosts) if host != name())
    yield _towards("192.0.2.1")  # an address of nobody's, so by the default route


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
