"""Groups of gloo with one thread for their collectives, where torch starts two.

After a collective, its thread assigns the collective's name to a `std::string` of the group (`lastCompletedWorkName`,
in torch's `ProcessGroupGloo::runLoop`), and no lock keeps the two apart. A name of more than 15 characters is on the
heap: both may free the same one, and the process is killed there or later, by SIGSEGV, or by SIGABRT with `malloc():
unaligned tcache chunk detected`. `DTensor.full_tensor` runs a collective with such a name, `ALLGATHER_COALESCED`. Seen
with torch 2.11, 2.13 and 2.14.

Imports torch alone, for ranks that have nothing else of this project.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def one_thread() -> None:
    """Has each group of gloo that this process makes from here on run its collectives on one thread."""
    if not dist.is_gloo_available():
        return
    kind = dist.ProcessGroupGloo
    make = kind.__init__
    if make.__module__ == __name__:  # it has been called before
        return

    # torch gives a group no options of the caller's, whatever `pg_options` is
    def make_with_one(
        self: Any, store: Any, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout, **more: Any
    ) -> None:
        options = kind._Options()
        options._threads = 1
        options._timeout = timeout
        names = os.environ.get("GLOO_SOCKET_IFNAME")  # which a default device does not go by
        options._devices = (
            [kind.create_device(interface=name) for name in names.split(",")]
            if names
            else [kind.create_default_device()]
        )
        for name, value in more.items():
            setattr(options, name, value)
        make(self, store, rank, size, options)

    kind.__init__ = make_with_one
