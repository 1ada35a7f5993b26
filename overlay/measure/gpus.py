"""Whether there is a GPU for each rank. Standard library only: asked before an environment with torch is made."""

import sys
from pathlib import Path

from overlay.errors import OverlayError

DEVICES = Path("/dev")


def expect(ranks: int) -> None:
    """Where the kernel of this machine can tell. The worker asks torch again, which may be a build for the CPU.

    Raises:
        OverlayError: there are fewer GPUs than `ranks`.
    """
    # `dxg` is Windows' own under WSL, `kfd` AMD's; neither says how many there are
    if sys.platform == "linux" and not any((DEVICES / name).exists() for name in ("dxg", "kfd")):
        found = len([path for path in DEVICES.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()])
        if found < ranks:
            raise OverlayError(lacking(ranks, str(found or "none")))


def lacking(ranks: int, found: str) -> str:
    """What is said of it."""
    return (
        f"--backend nccl: expected {ranks} GPU{'s' * (ranks > 1)} here, one for each rank, found {found}: take fewer "
        "ranks (--ranks), or leave --backend out"
    )
