# SPDX-License-Identifier: Apache-2.0
"""This host's network interfaces, and whether a variable that chooses among them for NCCL names one."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

__all__ = ["interfaces", "unlike_interfaces"]

_NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def interfaces() -> dict[str, str]:
    """Return the names of this host's network interfaces by their IPv4 addresses. Local."""
    try:
        from fcntl import ioctl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = ioctl(link, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def unlike_interfaces() -> str:
    """Return why NCCL finds no interface by NCCL_SOCKET_IFNAME on this host, "" if it does or may choose. Local.

    The variable has beginnings of names, after "=" whole names, after "^" what NCCL leaves out.
    Source: NCCL's user guide, environment variables.
    """
    given = os.environ.get(_NCCL_INTERFACES, "")
    wanted = [each for each in given.lstrip("^=").split(",") if each]
    with suppress(OSError):
        there = [name for _, name in socket.if_nameindex()]
        named = {
            name
            for name in there
            for each in wanted
            if (name == each if given.lstrip("^").startswith("=") else name.startswith(each))
        }
        left = [name for name in there if (name in named) is not given.startswith("^")]
        if wanted and not left:
            return (
                f"{_NCCL_INTERFACES}={given} leaves NCCL no network interface of {socket.gethostname()}, "
                f"which has {', '.join(there)}"
            )
    return ""
