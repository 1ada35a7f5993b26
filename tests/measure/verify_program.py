"""`overlay` with two experiments in the place of its own: the ranks of `ranks_worker.py`, twice.

`PATIENCE`, in seconds, is how long a row may take, and `AGAIN` how long ranks wait for each other after the first time;
`EXPERIMENTS` is how many there are; `DEVICES` stands for /dev.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from overlay import cli
from overlay.commands import verify as verify_command
from overlay.measure import gpus, verify
from overlay.measure.experiments import fsdp2
from overlay.measure.experiments.experiment import Row
from overlay.measure.experiments.table import Cell, Line


def lines(found: Mapping[str, Sequence[Row]]) -> list[Line]:
    """A line a case, whose cells are what the numbers of the ranks add up to."""
    return [
        Line("sums", row["case"], {kind: Cell(str(row["total"]), isinstance(row["total"], float))})
        for kind, rows in found.items()
        for row in rows
    ]


def main() -> None:
    verify.PATIENCE = float(os.environ.get("PATIENCE", "60"))
    verify.AGAIN = float(os.environ.get("AGAIN", "200"))
    stub = dataclasses.replace(
        fsdp2.EXPERIMENT, worker=Path(__file__).with_name("ranks_worker.py"), needs=("torch",), lines=lines
    )
    names = ("fsdp2", "zero3", "third", "fourth")[: int(os.environ.get("EXPERIMENTS", "2"))]
    verify.EXPERIMENTS = {name: dataclasses.replace(stub, name=name) for name in names}
    mock.patch.object(verify_command, "NAMES", tuple(verify.EXPERIMENTS)).start()
    gpus.DEVICES = Path(os.environ.get("DEVICES", gpus.DEVICES))
    cli.main()


if __name__ == "__main__":
    main()
