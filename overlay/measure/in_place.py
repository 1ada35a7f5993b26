"""In-place operations on a block's arguments, parameters and buffers, seen while a forward runs.

`overlay.in_place` reads the source, and says nothing of code that it cannot follow. This looks at the operators, and
names the module and the line of the one that writes.
"""

import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlay.checks.finding import Finding

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Change:
    """An operator that wrote into what a block was given.

    Attributes:
        module: whose forward ran, by its name in the model.
        kind: `argument`, `parameter` or `buffer`.
        operator: PyTorch's name of it.
        line: `file:line`.
        statement: the code there.
    """

    module: str
    kind: str
    operator: str
    line: str
    statement: str

    def finding(self) -> Finding:
        """As the checks tell it."""
        return Finding(
            "in-place-operation",
            "warning" if self.kind == "buffer" else "error",
            self.module,
            f"`{self.statement}` ({self.operator}) changes its {self.kind} in place ({self.line})",
            "the recompute starts from the change: backward raises RuntimeError, or gradients are wrong, silently",
            "write it out of place (`x = x + y`), or change a copy (`x.clone()`)",
        )


def changes(model: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[], object]) -> list[Change]:
    """What a forward changes in place of what its blocks are given.

    Args:
        run: runs the forward.
    """
    watch = _Watch()
    with ExitStack() as stack:
        for name, block in blocks.items():
            for inner, module in block.named_modules():
                dotted = f"{name}.{inner}" if inner else name
                given = {} if inner else _state(block)
                before = module.register_forward_pre_hook(watch.entering(dotted, given), with_kwargs=True)
                after = module.register_forward_hook(watch.leaving(block=not inner), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        with watch:
            run()
    return list(watch.found.values())


def _state(block: nn.Module) -> dict[int, str]:
    return {_storage(one): "parameter" for one in block.parameters()} | {
        _storage(one): "buffer" for one in block.buffers()
    }


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # one without a storage
        return 0


class _Watch(TorchDispatchMode):
    """Notes operators that write into a storage that the block which runs was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, str] = {}
        self.modules: list[str] = []
        self.found: dict[tuple[str, str], Change] = {}

    def entering(self, name: str, state: Mapping[int, str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.modules.append(name)
            if state or not self.given:
                arguments = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
                self.given = {**state, **{_storage(one): "argument" for one in arguments}}
                self.given.pop(0, None)

        return hook

    def leaving(self, *, block: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.modules.pop()
            if block:
                self.given = {}

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.given and func._schema.is_mutable:
            named = {argument.name: argument for argument in func._schema.arguments}
            for name, value in (*zip(named, args, strict=False), *(kwargs or {}).items()):
                if named[name].alias_info is None or not named[name].alias_info.is_write:
                    continue
                for one in tree_leaves(value):  # some take lists
                    if isinstance(one, Tensor) and (kind := self.given.get(_storage(one))):
                        self._note(kind, str(func))
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, operator: str) -> None:
        frames = traceback.extract_stack()
        frame = next((one for one in reversed(frames) if not one.filename.startswith(_OWN)), frames[0])
        line = f"{frame.filename}:{frame.lineno}"
        change = Change(
            self.modules[-1] if self.modules else "", kind, operator, line, " ".join((frame.line or "").split())
        )
        self.found.setdefault((line, kind), change)
