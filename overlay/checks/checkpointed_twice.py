"""A checkpoint within a checkpoint: what is in the inner one may be computed three times or more in a step.

Looked for are these, one inside of another or around the same module:

- a layer whose own checkpointing is on (`gradient_checkpointing_enable`);
- a checkpoint wrapper: PyTorch's `checkpoint_wrapper`, as accelerate's FSDP plugin puts it around layers with
  `activation_checkpointing`, or fairscale's;
- a `forward`, replaced or of your own, that calls `torch.utils.checkpoint.checkpoint`.

And accelerate's `activation_checkpointing`, where it is on and is going to wrap layers whose own checkpointing is on.

A **warning**: measured on a Llama, everything that both are around is computed three times in a step, where two would
do. An **info** where both are non-reentrant and around the same block: a recompute stops as soon as it has what is
asked for (`set_checkpoint_early_stop`), and nothing is computed more often. The gradients are right; around the same
block no memory is gained. The layers of transformers that hold other layers (the stages of Swin, the hybrid layers of
Zamba) are left out: there the inner checkpoints bound the memory of the recompute.

Turn one of the two off.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, class_forward, places

if TYPE_CHECKING:
    from torch import nn

CODE = "checkpointed-twice"

_OWN, _WRAPPER, _FORWARD = "its own checkpointing", "a checkpoint wrapper", "a forward that calls checkpoint"
_OFF = {
    _OWN: "model.gradient_checkpointing_disable()",
    _WRAPPER: "leave the wrapper out (`activation_checkpointing` of accelerate's FSDP plugin)",
    _FORWARD: "leave the call of checkpoint out of that forward",
}


@dataclass(frozen=True)
class _Checkpoint:
    """`path` is the module's name, empty for the root; `reentrant` is None where it cannot be told."""

    path: str
    module: "nn.Module"
    kind: str
    reentrant: bool | None


def in_model(subject: Subject) -> Iterator[Finding]:
    found: dict[tuple[str, str, bool], list[str]] = {}
    for outer, inner in _nested(subject):
        found.setdefault((outer.kind, inner.kind, _is_free(outer, inner)), []).append(inner.path)
    for (around, within, free), names in found.items():
        yield _finding(names, f"{within} inside of {around}", around, within, free=free)
    own = [layer.name for layer in subject.checkpointed]
    if own and not subject.wrapped and _accelerate_wraps():
        what = f"{_OWN}, and `activation_checkpointing` of accelerate's FSDP plugin, which is going to wrap it"
        free = all(layer.reentrant is False for layer in subject.checkpointed)
        yield _finding(own, what, _WRAPPER, _OWN, free=free)


def _finding(names: list[str], what: str, outer: str, inner: str, *, free: bool) -> Finding:
    return Finding(
        CODE,
        "info" if free else "warning",
        places(names),
        what,
        "one of the two does nothing; were one of them reentrant, each would compute the block again"
        if free
        else "it is computed once more for each checkpoint around it: time is lost",
        " or ".join(dict.fromkeys((_OFF[outer], _OFF[inner]))),
    )


def _is_free(outer: _Checkpoint, inner: _Checkpoint) -> bool:
    """Whether both are non-reentrant and around the same modules."""
    if outer.reentrant is not False or inner.reentrant is not False:
        return False
    return outer.module is inner.module or set(outer.module.modules()) - {outer.module} == set(inner.module.modules())


def _nested(subject: Subject) -> Iterator[tuple[_Checkpoint, _Checkpoint]]:
    """Each checkpoint within another, with the nearest one around it."""
    own = {layer.module: layer.reentrant for layer in subject.checkpointed}
    reentrant = {name for name, _ in subject.reentrant_regions}
    around: list[_Checkpoint] = []
    for module, name in subject.names.items():
        path = "" if module is subject.model else name
        while around and around[-1].path and not f"{path}.".startswith(f"{around[-1].path}."):
            around.pop()
        found: list[_Checkpoint] = []
        if module in subject.wrapped:
            found.append(_Checkpoint(path, module, _WRAPPER, subject.wrapped[module] in reentrant))
        if module in own:
            found.append(_Checkpoint(path, module, _OWN, own[module]))
        if _calls_checkpoint(module):
            found.append(_Checkpoint(path, module, _FORWARD, None))
        for inner in found:
            if around:
                outer = around[-1]
                both_own = inner.kind == outer.kind == _OWN
                if not (both_own and _is_upstream(inner.module) and _is_upstream(outer.module)):
                    yield outer, inner
            around.append(inner)


def _is_upstream(layer: "nn.Module") -> bool:
    """Whether the class of a layer is transformers' own; `fully_shard` puts one of its own before it."""
    made = next(base for base in type(layer).__mro__ if not base.__module__.startswith("torch."))
    return made.__module__.startswith("transformers.")


def _calls_checkpoint(module: "nn.Module") -> bool:
    """Whether `forward`, or one that it stands for, names PyTorch's checkpoint. What transformers has is its own."""
    forward: Any = vars(module).get("forward") or class_forward(module)
    for _ in range(8):
        if isinstance(forward, partial):
            if _is_checkpoint(forward.func):
                return True
            if getattr(forward.func, "__name__", "") == "_checkpointed_forward":
                return False  # fairscale's wrapper
            forward = getattr(forward, "__wrapped__", forward.func)
        if isinstance(forward, MethodType):
            forward = forward.__func__
        if not isinstance(forward, FunctionType):
            return False
        package = (forward.__module__ or "").partition(".")[0]
        if package not in ("torch", "transformers") and _names_checkpoint(forward, forward.__code__):
            return True
        if not hasattr(forward, "__wrapped__"):
            return False
        forward = forward.__wrapped__
    return False


def _names_checkpoint(function: FunctionType, code: CodeType) -> bool:
    if {"torch", "utils", "checkpoint"} <= set(code.co_names):
        return True
    seen = [function.__globals__.get(name) for name in code.co_names]
    for cell in function.__closure__ or ():
        try:
            seen.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    if any(_is_checkpoint(one.func if isinstance(one, partial) else one) for one in seen):
        return True
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(_names_checkpoint(function, constant) for constant in inner)


def _is_checkpoint(found: Callable[..., Any] | ModuleType | None) -> bool:
    module = sys.modules.get("torch.utils.checkpoint")
    return module is not None and (found is module or found is module.checkpoint)


def _accelerate_wraps() -> bool:
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared = getattr(state, "_shared_state", None)
    plugin = shared.get("fsdp_plugin") if isinstance(shared, dict) else None
    return bool(getattr(plugin, "activation_checkpointing", False))
