"""The gloo groups of ranks: what each of two has, which are told `train` or `together`."""

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlay.measure import gloo, group, ranks, rows
from overlay.measure.settings import Settings


def groups() -> list[dict[str, Any]]:
    """Of all ranks: `threads` for the collectives of a group, and of one more; seconds that the first one waits."""
    one = threads()
    gloo.one_thread()  # once more, which changes nothing
    dist.barrier(dist.new_group(range(dist.get_world_size())))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    own = {
        "one": one,
        "two": threads(),
        "timeout": backend.options._timeout / timedelta(seconds=1),
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def threads() -> int:
    for _ in range(4):
        dist.barrier()
        time.sleep(0.1)  # a thread that has just been started has no name yet
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")


def work(rank: int, world: int, put: Callable[[Any], None]) -> None:
    put(groups())


class Answers:
    def __init__(self, settings: Settings) -> None:
        pass

    def ask(self, what: str) -> Any:
        return groups()


def main() -> None:
    if rows.told() == "train":
        group.train([2], work, rows.put)
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            ranks.together(Settings("llama", ranks=2, threads=1), Answers, Path(folder)) as ask,
        ):
            rows.put(ask("groups"))
    rows.done()


if __name__ == "__main__":
    main()
