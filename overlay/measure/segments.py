"""One checkpoint around several blocks that follow one another.

A model calls its blocks by itself, and hands on what it likes between them. So the calls are looked at once, to know
where each tensor that a block is called with comes from: the first call of its segment, or an earlier block in it.
Then the last block's call of a segment does the work of all of them, under one checkpoint, and the calls before it hand
their first argument on. Where a tensor comes from elsewhere the blocks cannot be grouped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

Restore = Callable[[], None]


class NoSegmentError(Exception):
    """Blocks that cannot be grouped: says why."""


@dataclass(frozen=True)
class _Place:
    """A tensor of the arguments or the results of a call.

    `call` is the position of the block in its segment; -1 stands for the arguments of the first call.
    """

    call: int
    leaf: int


@dataclass
class _Call:
    """One block's call, as it was looked at."""

    arguments: list[Any]
    result: list[Any]
    result_spec: Any


def group(rows: Sequence[Sequence[nn.Module]], size: int, run: Callable[[], object]) -> Restore:
    """Puts segments of `size` blocks under one checkpoint each, non-reentrant; returns what takes that back.

    Args:
        rows: lists of blocks, each in the order in which the model calls them, none of them checkpointed. One that the
            model does not call at all stays as it is.
        size: blocks in a segment; the last one of a row may have fewer.
        run: runs a forward, to look at.

    Raises:
        NoSegmentError: something is computed between the blocks, or they are called otherwise than once each.
    """
    looked_at = _look([block for row in rows for block in row], run)
    rows = [row for row in rows if any(looked_at[block] for block in row)]
    if any(len(looked_at[block]) != 1 for row in rows for block in row):
        raise NoSegmentError("the model does not call each block once in a forward")
    replaced: list[nn.Module] = []

    def restore() -> None:
        for block in replaced:
            vars(block).pop("forward", None)

    try:
        for row in rows:
            for start in range(0, len(row), size):
                blocks = row[start : start + size]
                segment = _Segment(blocks, [looked_at[block][0] for block in blocks])
                for i, block in enumerate(blocks):
                    vars(block)["forward"] = segment.call(i)
                    replaced.append(block)
    except BaseException:
        restore()
        raise
    return restore


def _look(blocks: Sequence[nn.Module], run: Callable[[], object]) -> Mapping[nn.Module, Sequence[_Call]]:
    calls: dict[nn.Module, list[_Call]] = {block: [] for block in blocks}

    def note(block: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        leaves, spec = tree_flatten(result)
        calls[block].append(_Call(tree_flatten((args, kwargs))[0], leaves, spec))

    handles = [block.register_forward_hook(note, with_kwargs=True) for block in blocks]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _Segment:
    """Blocks under one checkpoint. It keeps where tensors come from, and none of those that were looked at."""

    def __init__(self, blocks: Sequence[nn.Module], calls: Sequence[_Call]) -> None:
        self.blocks = blocks
        self.forwards = [block.forward for block in blocks]
        self.templates = [self._template(i, calls) for i in range(len(blocks))]
        # What is no tensor stays; None stands for a tensor
        self.results = [
            ([None if isinstance(leaf, Tensor) else (leaf,) for leaf in call.result], call.result_spec)
            for call in calls
        ]
        self.first: tuple[Any, Any] | None = None

    def _template(self, i: int, calls: Sequence[_Call]) -> list[_Place | None]:
        """Where each tensor comes from that a block is called with; None for what is no tensor."""
        places = {id(leaf): _Place(-1, j) for j, leaf in enumerate(calls[0].arguments) if isinstance(leaf, Tensor)}
        for j, call in enumerate(calls[:i]):
            places |= {id(leaf): _Place(j, k) for k, leaf in enumerate(call.result) if isinstance(leaf, Tensor)}
        found: list[_Place | None] = []
        for leaf in calls[i].arguments:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                raise NoSegmentError(
                    f"a tensor of shape {tuple(leaf.shape)} is computed between the blocks, not within them"
                )
            found.append(places[id(leaf)] if isinstance(leaf, Tensor) else None)
        return found

    def call(self, i: int) -> Callable[..., Any]:
        """The `forward` that a block gets in the place of its own."""
        last = i == len(self.blocks) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            begun, self.first = self.first, None
            if (i == 0) != (begun is None) or (begun is not None and len(begun[1]) != i):
                raise NoSegmentError("the model leaves a block out in some forwards, at random")
            first, later = begun or (leaves, [])
            later.append((leaves, spec))
            if not last:
                self.first = (first, later)
                stand_in = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
                kept, result_spec = self.results[i]
                return tree_unflatten([stand_in if one is None else one[0] for one in kept], result_spec)
            plain = [(self._plain(leaves), spec) for leaves, spec in later]
            return checkpoint(self._run, plain, *first, use_reentrant=False)

        return forward

    @staticmethod
    def _plain(leaves: Sequence[Any]) -> list[Any]:
        return [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _run(self, called: Sequence[tuple[list[Any], Any]], *first: Any) -> Any:
        results: list[list[Any]] = []
        result: Any = None
        for forward, template, (plain, spec) in zip(self.forwards, self.templates, called, strict=True):
            leaves = [
                kept if place is None else first[place.leaf] if place.call < 0 else results[place.call][place.leaf]
                for place, kept in zip(template, plain, strict=True)
            ]
            args, kwargs = tree_unflatten(leaves, spec)
            result = forward(*args, **kwargs)
            results.append(tree_flatten(result)[0])
        return result
