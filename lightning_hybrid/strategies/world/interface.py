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


def name_interface(address: str, num_nodes: int) -> None:
    """Set the variable that gloo reads, unless it is set or the interface to ``address`` is not known."""
    if VARIABLE not in os.environ and (name := interface_to(address, num_nodes)):
        os.environ[VARIABLE] = name


def interface_to(address: str, num_nodes: int) -> str:
    """Return the interface from which this host reaches another one, by IPv4; "" if it has none, and outside Linux.

    The loopback is none where there are several nodes: a host may know its own name by that.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _PORT))
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else []
        if num_nodes == 1 or not own.startswith("127."):
            return next((name for name in names if _address_of(name, probe) == own), "")
    return ""


def _address_of(name: str, probe: socket.socket) -> str:
    import fcntl  # not on Windows

    with contextlib.suppress(OSError):  # it has none
        return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))[20:24])
    return ""
