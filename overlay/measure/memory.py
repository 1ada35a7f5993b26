"""Bytes that are alive in a step, from the events of PyTorch's own allocators, and what autograd has saved.

The profiler reports each allocation of tensor memory, that of operators' scratch and of compiled code too, with its
exact size on the CPU; on CUDA sizes are those of the allocator's blocks. So nothing is sampled, and nothing is missed
that a mode of dispatch does not see.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "overlay: "
"""How the names of our own events begin."""

POINTS = 200
"""Of a curve in a card."""


@dataclass(frozen=True)
class Curve:
    """Bytes beyond what was there before the step.

    Attributes:
        peak: the most at any time.
        left: at the end.
        gradients_at_peak: bytes of gradients that were there at the peak.
        times: seconds since the beginning.
        bytes: at those times; the peak is one of them.
        phases: the name of a phase -> when it began, in seconds.
    """

    peak: int
    left: int
    gradients_at_peak: int
    times: list[float]
    bytes: list[int]
    phases: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def phase(name: str) -> Any:
    """A context that names what runs in it, in a curve."""
    return record_function(f"{MARK}{name}")


def watch_gradients(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Has each gradient noted in a curve as it is there; returns what takes that back."""

    def noted(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        storage = local(parameter.grad).untyped_storage()
        if storage.data_ptr() not in seen:  # FSDP2 has those of a group in one
            seen.add(storage.data_ptr())
            with record_function(f"{MARK}gradient {storage.nbytes()}"):
                pass

    seen: set[int] = set()
    handles = [one.register_post_accumulate_grad_hook(noted) for one in parameters if one.requires_grad and one.is_leaf]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def curve(step: Callable[[], object], device: str) -> Curve:
    """What a step allocates. Nothing that it frees may be older than the step, gradients for instance.

    Args:
        device: `cpu` or `cuda`, whose allocator is looked at.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    allocations: list[tuple[int, int]] = []
    gradients: list[tuple[int, int]] = []
    phases: list[tuple[int, str]] = []
    for event in _events(profiled.profiler.kineto_results.experimental_event_tree()):
        fields = event.extra_fields
        if type(fields).__name__.endswith("Allocation"):
            if str(fields.device).partition(":")[0] == device:
                allocations.append((event.start_time_ns, fields.alloc_size))
        elif event.name.startswith(MARK):
            name = event.name.removeprefix(MARK)
            if name.startswith("gradient "):
                gradients.append((event.start_time_ns, int(name.removeprefix("gradient "))))
            else:
                phases.append((event.start_time_ns, name))
    return _curve(sorted(allocations, key=lambda one: one[0]), sorted(gradients), sorted(phases))


def _events(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def _curve(
    allocations: list[tuple[int, int]], gradients: list[tuple[int, int]], phases: list[tuple[int, str]]
) -> Curve:
    if not allocations:
        return Curve(0, 0, 0, [0.0], [0], {})
    live = peak = 0
    at_peak = begin = allocations[0][0]
    totals = []
    for time, size in allocations:
        live += size
        totals.append((time, live))
        if live > peak:
            peak, at_peak = live, time
    span = max(1, totals[-1][0] - begin)
    most: dict[int, tuple[int, int]] = {}
    for time, total in totals:  # the most in each part, so that no peak is lost
        part = (time - begin) * POINTS // (span + 1)
        if part not in most or total > most[part][1]:
            most[part] = time, total
    kept = [*most.values(), totals[-1]]
    named = {name: round((time - begin) / 1e9, 6) for time, name in reversed(phases)}
    return Curve(
        peak,
        live,
        sum(size for time, size in gradients if time <= at_peak),
        [round((time - begin) / 1e9, 6) for time, _ in kept],
        [total for _, total in kept],
        dict(sorted(named.items(), key=lambda one: one[1])),
    )


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, each counted once; of a sharded tensor, this rank's shard."""
    found: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        if tensor is not None:
            storage = local(tensor).untyped_storage()
            found[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; another tensor itself."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def optimizer_state(optimizer: Any) -> list[Tensor]:
    """The tensors that an optimizer keeps between steps."""
    return [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]


class Saved:
    """Bytes that autograd holds for the backward, parameters and buffers apart, by the block that saved them first.

    `within` says what block runs now; None stands for what is outside of the blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.by_block: dict[str | None, int] = {}
        self.block: str | None = None
        self._model = model
        self._seen = self._weights()
        self._sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        self._kept: list[Tensor] = []
        self._outside: dict[int, int] = {}

    def hooks(self) -> Any:
        """The context to run a forward in."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _weights(self) -> set[int]:
        return {
            local(tensor).untyped_storage().data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())
        }

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if self._sharded and storage.data_ptr() in self._weights():  # FSDP2 exchanges them for each layer's call
            return tensor
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._kept.append(tensor)  # so that no other storage comes to lie where this one was
            self.by_block[self.block] = self.by_block.get(self.block, 0) + storage.nbytes()
            if self.block is None:
                self._outside[storage.data_ptr()] = storage.nbytes()
        return tensor

    def claim(self, block: str, given: Iterable[Tensor]) -> None:
        """Counts what was saved outside of the blocks and was given to this one as its own: a checkpoint around it,
        which nothing tells of, has saved it before the block ran, or after."""
        for tensor in given:
            size = self._outside.pop(local(tensor).untyped_storage().data_ptr(), 0)
            self.by_block[None] = self.by_block.get(None, 0) - size
            self.by_block[block] = self.by_block.get(block, 0) + size


def allocator_peak(step: Callable[[], object]) -> int:
    """The most bytes that CUDA's allocator has given out in a step, with all that was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())
