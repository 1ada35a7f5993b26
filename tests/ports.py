"""Ports of the loopback interface."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved() -> Iterator[int]:
    """A port that nothing else gets in the block, where a server may listen to it that has SO_REUSEADDR, as all have.

    A port that was free a moment ago may since be that of any connection; this one is bound, without a listener.
    """
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.bind(("127.0.0.1", 0))
        yield int(holding.getsockname()[1])
