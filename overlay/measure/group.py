"""Ranks that train together: processes of this machine, or those that `torchrun` has started, on several hosts too."""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from overlay.measure import launch
from overlay.measure.rows import end_with_parent

Task = Callable[[int, int, Callable[[Any], None]], None]
"""What every rank runs: with its number, the number of ranks, and where rank 0 puts what it found."""

COLLECTIVE = timedelta(seconds=60)
"""How long a rank waits for another within the work."""

MEETING = timedelta(hours=1)
"""How long the ranks of several hosts wait for each other before it: one of them may have an environment to make."""


def train(
    worlds: Sequence[int], task: Task, tell: Callable[[Any], None] | None = None, backend: str = "gloo", name: str = ""
) -> list[Any]:
    """What groups of ranks find with `task`, one group after the other; on a rank of `torchrun` but the first, nothing.

    Args:
        worlds: their numbers of ranks; with `torchrun` there is one group, of all ranks that it has started.
        tell: is told each row as it comes.
        backend: `gloo`, on the CPU, or `nccl`, with a GPU for each rank.
        name: that no other group has which the same `torchrun` starts.

    Raises:
        SystemExit: a rank ended with an error.
    """
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore")
    found: list[Any] = []

    def put(row: Any) -> None:
        found.append(row)
        if tell is not None:
            tell(row)

    place = launch.found()
    if place is not None:
        _launched(place, task, put if place.rank == 0 else _nowhere, backend, name)
        return found
    loopback = [interface for _, interface in socket.if_nameindex() if interface.startswith("lo")]
    os.environ.update(GLOO_SOCKET_IFNAME=loopback[0], NCCL_SOCKET_IFNAME=loopback[0])
    for world in worlds:
        _together(world, task, put, backend)
    return found


def _together(world: int, task: Task, put: Callable[[Any], None], backend: str) -> None:
    # A fork shares what is imported here; nothing has started a thread so far. Elsewhere, and with CUDA, a fork is not
    # safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" and backend == "gloo" else "spawn")
    found, finds = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="overlay-ranks-") as folder:
        # A rendezvous in a file needs no port that another process could take.
        meeting = f"file://{folder}/meeting"
        ranks = [
            context.Process(target=_started, args=(rank, world, meeting, task, backend, os.getpid(), finds))
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            finds.close()  # so that it ends with rank 0, which alone keeps it
            while (row := _next(found)) is not None:
                put(row)
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
        if any(process.exitcode for process in ranks):
            sys.exit(f"a rank ended with {[process.exitcode for process in ranks]}")


def _next(found: Any) -> Any:
    """The next row, or None where there are no more, or rank 0 has ended."""
    try:
        return found.recv()
    except EOFError:
        return None


def device(backend: str) -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _started(rank: int, world: int, meeting: str, task: Task, backend: str, parent: int, finds: Any) -> None:
    end_with_parent(parent)
    if rank:
        finds.close()
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world, timeout=COLLECTIVE)
    task(rank, world, _nowhere if rank else finds.send)
    dist.destroy_process_group()
    if rank == 0:
        finds.send(None)


def _nowhere(row: Any) -> None:
    pass


def _launched(place: launch.Place, task: Task, put: Callable[[Any], None], backend: str, name: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(place.local_rank)
    store = _meet(place, name)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=COLLECTIVE)
    task(place.rank, place.world, put)
    dist.destroy_process_group()
    # Where no `torchrun` keeps the store, rank 0 does, and goes last
    store.set(f"left/{place.rank}", "")
    if place.rank == 0:
        store.wait([f"left/{rank}" for rank in range(place.world)], COLLECTIVE)


def _meet(place: launch.Place, name: str) -> dist.Store:
    """A store that all ranks have, under a name of its own: one launch runs several groups, one after the other."""
    deadline = time.monotonic() + MEETING.total_seconds()
    while True:
        try:
            shared, _, _ = next(dist.rendezvous("env://", timeout=MEETING))
            store = dist.PrefixStore(f"overlay/{name}", shared)
            store.set(f"here/{place.rank}", "")
            store.wait([f"here/{rank}" for rank in range(place.world)], MEETING)
            return store
        except (dist.DistError, ConnectionError):  # the store of the group before, whose rank 0 was about to end
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
