"""The blocks of a model: what it repeats, and what a checkpoint is put around."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

_LAYER = "GradientCheckpointingLayer"


def find(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost layers of transformers, and items of lists of at least two modules with parameters, by name."""
    found: dict[str, nn.Module] = {}
    _walk("", model, found)
    return found


def rows(blocks: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """The names of blocks that lie in one list, in its order: the list's name -> theirs."""
    found: dict[str, list[str]] = {}
    for name in blocks:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _walk(path: str, module: nn.Module, found: dict[str, nn.Module]) -> None:
    for name, child in module.named_children():
        dotted = f"{path}.{name}" if path else name
        items = dict(child.named_children()) if isinstance(child, nn.ModuleList) else {}
        if is_layer(child):
            found[dotted] = child
        elif len(items) > 1 and all(any(True for _ in item.parameters()) for item in items.values()):
            found |= {f"{dotted}.{key}": item for key, item in items.items()}
        else:
            _walk(dotted, child, found)


def is_layer(module: nn.Module) -> bool:
    """Whether transformers checkpoints it by itself."""
    return any(base.__name__ == _LAYER for base in type(module).__mro__)


@contextmanager
def listening(
    model: nn.Module, blocks: Mapping[str, nn.Module], told: Callable[[str | None, bool], None]
) -> Iterator[None]:
    """Tells which block runs.

    A checkpoint saves its inputs when it is done, after the hooks of the block within it: so its function is listened
    to, not the block alone.

    Args:
        told: is called with a block's name and whether its checkpoint function is called, and with None at its end.
    """
    names = {block: name for name, block in blocks.items()}
    within: list[str] = []
    for inner in blocks:
        for module in blocks[inner].modules():
            names.setdefault(module, inner)

    def enter(name: str, checkpoint: bool) -> None:
        within.append(name)
        told(name, checkpoint)

    def leave() -> None:
        within.pop()
        told(within[-1] if within else None, False)

    def around(owner: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            name = names.get(_self(inner) or owner) or names.get(owner)
            if name is None:
                return function(inner, *args, **kwargs)
            enter(name, True)
            try:
                return function(inner, *args, **kwargs)
            finally:
                leave()

        return called

    functions = {
        module: vars(module)["_gradient_checkpointing_func"]
        for module in model.modules()
        if "_gradient_checkpointing_func" in vars(module)
    }
    handles = []
    for name, block in blocks.items():
        handles.append(block.register_forward_pre_hook(lambda *_, name=name: enter(name, False)))
        handles.append(block.register_forward_hook(lambda *_: leave(), always_call=True))
    try:
        for module, function in functions.items():
            vars(module)["_gradient_checkpointing_func"] = around(module, function)
        yield
    finally:
        for module, function in functions.items():
            vars(module)["_gradient_checkpointing_func"] = function
        for handle in handles:
            handle.remove()


class Recomputed:
    """What a backward runs again of the blocks: so a checkpoint is seen however it is called, as in a model of one's
    own that calls PyTorch's.

    Attributes:
        given: the arguments of each block, in the forward.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.given: dict[str, list[Tensor]] = {}
        self._blocks = blocks
        self._forward: dict[str, set[str]] = {}
        self._again: dict[str, set[str]] = {}

    @contextmanager
    def watched(self) -> Iterator[Callable[[], None]]:
        """Yields what is to be called between the forward and the backward."""
        running = self._forward

        def between() -> None:
            nonlocal running
            running = self._again

        def note(block: str, part: str, args: Any, kwargs: Any) -> None:
            running.setdefault(block, set()).add(part)
            if not part and running is self._forward:
                self.given[block] = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]

        # A recompute that stops early leaves out what comes last
        with ExitStack() as stack, set_checkpoint_early_stop(False):
            for block, module in self._blocks.items():
                for part, inner in module.named_modules():
                    noted = lambda _, args, kwargs, block=block, part=part: note(block, part, args, kwargs)  # noqa: E731
                    stack.callback(inner.register_forward_pre_hook(noted, with_kwargs=True).remove)
            yield between

    def whole(self) -> list[str]:
        """The blocks of which all modules with parameters ran again."""
        return [block for block in self._blocks if self._again.get(block) and self._is_whole(block)]

    def parts(self) -> dict[str, list[str]]:
        """The outermost modules that ran again, of blocks that did not as a whole."""
        found: dict[str, list[str]] = {}
        for block in self._blocks:
            again = self._again.get(block, set()) - {""}
            if again and not self._is_whole(block):
                found[block] = sorted(
                    part for part in again if not any(part.startswith(f"{other}.") for other in again)
                )
        return found

    def _is_whole(self, block: str) -> bool:
        return self._weighted(block, self._forward) == self._weighted(block, self._again)

    def _weighted(self, block: str, ran: Mapping[str, set[str]]) -> set[str]:
        """The modules that ran and have parameters of their own; of a block that has such modules, not itself, for its
        checkpoint may be within its `forward`."""
        made = {part: self._blocks[block].get_submodule(part) for part in ran.get(block, ())}
        found = {part for part, module in made.items() if any(True for _ in module.parameters(recurse=False))}
        return found - {""} or found


def _self(function: Any) -> Any:
    """The module whose method a checkpoint is put around."""
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "__self__", None)
    return found if isinstance(found, nn.Module) else None
