"""Collectives and bytes of a training step under FSDP2 (`fully_shard`), by formula.

The formulas are read from `torch/distributed/fsdp/_fully_shard` of torch 2.13; tests/distributed/test_scaling.py counts
the same with the profiler. They hold for a step whose forwards each run all the layers once, and all have part in one
backward. Where each forward has a backward of its own, a step is as many steps of one forward.
"""

import math
from dataclasses import dataclass
from typing import Literal

from overlay.errors import OverlayError

Checkpointing = Literal["none", "reentrant", "non-reentrant"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """What one call of `fully_shard` shards, and what is therefore communicated at once: a layer, or the root's rest.

    Args:
        trained: the shapes of the parameters that require gradients.
        frozen: the shapes of the others, which are gathered and not reduced.
    """

    trained: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()

    def gathered(self, ranks: int) -> int:
        """Numbers that an all-gather puts together."""
        return sum(_padded(shape, ranks) for shape in self.trained + self.frozen)

    def reduced(self, ranks: int) -> int:
        """Numbers that a reduce-scatter takes apart."""
        return sum(_padded(shape, ranks) for shape in self.trained)


def _padded(shape: Shape, ranks: int) -> int:
    """Each parameter is cut along its first dimension, which is filled up to a multiple of the ranks."""
    return math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:])


@dataclass(frozen=True)
class Sharded:
    """A model as `fully_shard` shards it: each layer, then the root, over one mesh of one dimension.

    Args:
        reshard_after_forward: as given to each `fully_shard`. None, the default there, is True for a layer and False
            for the root.
        gathered_bytes: of a number in an all-gather: the policy's `param_dtype`, or the parameters' own type.
        reduced_bytes: of a number in a reduce-scatter: the policy's `reduce_dtype`, or the gradients' own type, which
            is that of the all-gather.

    Raises:
        OverlayError: there is no rank.
    """

    layers: tuple[Unit, ...]
    root: Unit
    ranks: int
    reshard_after_forward: bool | None = None
    gathered_bytes: int = 4
    reduced_bytes: int = 4

    def __post_init__(self) -> None:
        _at_least_one("ranks", self.ranks)


@dataclass(frozen=True)
class Collectives:
    """Of one step, on each rank.

    Args:
        gathered: bytes of what the all-gathers put together, padding and the rank's own shard included.
        reduced: bytes of what the reduce-scatters take apart, the same.
    """

    ranks: int
    all_gathers: int
    reduce_scatters: int
    gathered: int
    reduced: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, and as many that it receives, with the ring algorithm: (ranks - 1) / ranks of it."""
        return (self.gathered + self.reduced) * (self.ranks - 1) // self.ranks

    def seconds(self, bandwidth: float) -> float:
        """How long the step's collectives take, of which FSDP2 hides a part behind the computation.

        Args:
            bandwidth: bytes per second that a rank sends while it receives as many ("bus bandwidth" of nccl-tests). How
                long it takes until a collective starts is left out.
        """
        return self.sent / bandwidth


def collectives(
    model: Sharded, checkpointing: Checkpointing, forwards: int = 1, hooks: Literal["outside", "inside"] = "outside"
) -> Collectives:
    """What one step communicates.

    A group of one rank communicates nothing: FSDP2 copies instead.

    Args:
        forwards: before the one backward.
        hooks: where the hooks of a layer run, outside of its checkpoint (this project; transformers from 5.23 on) or
            inside (before). Inside, a reentrant step of two or more forwards loses gradients: this is what it
            communicates from the second step on.

    Raises:
        OverlayError: there is no forward.
    """
    _at_least_one("forwards", forwards)
    if model.ranks == 1:
        return Collectives(1, 0, 0, 0, 0)
    reshards = model.reshard_after_forward is not False
    gathers, reduces = (2 * forwards if reshards else forwards), 1
    if checkpointing == "reentrant":
        if hooks == "outside":
            reduces = forwards
        elif forwards > 1:
            gathers = forwards + 1 if reshards else 1
    of_root = forwards + 1 if model.reshard_after_forward else 1
    trained = [layer for layer in model.layers if layer.trained]
    gathered = gathers * sum(layer.gathered(model.ranks) for layer in model.layers)
    reduced = reduces * sum(layer.reduced(model.ranks) for layer in trained)
    return Collectives(
        model.ranks,
        all_gathers=gathers * len(model.layers) + of_root,
        reduce_scatters=reduces * len(trained) + bool(model.root.trained),
        gathered=(gathered + of_root * model.root.gathered(model.ranks)) * model.gathered_bytes,
        reduced=(reduced + model.root.reduced(model.ranks)) * model.reduced_bytes,
    )


def whole_gradients(model: Sharded, checkpointing: Checkpointing, forwards: int = 1) -> int:
    """Bytes of the unsharded gradients that a rank holds at the worst moment of the backward, about.

    With two or more forwards autograd keeps the gradients of the last one until those of the first are there to be
    added, and FSDP2 has nothing to reduce before that: a whole model's gradients on every rank. A reentrant checkpoint
    hands over each forward's by themselves. Those of the root are there until the backward ends.

    What is just being computed comes on top, less than a layer's. With one forward the root's are counted in full,
    although the embedding's come when the layers' are gone.

    Raises:
        OverlayError: there is no forward.
    """
    _at_least_one("forwards", forwards)
    layers = [layer.reduced(1) for layer in model.layers]
    by_themselves = forwards == 1 or checkpointing == "reentrant"
    held = max(layers, default=0) if by_themselves else sum(layers)
    return (held + model.root.reduced(1)) * model.gathered_bytes


def _at_least_one(what: str, number: int) -> None:
    if number < 1:
        raise OverlayError(f"expected one or more {what}, found {number}")
