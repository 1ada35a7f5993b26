"""The places in a library's sources where it compares the version of another package, read and not run."""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

OPERATIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_MIRRORED = {"<": ">", "<=": ">=", "==": "==", "!=": "!=", ">=": "<=", ">": "<"}
_NODES: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.GtE: ">=",
    ast.Gt: ">",
}


@dataclass(frozen=True)
class Gate:
    """One comparison, with a version that stands in the source."""

    place: str
    operation: str
    version: str

    def decides(self, installed: str) -> bool:
        """What it says where `installed` is."""
        return OPERATIONS[self.operation](Version(installed), Version(self.version))


@dataclass(frozen=True)
class Reader:
    """How a library asks for the version of a package.

    `said` are expressions that are the version, as `ast.unparse` writes them; `calls` are functions that compare it:
    what of the arguments is the operation and the version.
    """

    said: Sequence[str]
    calls: Mapping[str, Callable[[Sequence[ast.expr], Mapping[str, ast.expr]], tuple[str, ast.expr] | None]]

    def read(self, sources: Mapping[str, str]) -> tuple[list[Gate], list[str]]:
        """The gates in `sources`, and the places where the version is compared with what cannot be read."""
        parsed = {
            path: ast.parse(text)
            for path, text in sources.items()
            if any(word.partition("'")[0] in text for word in (*self.said, *self.calls))
        }
        constants = {
            target.id: node.value
            for tree in (*parsed.values(), *(ast.parse(text) for path, text in sources.items() if "constants" in path))
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        gates: list[Gate] = []
        unread: list[str] = []
        for path, tree in parsed.items():
            for line, operation, literal in self._found(tree):
                version = _version(literal, constants)
                if version is None:
                    unread.append(f"{path}:{line}")
                else:
                    gates.append(Gate(f"{path}:{line}", operation, version))
        return gates, unread

    def _found(self, tree: ast.Module) -> Iterator[tuple[int, str, ast.expr]]:
        names = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Compare) and self._is(node.value, set())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in self._outside(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                for left, kind, right in zip(sides, node.ops, sides[1:], strict=False):
                    operation = _NODES.get(type(kind))
                    if operation is None:
                        continue
                    if self._is(left, names):
                        yield node.lineno, operation, right
                    elif self._is(right, names):
                        yield node.lineno, _MIRRORED[operation], left
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                if called in self.calls:
                    found = self.calls[called](node.args, {word.arg: word.value for word in node.keywords if word.arg})
                    if found is not None:
                        yield node.lineno, *found

    def _outside(self, tree: ast.AST) -> Iterator[ast.AST]:
        """All nodes but those in the functions of `calls`, which compare what they are called with."""
        for node in ast.iter_child_nodes(tree):
            if not (isinstance(node, ast.FunctionDef) and node.name in self.calls):
                yield node
                yield from self._outside(node)

    def _is(self, node: ast.expr, names: set[str]) -> bool:
        """Whether it is the version: as it is, parsed, or by a name that it was given."""
        if (
            isinstance(node, ast.Call)
            and len(node.args) == 1
            and not any(ast.unparse(node) == text for text in self.said)
        ):
            return ast.unparse(node.func).rpartition(".")[2] in ("Version", "PkgVersion", "parse", "str") and self._is(
                node.args[0], names
            )
        return ast.unparse(node) in self.said or (isinstance(node, ast.Name) and node.id in names)


def _version(node: ast.expr, constants: Mapping[str, ast.Constant]) -> str | None:
    while isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    found = constants.get(node.id) if isinstance(node, ast.Name) else node
    if not isinstance(found, ast.Constant) or not isinstance(found.value, str):
        return None
    try:
        return str(Version(found.value))
    except InvalidVersion:
        return None


def _of(package: str, operation: str | None) -> Callable[..., tuple[str, ast.expr] | None]:
    """A function of a package, of an operation if none is given, and of a version."""

    def read(arguments: Sequence[ast.expr], _: Mapping[str, ast.expr]) -> tuple[str, ast.expr] | None:
        if not (isinstance(arguments[0], ast.Constant) and arguments[0].value == package):
            return None
        return (operation or str(ast.literal_eval(arguments[1])), arguments[-1])

    return read


def _at_least(arguments: Sequence[ast.expr], words: Mapping[str, ast.expr]) -> tuple[str, ast.expr]:
    equality = words.get("check_equality")
    return (">" if isinstance(equality, ast.Constant) and equality.value is False else ">=", arguments[0])


_METADATA = ("importlib.metadata.", "metadata.", "importlib_metadata.")

TRANSFORMERS = Reader(
    said=("transformers.__version__", *(f"{module}version('transformers')" for module in ("", *_METADATA))),
    calls={
        "compare_versions": _of("transformers", None),
        "_is_package_version_at_least": _of("transformers", ">="),
        "_is_package_version_below": _of("transformers", "<"),
    },
)
TRANSFORMER_ENGINE = Reader(
    said=(
        "get_te_version()",
        "TE_VERSION",
        "te.__version__",
        "transformer_engine.__version__",
        *(
            f"{module}version('{name}')"
            for module in ("", *_METADATA)
            for name in ("transformer-engine", "transformer_engine")
        ),
    ),
    calls={"is_te_min_version": _at_least},
)


def sources(folder: Path) -> dict[str, str]:
    """The Python files of an installed package."""
    files = sorted(folder.rglob("*.py"))
    return {file.relative_to(folder.parent).as_posix(): file.read_text("utf-8") for file in files}
