"""A hook of yours on a checkpointed layer: it runs once, outside of the checkpoint, and not in the recompute.

Fires where a layer's hooks run outside of its checkpoint: with this project, and on stock transformers from 5.23 on.
Silent on stock 5.0 to 5.22, where they run in the recompute as well. Hooks on modules inside of the layer run in the
recompute everywhere, and the hooks of PyTorch (FSDP2), DeepSpeed, accelerate, PEFT and transformers are meant to run
once: none of these is reported.

- An **info** for each forward hook and forward pre-hook on a layer.
- A **warning** where a pre-hook sets what the `forward` of the layer reads, and a forward hook takes it back (an
  attribute, or an entry of a dict that all three use): the recompute comes after both, computes with what was put back,
  and gradients are wrong without an error.
- A **warning** for the hooks of `torch.nn.utils` that compute a weight of the layer itself, which `forward` reads.
  With two forwards before a backward, measured: `spectral_norm` gives wrong gradients without an error (non-reentrant;
  on stock up to 5.22 always), and `weight_norm` and `prune` raise `Trying to backward through the graph a second time`
  with reentrant checkpointing, and are right and not reported with non-reentrant.

Put what the hook does into `forward`, or into a replacement of it (`layer.forward = f`): that is inside of the
checkpoint. Use `torch.nn.utils.parametrizations` for the last.
"""

import dis
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, class_forward, places

if TYPE_CHECKING:
    from torch import nn

CODE = "hooks-in-recompute"

_FRAMEWORKS = frozenset({"accelerate", "deepspeed", "peft", "torch", "transformers", "overlay"})
_COMPUTE_WEIGHTS = frozenset({"WeightNorm", "BasePruningMethod"})
_FIX = "put what it does into the layer's forward, or into a replacement of it (layer.forward = f)"


def in_model(subject: Subject) -> Iterator[Finding]:
    found: dict[tuple[str, ...], list[str]] = {}
    for layer in subject.checkpointed:
        module = layer.module
        if not (module._forward_pre_hooks or module._forward_hooks) or subject.hooks_inside(layer):
            continue
        before, after = _own(module._forward_pre_hooks.values()), _own(module._forward_hooks.values())
        paired = set()
        for first in before:
            for second in after:
                if (shared := _shared(first, second, module)) is not None:
                    found.setdefault((_name(first), _name(second), shared), []).append(layer.name)
                    paired |= {id(first), id(second)}
        for hook in (*before, *after):
            if id(hook) not in paired:
                found.setdefault((_name(hook),), []).append(layer.name)
        for hook in module._forward_pre_hooks.values():
            names = {base.__name__ for base in type(hook).__mro__}
            if "SpectralNorm" in names or (names & _COMPUTE_WEIGHTS and layer.reentrant is not False):
                found.setdefault((type(hook).__name__, "weight"), []).append(layer.name)
    yield from (_finding(key, names) for key, names in found.items())


def _finding(key: tuple[str, ...], names: list[str]) -> Finding:
    match key:
        case (first, second, shared):
            return Finding(
                CODE,
                "warning",
                places(names),
                f"the hook {first} sets {shared}, which forward reads, and the hook {second} sets it again",
                "the recompute runs after both hooks: gradients are wrong without an error",
                _FIX,
            )
        case (hook, _):
            return Finding(
                CODE,
                "warning",
                places(names),
                f"the hook {hook} computes a weight of the layer, outside of its checkpoint",
                "the recompute reads the weight of the last forward: with two before a backward it fails, or is wrong",
                "use torch.nn.utils.parametrizations",
            )
    return Finding(
        CODE,
        "info",
        places(names),
        f"the hook {key[0]} on a checkpointed layer",
        "it runs once a forward, outside of the checkpoint, and not in the recompute",
        f"leave it so if that is enough, else {_FIX}",
    )


def _own(hooks: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    return [hook for hook in hooks if (_module(hook) or "").partition(".")[0] not in _FRAMEWORKS]


def _function(hook: Any) -> Any:
    for _ in range(8):
        if isinstance(hook, partial):
            hook = hook.func
        elif isinstance(hook, MethodType):
            hook = hook.__func__
        elif hasattr(hook, "__wrapped__"):
            hook = hook.__wrapped__
        else:
            break
    return hook if isinstance(hook, FunctionType) else vars(type(hook)).get("__call__", hook)


def _module(hook: Any) -> str | None:
    return getattr(_function(hook), "__module__", None) or type(hook).__module__


def _name(hook: Any) -> str:
    return str(getattr(_function(hook), "__qualname__", type(hook).__name__))


def _shared(first: Any, second: Any, layer: "nn.Module") -> str | None:
    """What both hooks set and a `forward` of the layer reads: an attribute, or an object that all three use."""
    stores = [
        _stored(code) if (code := getattr(_function(hook), "__code__", None)) else set() for hook in (first, second)
    ]
    forwards = [_function(vars(module).get("forward") or class_forward(module)) for module in layer.modules()]
    codes = [code for forward in forwards if (code := getattr(forward, "__code__", None)) is not None]
    read = {
        name for code in codes for name in (*code.co_names, *(one for one in code.co_consts if isinstance(one, str)))
    }
    names = sorted(stores[0] & stores[1] & read)
    if names:
        return f"`{names[0]}`"
    kept = [_objects(_function(hook)) if stored else {} for hook, stored in zip((first, second), stores, strict=True)]
    used = {key for forward in forwards for key in _objects(forward)}
    objects = [name for key, name in kept[0].items() if key in kept[1] and key in used]
    return f"`{objects[0]}`" if objects else None


def _stored(code: CodeType) -> set[str]:
    """The attributes that a function sets or deletes; with an entry, where it sets items of something."""
    found = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            found.add(str(instruction.argval))
        elif instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            found.add("[]")
        elif instruction.argval in ("setattr", "delattr", "clear", "append", "pop", "update"):
            found |= {"[]", *(one for one in code.co_consts if isinstance(one, str))}
    return found


def _objects(function: Any) -> dict[int, str]:
    """The containers and objects that a function has from around it, by identity, with the names it has for them."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    seen = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            seen[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    plain = (type(None), bool, int, float, str, bytes, tuple, type, ModuleType, FunctionType, MethodType)
    return {
        id(value): name
        for name, value in seen.items()
        if not isinstance(value, plain) and not callable(value) and not _is_logger(value)
    }


def _is_logger(value: Any) -> bool:
    return type(value).__module__ == "logging"
