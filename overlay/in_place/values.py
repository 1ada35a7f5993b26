"""What is known of a value in a `forward` that is not run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Origin:
    """A tensor that was there before the block ran: an argument of its `forward`, or state of one of its modules.

    `name` is that of the argument, or the dotted name of the parameter, buffer or plain attribute in the block; for the
    running statistics of batch normalisation that of the module.
    """

    kind: Literal["input", "parameter", "buffer", "attribute", "statistics"]
    name: str


@dataclass(frozen=True)
class Alias:
    """A tensor may share memory with `origin`; it does where this is `certain`."""

    origin: Origin
    certain: bool = True


@dataclass(frozen=True)
class Tensor:
    """A tensor, or something that is not known at all; new where it has no alias.

    Attributes:
        aliases: what it may share memory with.
        holder: it is no tensor but holds some (a tuple of an unknown length, a dict, an object).
        strided: it is a view that is not contiguous, so that `contiguous` and `reshape` copy it.
    """

    aliases: frozenset[Alias] = frozenset()
    holder: bool = False
    strided: bool = False


@dataclass(frozen=True)
class Known:
    """This very object: a module, a function, a constant, …"""

    object: Any


@dataclass(frozen=True)
class Number:
    """A Python number, string or truth value that is not known."""


@dataclass(frozen=True)
class Items:
    """A tuple or list of these values."""

    values: tuple["Value", ...]


@dataclass(frozen=True)
class Named:
    """A dict with string keys; `rest` is what further values may be."""

    values: Mapping[str, "Value"] = field(hash=False)
    rest: "Value | None" = None


@dataclass(frozen=True)
class Closure:
    """A function that is defined inside of the one that is looked at, with the names that it sees."""

    node: Any
    names: dict[str, "Value"] = field(hash=False, compare=False)
    frame: Any = field(hash=False, compare=False)


Value = Tensor | Known | Number | Items | Named | Closure

NEW = Tensor()
NUMBER = Number()
NONE = Known(None)


def aliases(value: Value) -> frozenset[Alias]:
    """All that a value, or something in it, may share memory with."""
    match value:
        case Tensor():
            return value.aliases
        case Items():
            return frozenset(alias for one in value.values for alias in aliases(one))
        case Named():
            every = [*value.values.values(), *([value.rest] if value.rest is not None else [])]
            return frozenset(alias for one in every for alias in aliases(one))
    return frozenset()


def uncertain(value: Value) -> Tensor:
    """A tensor that may be this one, or a copy of it."""
    return Tensor(frozenset(Alias(alias.origin, certain=False) for alias in aliases(value)))


def view(value: Value, *, strided: bool = False) -> Tensor:
    """A view of a tensor."""
    already = isinstance(value, Tensor) and value.strided
    return Tensor(aliases(value), strided=strided or already)


def joined(values: Iterable[Value]) -> Value:
    """What a value is after branches: an alias is certain where it is in all of them, None and numbers left out."""
    first, *others = values
    for other in others:
        first = _join(first, other)
    return first


def _join(one: Value, other: Value) -> Value:
    if one is other or (isinstance(one, Known) and isinstance(other, Known) and one.object is other.object):
        return one
    if isinstance(one, Tensor | Items | Named) and one == other:
        return one
    if isinstance(one, Items) and isinstance(other, Items) and len(one.values) == len(other.values):
        return Items(tuple(_join(*pair) for pair in zip(one.values, other.values, strict=True)))
    if not isinstance(one, Tensor | Items | Named) and not isinstance(other, Tensor | Items | Named):
        return NUMBER
    certain = {alias.origin: alias.certain for alias in aliases(one)}
    if isinstance(other, Known) and other.object is None:
        return one
    if isinstance(one, Known) and one.object is None:
        return other
    both = {alias.origin: alias.certain and certain.get(alias.origin, False) for alias in aliases(other)}
    merged = dict.fromkeys(certain, False) | both
    holder = any(not isinstance(value, Tensor) or value.holder for value in (one, other))
    strided = any(isinstance(value, Tensor) and value.strided for value in (one, other))
    return Tensor(frozenset(Alias(*item) for item in merged.items()), holder=holder, strided=strided)
