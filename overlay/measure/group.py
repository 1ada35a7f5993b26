"""Ranks that train together: processes of this machine, or those that `torchrun` has started, on several hosts too."""

import contextlib
import ipaddress
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from overlay.measure import gloo, gpus, launch, rows

Task = Callable[[int, int, Callable[[Any], None]], None]
"""What every rank runs: with its number, the number of ranks, and where it puts what it found; rank 0's is kept.

Where one of its cases ends in an error, it calls `agreed` before it goes on.
"""

COLLECTIVE = timedelta(seconds=60)
"""How long a rank waits for another within the work."""

_HEARTBEAT = 20.0
"""Seconds; far less than a reader of rows waits."""

_LOST = "another rank has ended, or hangs"
_MOMENT = 3.0
"""Seconds in which a rank that others have lost has ended: it closes its connections a little before."""


def train(
    worlds: Sequence[int],
    task: Task,
    tell: Callable[[Any], None] | None = None,
    backend: str = "gloo",
    name: str = "",
    meeting: float = 300,
) -> list[Any]:
    """What groups of ranks find with `task`, one group after the other; with a launcher, what this rank finds.

    Args:
        worlds: their numbers of ranks; with `torchrun` there is one group, of all ranks that it has started.
        tell: is told each row as it comes.
        backend: `gloo`, on the CPU, or `nccl`, with a GPU for each rank.
        name: that no other group has which the same `torchrun` starts; later ones sort behind it.
        meeting: seconds that the ranks of `torchrun` wait for each other before the work. Where one does not come, who
            reads the rows is told (`rows.lost`), and ends this process.

    Raises:
        SystemExit: a rank ended with an error, or there is no GPU for each; says so.
    """
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore")
    found: list[Any] = []

    def put(row: Any) -> None:
        found.append(row)
        if tell is not None:
            tell(row)

    place = launch.found()
    if backend == "nccl":
        _expect_gpus(max(worlds) if place is None else place.local_rank + 1)
    if place is not None:
        _launched(place, task, put, backend, name, meeting)
        return found
    meet_on_this_machine()
    for world in worlds:
        _together(world, task, put, backend)
    return found


def _expect_gpus(ranks: int) -> None:
    if not dist.is_nccl_available():
        rows.refuse(
            f"--backend nccl: expected a torch with NCCL, found {torch.__version__} in {sys.prefix}: run this with "
            "--here under the Python that trains, or leave --backend out"
        )
    if (found := torch.cuda.device_count()) < ranks:
        rows.refuse(gpus.lacking(ranks, f"{found or 'none'} with torch {torch.__version__}"))


def meet_on_this_machine() -> None:
    """Has ranks that start from here on use the loopback interface, whatever this machine's name leads to."""
    loopback = [interface for _, interface in socket.if_nameindex() if interface.startswith("lo")]
    os.environ.update(GLOO_SOCKET_IFNAME=loopback[0], NCCL_SOCKET_IFNAME=loopback[0])


def start_method(backend: str) -> str:
    """How ranks are started: by a fork, which shares what is imported here, where nothing has started a thread so far.
    Elsewhere than on Linux, and with CUDA, a fork is not safe."""
    return "fork" if sys.platform == "linux" and backend == "gloo" else "spawn"


def _together(world: int, task: Task, put: Callable[[Any], None], backend: str) -> None:
    context = multiprocessing.get_context(start_method(backend))
    found, finds = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="overlay-ranks-") as folder:
        ranks = [
            context.Process(target=_started, args=(rank, world, Path(folder), task, backend, os.getpid(), finds))
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            finds.close()  # so that it ends with rank 0, which alone keeps it
            _follow(ranks, Path(folder), found, put)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()


def _follow(ranks: Sequence[Any], folder: Path, found: Any, put: Callable[[Any], None]) -> None:
    """Until all ranks have ended.

    Raises:
        SystemExit: as soon as one of them has ended with an error; says of the first one what that was, and where that
            is no more than that it has lost another, of that one.
    """
    running, more, lost = dict(enumerate(ranks)), True, ""
    while more or running:
        waits = [*([found] if more else []), *(process.sentinel for process in running.values())]
        ready = connection.wait(waits, _MOMENT if lost else None)
        if not ready:
            break
        if found in ready:
            row = _next(found)
            more = row is not None
            if more:
                put(row)
            continue
        ended = {rank: process for rank, process in running.items() if process.sentinel in ready}
        for rank, process in ended.items():
            process.join()
            del running[rank]
        # A rank that was killed leaves no word, and is why others fail
        words = {rank: folder / f"error-{rank}" for rank, process in ended.items() if process.exitcode}
        if silent := [rank for rank, word in words.items() if not word.exists()]:
            sys.exit(f"rank {silent[0]} {rows.how(ended[silent[0]].exitcode)}")
        for word in sorted(words.values(), key=lambda word: word.stat().st_mtime_ns):
            said = word.read_text("utf-8")
            if not said.startswith(_LOST):
                sys.exit(said)
            lost = lost or said
    if lost:
        sys.exit(lost)


def _next(found: Any) -> Any:
    """The next row, or None where there are no more, or rank 0 has ended."""
    try:
        return found.recv()
    except EOFError:
        return None


def device(backend: str) -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def local_rank(rank: int) -> int:
    """The number of a rank among those of its machine."""
    place = launch.found()
    return rank if place is None else place.local_rank


def agreed(error: Exception) -> None:
    """On all ranks after an error of a case: it came of the case, and not of a rank that has gone.

    Raises:
        SystemExit: there is no reaching the other ranks; says so.
    """
    try:
        dist.barrier()
    except RuntimeError:
        said = re.sub(r"\[\S+:\d+\] ", "", str(error))  # where that is in the sources of gloo
        sys.exit(f"{_LOST}: {said}")


def _started(rank: int, world: int, folder: Path, task: Task, backend: str, parent: int, finds: Any) -> None:
    try:
        _take_part(rank, world, folder, task, backend, parent, finds)
    except BaseException as error:
        said = str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        (folder / f"error-{rank}").write_text(said, "utf-8")
        raise


def _take_part(rank: int, world: int, folder: Path, task: Task, backend: str, parent: int, finds: Any) -> None:
    rows.end_with_parent(parent)
    if rank:
        finds.close()
    torch.set_num_threads(1)
    gloo.one_thread()
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meeting",  # needs no port that another process could take
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE,
        device_id=_own_gpu(rank) if backend == "nccl" else None,
    )
    task(rank, world, _nowhere if rank else finds.send)
    dist.destroy_process_group()
    if rank == 0:
        finds.send(None)


