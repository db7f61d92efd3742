"""The network interface of this host over which gloo connects ranks: the one from which it reaches the first rank.

Without a name gloo takes the address to which the host's own name resolves: often the loopback, or a slow network.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_PORT = 9  # discard; nothing is sent
_LOOPBACK = "lo"
_ELSEWHERE = "192.0.2.1"  # of no host (RFC 5737): only its route is looked up


def name_interface(address: str, num_nodes: int) -> None:
    """Set the variable that gloo reads, unless it is set or the interface to ``address`` is not known."""
    if VARIABLE not in os.environ and (name := interface_to(address, num_nodes)):
        os.environ[VARIABLE] = name


def interface_to(address: str, num_nodes: int) -> str:
    """Return the interface from which this host reaches another one, by IPv4; "" if it has none, and outside Linux.

    A host that knows its own name by the loopback, as Debian sets them up, is reached from other nodes over its only
    network, or else over the network of the default route.
    """
    name = _route_to(address)
    if num_nodes == 1 or not name.startswith(_LOOPBACK):
        return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = [name for _, name in socket.if_nameindex() if _address_of(name, probe)]
    networks = [name for name in names if not name.startswith(_LOOPBACK)]
    return networks[0] if len(networks) == 1 else _route_to(_ELSEWHERE)


def _route_to(address: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _PORT))
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else []
        known = next((name for name in names if _address_of(name, probe) == own), "")
        return _LOOPBACK if own.startswith("127.") and names else known
    return ""


def _address_of(name: str, probe: socket.socket) -> str:
    import fcntl  # not on Windows

    with contextlib.suppress(OSError):  # it has none
        return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))[20:24])
    return ""
