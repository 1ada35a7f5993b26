"""Whether `torchrun`, or another launcher with the same variables, has started this process, and as which rank.

Standard library only: this is asked before torch is imported.
"""

import os
from dataclasses import dataclass

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


def found() -> Place | None:
    """This process's place, or None where nothing has launched it.

    Raises:
        OverlayError: a variable is no number, or one of them is missing.
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
        return Place(rank, world, int(os.environ.get("LOCAL_RANK", rank)))
    except ValueError:
        raise OverlayError(
            f"expected numbers in RANK, WORLD_SIZE and LOCAL_RANK, found {os.environ['RANK']!r}, "
            f"{os.environ['WORLD_SIZE']!r} and {os.environ.get('LOCAL_RANK', '')!r}: run this under torchrun"
        ) from None
