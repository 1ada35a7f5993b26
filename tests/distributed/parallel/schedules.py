"""In which order a training step runs its micro-batches forward and backward, and the gradients that it ends with."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass
class Step:
    """What a schedule drives."""

    forward: Callable[[int], Tensor]
    """The loss of a micro-batch."""
    backward: Callable[[Tensor], None]
    without_synchronising: Callable[[], AbstractContextManager[None]]
    """Around a forward and its backward whose gradients are only added up on each rank."""


def forwards(count: int) -> Callable[[Step], None]:
    def schedule(step: Step) -> None:
        step.backward(torch.stack([step.forward(i) for i in range(count)]).sum())

    return schedule


def one_forward_one_backward(step: Step) -> None:
    """Pipeline parallelism's 1F1B, as its first of two stages sees it: two micro-batches are under way at a time."""
    waiting = [step.forward(0)]
    for i in range(1, 4):
        waiting.append(step.forward(i))
        step.backward(waiting.pop(0))
    step.backward(waiting.pop())


def accumulate(step: Step) -> None:
    for i in range(2):
        step.backward(step.forward(i))


def accumulate_without_synchronising(step: Step) -> None:
    with step.without_synchronising():
        step.backward(step.forward(0))
    step.backward(step.forward(1))


SCHEDULES: dict[str, Callable[[Step], None]] = {
    "1 forward": forwards(1),
    "2 forwards": forwards(2),
    "1F1B": one_forward_one_backward,
    "accumulation": accumulate,
    "accumulation without sync": accumulate_without_synchronising,
    "1 forward, next step": forwards(1),
}

Gradients = Sequence[Tensor | None]


def undivided(found: Gradients, shapes: Sequence[torch.Size]) -> Gradients:
    """Gradients as a whole model would have them, whose parameters have these shapes; every rank has to ask."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]
    by_rank: list[Gradients] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, [None if tensor is None else tensor.detach() for tensor in local])
    return [_joined(parts, shape) for *parts, shape in zip(*by_rank, shapes, strict=True)]


def _joined(parts: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
    if parts[0] is None or parts[0].shape == shape:  # none of the ranks has it, or all have all of it
        return parts[0]
    (dimension,) = (i for i, size in enumerate(shape) if parts[0].shape[i] != size)
    return torch.cat(parts, dimension)


def relative_error(found: Gradients, expected: Gradients) -> float:
    """0.0 where all are equal bit for bit, and nowhere else; a gradient that is missing on one side counts as zero."""
    difference = norm = 0.0
    equal = True
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None and theirs is None:
            continue
        ours, theirs = (tensor.double() if tensor is not None else torch.zeros(()) for tensor in (ours, theirs))
        equal &= torch.equal(ours, theirs)
        difference += float((ours - theirs).norm() ** 2)
        norm += float(theirs.norm() ** 2)
    return 0.0 if equal else max(math.sqrt(difference / norm), 1e-30) if norm else math.inf
