"""Processes that train together over gloo, on one machine: the part that the workers here have in common."""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

Task = Callable[..., None]
"""What every rank runs, with its number, the number of ranks, and where rank 0 puts what it found."""


def train(worlds: Sequence[int], task: Task) -> list[Any]:
    """What rank 0 of each world put, world by world.

    Raises:
        SystemExit: a rank ended with an error.
    """
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ.update(GLOO_SOCKET_IFNAME=loopback[0], TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore")
    transformers.logging.set_verbosity_error()
    # A fork shares what is imported here; nothing has started a thread so far. Elsewhere a fork is not safe.
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    found: list[Any] = []
    for world in worlds:
        queue = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            # A rendezvous in a file needs no port that another process could take.
            started = [
                context.Process(target=_rank, args=(rank, world, f"{folder}/meeting", task, queue))
                for rank in range(world)
            ]
            for process in started:
                process.start()
            while (row := queue.get()) is not None:
                found.append(row)
            for process in started:
                process.join()
            if any(process.exitcode for process in started):
                sys.exit(f"a rank ended with {[process.exitcode for process in started]}")
    return found


def _rank(rank: int, world: int, meeting: str, task: Task, queue: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        task(rank, world, queue.put if rank == 0 else lambda row: None)
        dist.destroy_process_group()
    finally:
        if rank == 0:
            queue.put(None)
