"""The blocks of a model: what it repeats, and what a checkpoint is put around."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

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


def _self(function: Any) -> Any:
    """The module whose method a checkpoint is put around."""
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "__self__", None)
    return found if isinstance(found, nn.Module) else None
