"""With `use_reentrant=True`, a model hands tensors with gradients to its layers as keyword arguments.

A reentrant checkpoint lets gradients through for positional arguments alone. Told by the source of the `forward` that
calls the layers, for what is known to carry gradients:

- an **error** where a layer is called with keywords only (the vision encoder of Llama 4): its output requires no
  gradients, and neither it nor what is before it gets any;
- an **error** for keys and values that later layers share (`shared_kv_states` of Gemma 3n and Gemma 4): they come from
  a forward without gradients, and those of the layers that made them are wrong, without an error;
- a **warning** for the states that cross attention attends to (`encoder_hidden_states`, `cross_attention_states` of
  Mllama): if they require gradients, backward raises `Trying to backward through the graph a second time` at the
  second layer.

Silent where a model hands them over as positional arguments, as T5, BART and Whisper do.

Use non-reentrant checkpointing.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from inspect import getsource, unwrap
from textwrap import dedent
from typing import TYPE_CHECKING, Any, cast

from overlay.checks.finding import Finding, Severity
from overlay.checks.subject import Layer, Subject, places

if TYPE_CHECKING:
    from torch import nn

CODE = "keyword-tensors"

_CROSS = frozenset({"encoder_hidden_states", "cross_attention_states"})
_SHARED = "shared_kv_states"


class _Kind(Enum):
    """What is handed over by keyword: what was found, what comes of it, and how bad that is."""

    ALL = (
        "the layer is called with keyword arguments only",
        "its output requires no gradients, and neither the layer nor what is before it gets any",
        "error",
    )
    SHARED = (
        "the layer is given the keys and values of an earlier layer by keyword",
        "they come from a forward without gradients, and the earlier layer gets wrong gradients without an error",
        "error",
    )
    CROSS = (
        "the layer is given the states that it attends to by keyword",
        "if they require gradients, backward raises `Trying to backward through the graph a second time`",
        "warning",
    )


def in_model(subject: Subject) -> Iterator[Finding]:
    modules = dict(subject.model.named_modules())
    found: dict[_Kind, dict[str, None]] = {}
    for layer in subject.checkpointed:
        if layer.reentrant and layer.trains:
            owner, attribute = _owner(layer.name, modules)
            for call in _calls(_unwrapped(type(owner).forward), attribute):
                for kind in _kinds(layer, call):
                    found.setdefault(kind, {})[layer.name] = None
    for kind, names in found.items():
        what, why, severity = kind.value
        yield Finding(
            CODE,
            cast(Severity, severity),
            places(names),
            f"checkpointed with use_reentrant=True, {what}",
            why,
            'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
        )


@dataclass(frozen=True)
class _Call:
    """How a layer is called: whether with positional arguments, and with which keywords."""

    positional: bool
    keywords: frozenset[str]


def _kinds(layer: Layer, call: _Call) -> Iterator[_Kind]:
    code = getattr(_unwrapped(type(layer.module).forward), "__code__", None)
    if code is None:
        return
    parameters = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    taken = call.keywords.intersection(parameters)
    if taken.intersection(parameters[:1]) and not call.positional:
        yield _Kind.ALL
    if _SHARED in taken and any(getattr(part, "is_kv_shared_layer", False) for part in layer.module.modules()):
        yield _Kind.SHARED
    if taken & _CROSS and any("cross" in name or "encoder_attn" in name for name, _ in layer.module.named_modules()):
        yield _Kind.CROSS


def _owner(name: str, modules: "dict[str, nn.Module]") -> "tuple[nn.Module, str]":
    """The module that calls a layer, and the attribute that it has the layer, or a list with it, under."""
    from torch import nn

    above, _, attribute = name.rpartition(".")
    while above and isinstance(modules[above], (nn.ModuleList, nn.ModuleDict)):
        above, _, attribute = above.rpartition(".")
    return modules[above], attribute


@cache
def _calls(forward: Any, attribute: str) -> tuple[_Call, ...]:
    """The calls of `self.attribute`, or of what is taken from it in a loop, in the source of a function."""
    try:
        tree = ast.parse(dedent(getsource(forward)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return ()  # made without source
    loops = {
        name.id
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For) and _names(loop.iter, attribute)
        for name in ast.walk(loop.target)
        if isinstance(name, ast.Name)
    }
    return tuple(
        _Call(bool(call.args), frozenset(keyword.arg for keyword in call.keywords if keyword.arg))
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and (
            call.func.id in loops
            if isinstance(call.func, ast.Name)
            else isinstance(call.func, (ast.Attribute, ast.Subscript)) and _is_attribute(call.func, attribute)
        )
    )


def _names(tree: ast.expr, attribute: str) -> bool:
    return any(isinstance(node, ast.Attribute) and _is_attribute(node, attribute) for node in ast.walk(tree))


def _is_attribute(node: ast.expr, attribute: str) -> bool:
    """Whether this is `self.attribute`, or an item of it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _unwrapped(function: Any) -> Any:
    """What decorators stand around: transformers and PyTorch set `__wrapped__`, as `functools.wraps` does."""
    try:
        return unwrap(function)
    except ValueError:
        return function
