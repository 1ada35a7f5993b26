"""In-place operations on a block's arguments, parameters and buffers, and on what backward needs, seen while a forward
runs.

`overlay.in_place` reads the source, and says nothing of code that it cannot follow. This looks at the operators, and
names the module and the line of the one that writes.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlay.checks.finding import Finding
from overlay.checks.in_place_operation import CODE, FIX

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Change:
    """An operator that wrote into what a block was given.

    Attributes:
        module: whose forward ran, by its name in the model.
        kind: `argument`, `parameter` or `buffer`; `result` where autograd had saved it (`overwritten`).
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
        if self.kind == "result":
            return Finding(
                CODE,
                "error",
                self.module,
                f"`{self.statement}` ({self.operator}) changes in place a result that backward needs ({self.line})",
                "without checkpointing backward raises RuntimeError; the recompute of a non-reentrant checkpoint does "
                "not look, and gradients are wrong, silently",
                FIX,
            )
        return Finding(
            CODE,
            "warning" if self.kind == "buffer" else "error",
            self.module,
            f"`{self.statement}` ({self.operator}) changes its {self.kind} in place ({self.line})",
            "the recompute starts from the change: backward raises RuntimeError, or gradients are wrong, silently",
            FIX,
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


def overwritten(model: nn.Module, run: Callable[[], object]) -> list[Change]:
    """What a forward changes in place after autograd has saved it. Backward raises RuntimeError then, with `modified by
    an inplace operation` in it.

    Args:
        run: runs the forward, with gradients.
    """
    watch = _WatchSaved()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            for hook in (
                module.register_forward_pre_hook(watch.entering(name)),
                module.register_forward_hook(watch.leaving, always_call=True),
            ):
                stack.callback(hook.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.saved, lambda tensor: tensor))
        with watch:
            run()
    return watch.found()


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
        if self.given:
            for one in _written(func, args, kwargs or {}):
                if kind := self.given.get(_storage(one)):
                    change = _change(self.modules, kind, func)
                    self.found.setdefault((change.line, kind), change)
        return func(*args, **(kwargs or {}))


class _WatchSaved(TorchDispatchMode):
    """Notes what autograd saves, and operators that write."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.changes: dict[int, list[Change]] = {}
        self.kept: list[tuple[Tensor, int, int]] = []

    def entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self.modules.append(name)

    def leaving(self, *_: Any) -> None:
        self.modules.pop()

    def saved(self, tensor: Tensor) -> Tensor:
        self.kept.append((tensor, tensor._version, len(self.changes.get(_storage(tensor), ()))))
        return tensor

    def found(self) -> list[Change]:
        """As autograd finds it: by a version that is another one than when the tensor was saved."""
        late: dict[str, Change] = {}
        for tensor, version, count in self.kept:
            if tensor._version != version:
                for change in self.changes.get(_storage(tensor), [])[count:]:
                    late.setdefault(change.line, change)
        return list(late.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in _written(func, args, kwargs or {}):
            self.changes.setdefault(_storage(one), []).append(_change(self.modules, "result", func))
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes into."""
    if not func._schema.is_mutable:
        return
    named = {argument.name: argument for argument in func._schema.arguments}
    for name, value in (*zip(named, args, strict=False), *kwargs.items()):
        if named[name].alias_info is not None and named[name].alias_info.is_write:
            yield from (one for one in tree_leaves(value) if isinstance(one, Tensor))  # some take lists


def _change(modules: Sequence[str], kind: str, func: Any) -> Change:
    """The change that the code which runs makes."""
    frames = traceback.extract_stack()
    frame = next((one for one in reversed(frames) if not one.filename.startswith(_OWN)), frames[0])
    statement = " ".join((frame.line or "").split())
    return Change(modules[-1] if modules else "", kind, str(func), f"{frame.filename}:{frame.lineno}", statement)