def _own_gpu(number: int) -> torch.device:
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _nowhere(row: Any) -> None:
    pass


def _launched(
    place: launch.Place, task: Task, put: Callable[[Any], None], backend: str, name: str, meeting: float
) -> None:
    torch.set_num_threads(1)
    missing = [f"rank 0, at {os.environ['MASTER_ADDR']}," if place.rank else "the other ranks"]
    with _alive(place, missing, meeting):
        store = _meet(place, name, missing, timedelta(seconds=meeting))
        if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:
            _choose_interface(place, store)
    rows.met()
    gloo.one_thread()
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=COLLECTIVE,
        device_id=_own_gpu(place.local_rank) if backend == "nccl" else None,
    )
    task(place.rank, place.world, put)
    dist.destroy_process_group()
    # Where no `torchrun` keeps the store, rank 0 does, and goes last
    store.set(f"left/{place.rank}", "")
    if place.rank == 0:
        store.wait([f"left/{rank}" for rank in range(place.world)], COLLECTIVE)


@contextlib.contextmanager
def _alive(place: launch.Place, missing: Sequence[str], meeting: float) -> Iterator[None]:
    """Who reads the rows is told that this rank waits, and, of rank 0, for whom; after `meeting` seconds, that these
    are lost. That is not left to who waits: it may hang in a connection to a host that is gone.

    Args:
        missing: who has not come so far.
    """
    over = threading.Event()
    deadline = time.monotonic() + meeting
    limit = f"{meeting / 60:.0f} min" if meeting >= 60 else f"{meeting:.0f} s"

    def tell() -> None:
        while not over.wait(max(0.0, min(_HEARTBEAT, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                rows.lost(f"{missing[0]} did not come within {limit}: ended, or cannot be reached")
                return
            rows.alive("" if place.rank else f"waiting for {missing[0]} (at most {limit}; Ctrl-C ends it)")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _meet(place: launch.Place, name: str, missing: list[str], meeting: timedelta) -> dist.Store:
    """A store that all ranks have, under a name of its own: one launch runs several groups, one after the other.

    Args:
        missing: gets who has not come so far.

    Raises:
        SystemExit: a rank has gone on to a later group, for this one failed there.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives the processes of the one before
    while True:
        try:
            shared, _, _ = next(dist.rendezvous("env://", timeout=meeting))
            store = dist.PrefixStore(f"overlay/{attempt}", shared)
            own = dist.PrefixStore(name, store)
            store.set(f"at/{place.rank}", name)
            own.set(f"here/{place.rank}", "")
            while absent := [rank for rank in range(place.world) if not own.check([f"here/{rank}"])]:
                missing[:] = [f"rank {absent[0]}"]
                for rank in absent:
                    if store.check([f"at/{rank}"]) and (at := store.get(f"at/{rank}").decode()) > name:
                        sys.exit(f"rank {rank} could not take part, and is at {at} by now: see what it said")
                time.sleep(0.1)
            return own
        except (dist.DistError, ConnectionError):  # the store of the group before, whose rank 0 was about to end
            time.sleep(0.5)


def _choose_interface(place: launch.Place, store: dist.Store) -> None:
    """Has gloo use the interface by which the ranks have met. By itself it takes the one that has the address of this
    host's name, which may be the loopback interface's, or unreachable from other hosts."""
    address = launch.address_towards(os.environ["MASTER_ADDR"])
    store.set(f"address/{place.rank}", address)
    if ipaddress.ip_address(address).is_loopback:  # MASTER_ADDR is this host, by a name that it has for itself
        found = [store.get(f"address/{rank}").decode() for rank in range(place.world)]
        if elsewhere := [other for other in found if not ipaddress.ip_address(other).is_loopback]:
            address = launch.address_towards(elsewhere[0])
    if interface := launch.interface_of(address):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
