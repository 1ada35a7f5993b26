"""Takes classes and functions out of a module's source, with what they need of the rest of it, and nothing else."""

import __future__

import ast
import copy
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any

from overlay.queue.judges import CannotJudgeError

BASE = "_judged_base"
"""The name of the only base of a class that is taken in part."""

_FLAGS = __future__.annotations.compiler_flag  # annotations are not evaluated: they need more imports than code does


class Module:
    """The source of a module.

    Args:
        content: its bytes.
        name: its full name, for messages and for relative imports.

    Raises:
        CannotJudgeError: this Python cannot read it.
    """

    def __init__(self, content: bytes, name: str) -> None:
        self.name = name
        try:
            self._statements = ast.parse(content).body
        except (SyntaxError, ValueError) as error:
            raise CannotJudgeError(
                f"expected a module that Python {sys.version_info[0]}.{sys.version_info[1]} reads, found {error}: a "
                "newer one may read it"
            ) from None

    def functions(self, *constants: str) -> list[str]:
        """The names of the functions of the module that have these strings in them."""
        return [
            statement.name
            for statement in self._statements
            if isinstance(statement, ast.FunctionDef)
            and set(constants) <= {node.value for node in ast.walk(statement) if isinstance(node, ast.Constant)}
        ]

    def run(self, name: str, builtins: Mapping[str, Any], **given: Any) -> Any:
        """What `name` is after the statements that it needs have run.

        Args:
            name: a class or function of the module.
            builtins: what `__builtins__` is there; imports go through its `__import__`.
            given: more names that the module has.

        Raises:
            CannotJudgeError: the module has no such name.
        """
        return self._run(name, self._needed(name, self._statements), builtins, given)

    def run_methods(
        self, name: str, methods: Collection[str], without: Collection[str], builtins: Mapping[str, Any], base: type
    ) -> Any:
        """As `run`, of a class with these of its methods and those that they mention, `base` being its only base.

        Args:
            without: methods that are left out even so.

        Raises:
            CannotJudgeError: the module has no such class, or the class none of the methods.
        """
        classes = [one for one in self._statements if isinstance(one, ast.ClassDef) and one.name == name]
        if len(classes) != 1:
            raise CannotJudgeError(f"expected one class {name} in {self.name}, found {len(classes)}")
        there = {one.name: one for one in classes[0].body if isinstance(one, ast.FunctionDef)}
        wanted = [method for method in methods if method in there]
        if not wanted:
            raise CannotJudgeError(f"expected {' or '.join(methods)} in {name}, found neither")
        taken: dict[str, ast.FunctionDef] = {}
        while wanted:
            method = wanted.pop()
            taken[method] = there[method]
            mentioned = {node.attr for node in ast.walk(there[method]) if isinstance(node, ast.Attribute)}
            wanted += sorted((mentioned & there.keys()) - taken.keys() - set(without) - set(wanted))
        part = copy.copy(classes[0])
        part.bases, part.keywords, part.decorator_list = [ast.Name(BASE, ast.Load())], [], []
        part.body = [one for one in classes[0].body if one in taken.values()]
        ast.fix_missing_locations(part)
        statements: list[ast.stmt] = [part if one is classes[0] else one for one in self._statements]
        kept = [one for one in statements if one is part or not _is_of_another_part(one, name, taken)]
        return self._run(name, self._needed(name, kept), builtins, {BASE: base})

    def _run(self, name: str, code: CodeType, builtins: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        module = ModuleType(self.name)
        sys.modules[self.name] = module  # dataclasses look there
        namespace = vars(module)
        namespace.update(given, __builtins__=dict(builtins), __package__=self.name.rpartition(".")[0])
        exec(code, namespace)  # noqa: S102 - upstream's code, in a process of its own: see `worker`
        return namespace[name]

    def _needed(self, wanted: str, statements: list[ast.stmt]) -> CodeType:
        """The statements that `wanted` needs, in their order."""
        binding: dict[str, list[ast.stmt]] = {}
        for statement in statements:
            for name in _bound(statement):
                binding.setdefault(name, []).append(statement)
        if wanted not in binding:
            raise CannotJudgeError(f"expected {wanted} in {self.name}, found none")
        # what runs when the module is imported, and may change what it is
        running = [(one, list(_run_by(one, wanted))) for one in statements]
        about = [one for one, names in running if names and wanted in _closure(names, binding)]
        names = _closure([wanted, *(name for one in about for name in _loaded(one))], binding)
        taken = {id(one) for one in about} | {id(one) for name in names for one in binding.get(name, ())}
        kept = [_imports(one, names) for one in statements if id(one) in taken]
        tree = ast.Module(body=kept, type_ignores=[])
        code: CodeType = compile(tree, self.name, "exec", flags=_FLAGS, dont_inherit=True)
        return code


def _run_by(statement: ast.stmt, wanted: str) -> Iterator[str]:
    """The names that a statement of a module reads while the module is imported, where it does something with them:
    more than to give them, or a class derived from them, a name. `wanted` in a string counts, as in `globals()[...]`.
    """
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for decorator in statement.decorator_list:
                yield from _loaded(decorator)
        case ast.ClassDef():
            for decorator in statement.decorator_list:
                yield from _loaded(decorator)
            for inner in statement.body:
                yield from _run_by(inner, wanted)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            for inner in statement.orelse:
                yield from _run_by(inner, wanted)
        case ast.Import() | ast.ImportFrom():
            pass
        case _:
            nodes = list(ast.walk(statement))
            if any(isinstance(node, _DOING) or _is_stored_in(node) for node in nodes):
                yield from _loaded(statement)
                yield from (wanted for node in nodes if isinstance(node, ast.Constant) and node.value == wanted)


_DOING = (ast.Call, ast.Delete, ast.AugAssign)


def _is_stored_in(node: ast.AST) -> bool:
    return isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module gives a value, also where it stands in a block."""
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ImportFrom(module="__future__"):
            pass
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            for alias in names:
                yield alias.asname or alias.name.partition(".")[0]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            for inner in statement.orelse:
                yield from _bound(inner)
        case _:
            for node in ast.iter_child_nodes(statement):
                yield from _stored(node)


def _stored(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.stmt):
        yield from _bound(node)
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
    elif isinstance(node, (ast.Attribute, ast.Subscript)):  # what stands there belongs to what this name is
        if isinstance(node.ctx, ast.Store):
            root: ast.AST = node
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name):
                yield root.id
    elif not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        for inner in ast.iter_child_nodes(node):
            yield from _stored(inner)


def _loaded(node: ast.AST) -> Iterator[str]:
    """The names that are read in `node`, annotations left out."""
    if isinstance(node, ast.Name):
        yield node.id
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    yield from _loaded(inner)


def _closure(names: Iterable[str], binding: Mapping[str, Sequence[ast.stmt]]) -> set[str]:
    """The names, and those that are read where they get their values, and so on."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += [read for statement in binding.get(name, ()) for read in _loaded(statement)]
    return found


def _is_of_another_part(statement: ast.stmt, name: str, parts: Collection[str]) -> bool:
    """Whether a statement of a module changes the class `name`, and in it none of `parts`."""
    if name not in _bound(statement):
        return False
    nodes = [
        node for node in ast.walk(statement) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    changed = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == name}
    return bool(changed) and not changed & set(parts)


def _imports(statement: ast.stmt, names: Collection[str]) -> ast.stmt:
    """An import with none but the names that are needed; any other statement as it is."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        needed = [one for one in statement.names if (one.asname or one.name.partition(".")[0]) in names]
        changed = type(statement)(**{**dict(ast.iter_fields(statement)), "names": needed})
        return ast.copy_location(changed, statement)
    return statement
