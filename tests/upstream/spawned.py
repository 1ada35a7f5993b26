"""A plugin of pytest, with which the ranks that upstream's tests spawn run gloo's collectives on one thread.

The fault that two have is torch's (`overlay/measure/gloo.py`, of which a copy is beside the copy of this file).
"""

from collections.abc import Callable, Sequence
from typing import Any

import overlay_gloo
import torch.multiprocessing

_spawn = torch.multiprocessing.spawn


def pytest_configure() -> None:
    torch.multiprocessing.spawn = spawn


def spawn(fn: Callable[..., Any], args: Sequence[Any] = (), *more: Any, **named: Any) -> Any:
    return _spawn(rank, (fn, *args), *more, **named)


def rank(number: int, fn: Callable[..., Any], *args: Any) -> None:
    overlay_gloo.one_thread()
    fn(number, *args)
