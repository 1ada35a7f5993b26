"""Whether `torchrun`, or another launcher with the same variables, has started this process, and as which rank.

Standard library only: this is asked before torch is imported.
"""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What PyTorch's `env://` asks for: https://docs.pytorch.org/docs/stable/distributed.html."""


@dataclass(frozen=True)
class Place:
    """A process among those that were launched together.

    Attributes:
        rank: among all, from 0 on.
        world: how many there are.
        local_rank: among those of this host, which its GPUs are counted by.
    """

    rank: int
    world: int
    local_rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def found() -> Place | None:
    """This process's place, or None where nothing has launched it.

    Raises:
        OverlayError: one of them is missing, is no number, or they do not go together.
    """
    if not all(name in os.environ for name in _VARIABLES[:2]):
        return None
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise OverlayError(
            f"expected {', '.join(_VARIABLES)}, as torchrun sets them, found no {missing[0]}: run this under torchrun, "
            "or unset RANK and WORLD_SIZE"
        )
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        if 0 <= rank < world and 0 <= local_rank < world:
            return Place(rank, world, local_rank)
    except ValueError:
        pass
    raise OverlayError(
        f"expected a RANK and a LOCAL_RANK from 0 to below WORLD_SIZE, found {os.environ['RANK']!r}, "
        f"{os.environ.get('LOCAL_RANK', '')!r} and {os.environ['WORLD_SIZE']!r}: run this under torchrun, or unset "
        "RANK and WORLD_SIZE"
    )


def address_towards(host: str) -> str:
    """The address of this machine from which a packet to `host` would go out; none is sent.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an address (on Linux), or None where that cannot be told."""
    if ":" in address:
        return _interface_of_ipv6(socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex())
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if found[20:24] == wanted:
                return name
    return None


_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address is in bytes 20 to 23 of the answer."""


def _interface_of_ipv6(wanted: str) -> str | None:
    try:
        table = [line.split() for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines()]
    except OSError:
        return None
    return next((line[5] for line in table if line[0] == wanted), None)
