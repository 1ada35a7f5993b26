"""A layer's `forward` was replaced, and transformers 5.23 and later then do not checkpoint the layer.

A **warning** on stock 5.23 and 5.24, where upstream checkpoints by a wrapper that it puts around the `forward` of each
class: a function that is put on the class afterwards (`SomeDecoderLayer.forward = f`, as LLaMA-Factory, axolotl and
unsloth do), or on a layer (`layer.forward = f`) without calling the old one, leaves that out. Training goes on, and
runs out of memory. A replacement on a layer from which the old `forward` can be reached, as accelerate's hooks and
`mock.patch.object(..., wraps=...)` keep it, is taken to call it.

Mend transformers (`overlay doctor` says how), or replace the `forward` of the class before `fully_shard`, or in a
subclass: each new class is wrapped again.
"""

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from overlay.checks.environment import Environment
from overlay.checks.finding import Finding
from overlay.checks.subject import Layer, Subject, places

CODE = "forward-replaced"

_MODULE = "transformers.modeling_layers"
_FIX = "mend transformers as `overlay doctor` says"
_DEPTH = 4
"""How far the old `forward` is looked for: a decorator in a closure of a decorator, and the like."""


def in_environment(environment: Environment) -> Iterator[Finding]:
    source = environment.source(_MODULE)
    if source is not None and b"def __init_subclass__" in source and _MODULE not in environment.patched:
        yield Finding(
            CODE,
            "info",
            f"transformers {environment.version('transformers')}",
            "layers are checkpointed by a wrapper of their class's forward",
            "a layer whose forward is replaced afterwards is not checkpointed, without an error",
            _FIX,
        )


def in_model(subject: Subject) -> Iterator[Finding]:
    names = [layer.name for layer in subject.checkpointed if layer.wraps_forward and not _is_checkpointed(layer)]
    if names:
        yield Finding(
            CODE,
            "warning",
            places(names),
            "checkpointing is on, and the forward of the layer was replaced",
            "transformers checkpoints the forward that the class was made with, so that this layer is not checkpointed",
            f"{_FIX}, or subclass the layer instead of replacing its forward",
        )


def _is_checkpointed(layer: Layer) -> bool:
    wrapper = _code(getattr(vars(layer.base)["__init_subclass__"], "__func__", None))
    forward = type(layer.module).forward
    if wrapper is None:
        return True  # made in another way than is known
    if getattr(_code(forward), "co_filename", None) != wrapper.co_filename:
        return False
    own = vars(layer.module)
    if "forward" not in own:
        return True
    return any(_reaches(value, forward, _DEPTH) for value in own.values() if callable(value))


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


def _reaches(value: Any, forward: Any, depth: int) -> bool:
    """Whether a function may call another: that is a global of it, or in its closure or attributes, or bound in it."""
    if value is forward:
        return True
    if depth == 0:
        return False
    if isinstance(value, FunctionType) and any(
        value.__globals__.get(name) is forward for name in value.__code__.co_names
    ):
        return True
    return any(_reaches(part, forward, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, MethodType):
        yield value.__func__
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue  # not filled yet
        yield from value.__defaults__ or ()
        yield from vars(value).values()
    elif isinstance(value, partial):
        yield value.func
        yield from value.args
    elif hasattr(value, "_mock_wraps"):
        yield value._mock_wraps
