"""The changes that a block makes to what is outside of it."""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.in_place.values import Alias, Origin

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Change:
    """One statement that changes, in place, a tensor from outside of the block.

    Attributes:
        origin: the tensor.
        certain: False where it may be a copy that is changed (`hidden.float()`), or a view or a copy.
        module: the module whose code it is, by its dotted name in the block; empty for the block itself.
        statement: the code, in one line.
        file: where it is.
        line: from 1.
    """

    origin: Origin
    certain: bool
    module: str
    statement: str
    file: str
    line: int


class Recorder:
    """Collects changes, each statement and tensor once."""

    def __init__(self) -> None:
        self.found: dict[tuple[Origin, str, int], Change] = {}

    def add(self, alias: Alias, module: str, statement: str, file: str, line: int) -> None:
        """Takes a change down, the certain one where there are two."""
        key = alias.origin, file, line
        known = self.found.get(key)
        if known is None or (alias.certain and not known.certain):
            self.found[key] = Change(alias.origin, alias.certain, module, statement, file, line)


def changes(block: "nn.Module") -> list[Change]:
    """What a block's `forward`, as it is now, changes in place in training mode: arguments, and state of modules.

    Args:
        block: any module; nothing of it is changed, and no forward is run.

    Returns:
        The changes, in the order of the code; none where the source cannot be had or is not understood.
    """
    from overlay.in_place.interpreter import Interpreter

    recorder = Recorder()
    with suppress(Exception):  # code that nobody thought of is no finding, and must not stop a training run
        Interpreter(block, recorder).run()
    return list(recorder.found.values())
