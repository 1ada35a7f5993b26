"""The syntax tree of a function."""

import ast
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any


@dataclass(frozen=True)
class Source:
    """A function's syntax tree, where it is, and how far its lines are from those of the file."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    file: str
    offset: int

    def line(self, node: ast.AST) -> int:
        """The line of a node in the file."""
        return getattr(node, "lineno", 1) + self.offset


def of(function: FunctionType) -> Source | None:
    """The source of a function; None where there is none, or it is a lambda."""
    return _of(function.__code__)


@cache
def _of(code: CodeType) -> Source | None:
    lines = linecache.getlines(code.co_filename)
    start, last = code.co_firstlineno - 1, _last_line(code)
    # `inspect.getsource` finds the end with the tokenizer: ten times as long. The last lines may have no code
    for end in range(last, min(last + 20, len(lines)) + 1):
        try:
            tree = ast.parse("if True:\n" + "".join(lines[start:end])) if lines[start][:1].isspace() else None
            body = tree.body[0].body if tree is not None else ast.parse("\n" + "".join(lines[start:end])).body  # type: ignore[attr-defined]
        except SyntaxError:
            continue
        node = body[0] if body else None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            return Source(node, code.co_filename, start - 1)
        return None
    return None


def _last_line(code: CodeType) -> int:
    inner = (_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max([code.co_firstlineno, *(line for *_, line in code.co_lines() if line is not None), *inner])


_TRANSPARENT = frozenset({"accelerate", "deepspeed", "peft", "torch", "transformers"})
"""Packages whose decorators hand on what they are given."""


def innermost(function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What partials and frameworks' decorators (with `functools.wraps`) are around, and the arguments bound there.

    Of two bound methods, one around the other, the inner one's instance counts.
    """
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    for _ in range(32):
        wrapped = _wrapped(function)
        if wrapped is not None:
            function = wrapped
        elif isinstance(function, partial):
            arguments, keywords = (*function.args, *arguments), {**function.keywords, **keywords}
            function = function.func
        else:
            break
    return function, arguments, keywords


def _wrapped(function: Any) -> Any:
    made = function.func if isinstance(function, partial) else function
    made = getattr(made, "__func__", made)
    # `functools.wraps` copies the name of the module, but not the globals
    if getattr(made, "__globals__", {}).get("__name__", "").partition(".")[0] not in _TRANSPARENT:
        return None
    if not isinstance(function, MethodType):
        return getattr(function, "__wrapped__", None)
    wrapped = getattr(function.__func__, "__wrapped__", None)
    return wrapped if wrapped is None or isinstance(wrapped, MethodType) else MethodType(wrapped, function.__self__)
