"""An experiment of no model: ranks that add numbers up, quickly, and one that fails as `STUB` says.

A worker as those of overlay/measure/experiments; `verify_program.py` has `overlay verify` run it in their place.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from overlay.measure import rows


@contextmanager
def alive() -> Iterator[None]:
    """Inside, who reads the rows is told so, several times a second."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(0.2):
            rows.alive()

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # before there is a fork


with alive():  # how long this takes, on a machine with other work, says nothing about the patience of who reads
    import torch
    import torch.distributed as dist

    from overlay.measure import group

STUB: dict[str, Any] = json.loads(os.environ.get("STUB", "{}"))
"""`cases`: how many; `gate`: a file, without which none begins after the first one; `case`, `rank`, `signal`: the rank
that sends itself a signal in a case, and fails; `late`: seconds by which the others have lost it before that; `early`:
the group in which that rank ends before it meets the others; `spawn`: instead of fork; `collective`, `heartbeat` and
`moment`: seconds."""

group.COLLECTIVE = timedelta(seconds=STUB.get("collective", 60))
group._HEARTBEAT = STUB.get("heartbeat", 20.0)
group._MOMENT = STUB.get("moment", 3.0)
if STUB.get("spawn"):
    group.start_method = lambda backend: "spawn"


def work(rank: int, world: int, put: Callable[[Any], None], cases: int) -> None:
    for case in range(cases):
        if (case, rank) == (STUB.get("case"), STUB.get("rank")):
            os.kill(os.getpid(), STUB["signal"])  # 0 is none
            if STUB.get("late"):
                dist.destroy_process_group()
                time.sleep(STUB["late"])
            raise ValueError("of this rank alone")
        found: dict[str, Any] = {"case": str(case), "pid": os.getpid()}
        try:
            total = torch.tensor([float(rank)])
            dist.all_reduce(total)
            found["total"] = total.item()
        except RuntimeError as error:
            found["total"] = type(error).__name__
            group.agreed(error)
        put(found)
        Path(os.environ["TMPDIR"], f"begun-{rank}-{os.getpid()}").touch()
        while not Path(STUB.get("gate", "/")).exists():
            time.sleep(0.05)
        time.sleep(0.05)


def main() -> None:
    told = rows.told()
    early = f"{STUB.get('early', -1):03}"
    if told["name"].startswith(early) and STUB["rank"] == int(os.environ["RANK"]):
        os.kill(os.getpid(), signal.SIGKILL)
    cases = STUB.get("cases", 3)
    rows.put({"torch": torch.__version__, "transformers": "5.99", "owed": [{"case": str(i)} for i in range(cases)]})
    group.train(
        told["ranks"], functools.partial(work, cases=cases), rows.put, told["backend"], told["name"], told["meeting"]
    )
    sys.stderr.flush()
    rows.done()


if __name__ == "__main__":
    main()
