"""Follows the tensors that come from outside through a block's `forward`, which is not run."""

import ast
import builtins
import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

from overlay.in_place import operations, source
from overlay.in_place.changes import Recorder
from overlay.in_place.values import (
    NEW,
    NONE,
    NUMBER,
    Alias,
    Closure,
    Items,
    Known,
    Named,
    Number,
    Origin,
    Tensor,
    Value,
    aliases,
    joined,
    uncertain,
    view,
)

if TYPE_CHECKING:
    from torch import nn

_SCALARS = (bool, int, float, str, bytes, type(None))
_ELEMENTS = 8
"""How many modules of a list a loop is followed through: they are alike."""
_DEPTH = 16
_STEPS = 60_000
"""Nodes of the syntax tree that are looked at, in all, before the rest is left."""

_TENSOR = re.compile(r"Tensor\b")
_HOLDER = re.compile(r"\b(tuple|list|dict|set|Sequence|Mapping|Iterable|Cache|Callable)\b", re.IGNORECASE)
_NUMBER = re.compile(r"\b(int|float|bool|str)\b")
_CACHES = frozenset({"cache", "cache_params", "layer_past", "past_key_value", "past_key_values", "state"})
"""Arguments that hold a cache: there is none while a block is checkpointed. `state` is RWKV's."""
_POSITION = re.compile(r"(idx|index|layer_id|number)$")
"""Attributes that tell one layer of a model from the next."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_MISSING = object()


class _Enough(Exception):
    """More code than is worth the time."""


@dataclass
class _Frame:
    """One call of a function."""

    source: source.Source
    function: FunctionType | None
    module: str
    names: dict[str, Value]
    returned: list[Value] = field(default_factory=list)

    @cached_property
    def cells(self) -> Mapping[str, Any]:
        """What the function sees of the functions around it."""
        if self.function is None or not self.function.__closure__:
            return {}
        found = {}
        for name, cell in zip(self.function.__code__.co_freevars, self.function.__closure__, strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not bound yet
                continue
        return found


@dataclass
class _Arguments:
    """The arguments of a call."""

    positional: list[Value]
    keywords: dict[str, Value]
    rest: Value | None = None
    """What further positional arguments may be."""
    others: Value | None = None
    """What further keyword arguments may be."""

    def get(self, position: int, name: str) -> Value | None:
        if position < len(self.positional):
            return self.positional[position]
        return self.keywords.get(name)

    @property
    def every(self) -> Iterator[Value]:
        yield from self.positional
        yield from self.keywords.values()


class Interpreter:
    """One look at a block."""

    def __init__(self, block: "nn.Module", recorder: Recorder) -> None:
        self.block = block
        self.recorder = recorder
        self.names = {id(module): name for name, module in block.named_modules()}
        self.assigned: dict[tuple[int, str], Value] = {}
        self.stack: list[object] = []
        self.steps = 0

    def run(self) -> None:
        """Looks at the block's `forward`, with arguments from outside."""
        function, bound, keywords = source.innermost(self._forward(self.block))
        owner = ""
        arguments = _Arguments([Known(one) for one in bound], {name: Known(one) for name, one in keywords.items()})
        if isinstance(function, MethodType):
            arguments.positional.insert(0, Known(function.__self__))
            function = function.__func__
        if not isinstance(function, FunctionType) or (found := source.of(function)) is None:
            return
        self._inputs(found.node, arguments)
        self._enter(found, function, owner, arguments)

    def _inputs(self, node: ast.FunctionDef | ast.AsyncFunctionDef, arguments: _Arguments) -> None:
        """Adds a tensor from outside for each parameter that is not bound yet."""
        signature = node.args
        positional = [*signature.posonlyargs, *signature.args]
        defaults: dict[str, ast.expr | None] = dict.fromkeys(argument.arg for argument in positional)
        if signature.defaults:
            names = [argument.arg for argument in positional[-len(signature.defaults) :]]
            defaults |= dict(zip(names, signature.defaults, strict=True))
        defaults |= {
            argument.arg: default for argument, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
        }
        free = positional[len(arguments.positional) :]
        for argument in [*free, *signature.kwonlyargs]:
            if argument.arg not in arguments.keywords:
                likely = argument is (free[0] if free else None) or _is_used_as_tensor(node, argument.arg)
                arguments.keywords[argument.arg] = _input(argument, defaults.get(argument.arg), likely=likely)
        if signature.vararg is not None:
            arguments.rest = Tensor(frozenset({Alias(Origin("input", f"*{signature.vararg.arg}"))}))
        if signature.kwarg is not None:
            arguments.others = Tensor(frozenset({Alias(Origin("input", f"*{signature.kwarg.arg}"))}))

    # Calls

    def _enter(
        self, found: source.Source, function: FunctionType | None, module: str, arguments: _Arguments, **outer: Value
    ) -> Value:
        key = found.node
        if len(self.stack) >= _DEPTH or self.stack.count(key) > 1:
            return NEW
        frame = _Frame(found, function, module, dict(outer))
        self._bind(frame, arguments)
        self.stack.append(key)
        try:
            self._block(found.node.body, frame)
        finally:
            self.stack.pop()
        return joined(frame.returned) if frame.returned else NONE

    def _bind(self, frame: _Frame, arguments: _Arguments) -> None:
        signature, function = frame.source.node.args, frame.function
        names = [argument.arg for argument in (*signature.posonlyargs, *signature.args)]
        frame.names |= zip(names, arguments.positional, strict=False)
        left = dict(arguments.keywords)
        for name in [*names, *(argument.arg for argument in signature.kwonlyargs)]:
            if name in left:
                frame.names[name] = left.pop(name)
        defaults: dict[str, Any] = dict(function.__kwdefaults__ or {}) if function is not None else {}
        if function is not None and function.__defaults__:
            defaults |= zip(names[-len(function.__defaults__) :], function.__defaults__, strict=True)
        for name in [*names, *(argument.arg for argument in signature.kwonlyargs)]:
            if name in frame.names:
                continue
            star = arguments.rest if name in names and arguments.rest is not None else arguments.others
            default = defaults.get(name, _MISSING)
            if star is not None and (default is _MISSING or default is None):
                frame.names[name] = _renamed(star, name, certain=default is _MISSING)
            elif default is not _MISSING:
                frame.names[name] = Known(default)
            else:
                frame.names[name] = NEW
        if signature.vararg is not None:
            extra = arguments.positional[len(names) :]
            if arguments.rest is None:
                frame.names[signature.vararg.arg] = Items(tuple(extra))
            else:
                frame.names[signature.vararg.arg] = _several([*extra, arguments.rest])
        if signature.kwarg is not None:
            frame.names[signature.kwarg.arg] = Named(left, arguments.others)

    def _call_module(self, module: "nn.Module", arguments: _Arguments, frame: _Frame, node: ast.AST) -> Value:
        forward = self._forward(module)
        inner, _, _ = source.innermost(forward)
        if (getattr(inner, "__module__", None) or "").partition(".")[0] == "torch":
            return self._call_torch_module(module, arguments, frame, node)
        return self._call_python(forward, arguments, frame, node)

    def _call_torch_module(self, module: "nn.Module", arguments: _Arguments, frame: _Frame, node: ast.AST) -> Value:
        from torch import nn

        first = arguments.get(0, "input") or next(arguments.every, NEW)
        wrapped = module._modules.get("_checkpoint_wrapped_module")
        if wrapped is not None:
            return self._call_module(wrapped, arguments, frame, node)
        if isinstance(module, nn.Identity):
            return first
        if isinstance(module, nn.Sequential):
            for one in module:
                first = self._call_module(one, _Arguments([first], {}), frame, node)
            return first
        if isinstance(module, nn.Flatten | nn.Unflatten):
            return uncertain(first) if isinstance(first, Tensor) and first.strided else view(first)
        training = self._is_training(module)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p == 0 or not training:
                return first
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            if training and module.track_running_stats and module.running_mean is not None:
                statistics = Origin("statistics", self.names.get(id(module), ""))
                self._change(Tensor(frozenset({Alias(statistics)})), frame, node)
            return NEW
        if getattr(module, "inplace", False) is True:
            inner = replace(frame, module=self.names.get(id(module), frame.module))
            self._change(first, inner, node, f"{type(module).__name__}(inplace=True)")
            return first
        return NEW

    def _call_python(self, function: Callable[..., Any], arguments: _Arguments, frame: _Frame, node: ast.AST) -> Value:
        """A call of a function, a method or a partial of one."""
        inner, bound, keywords = source.innermost(function)
        if bound or keywords:
            bound_keywords: dict[str, Value] = {name: Known(one) for name, one in keywords.items()}
            arguments = replace(
                arguments,
                positional=[*map(Known, bound), *arguments.positional],
                keywords=bound_keywords | arguments.keywords,
            )
        module = frame.module
        if isinstance(inner, MethodType):
            owner = inner.__self__
            if _is_module(owner):
                module = self.names.get(id(owner), module)
                if inner.__name__ in ("__call__", "_call_impl", "_wrapped_call_impl"):
                    return self._call_module(owner, arguments, frame, node)
                is_torch = (inner.__module__ or "").partition(".")[0] == "torch"
                if is_torch and inner.__name__ == "forward":
                    return self._call_torch_module(owner, arguments, frame, node)
            elif isinstance(owner, type) and inner.__name__ == "apply" and _is_autograd_function(owner):
                arguments.positional.insert(0, NEW)
                return self._call_python(owner.forward, arguments, frame, node)  # type: ignore[attr-defined]
            arguments = replace(arguments, positional=[Known(owner), *arguments.positional])
            inner = inner.__func__
        if not isinstance(inner, FunctionType):
            return self._call_operation(getattr(inner, "__name__", ""), arguments, frame, node)
        package = (inner.__module__ or "").partition(".")[0]
        if package == "torch" or package in sys.stdlib_module_names:
            return self._call_operation(inner.__name__, arguments, frame, node)
        found = source.of(inner)
        return NEW if found is None else self._enter(found, inner, module, arguments)

    def _call_operation(self, name: str, arguments: _Arguments, frame: _Frame, node: ast.AST) -> Value:
        """A call of a function of torch, or of something else that has no source: by its name."""
        first: Value = arguments.positional[0] if arguments.positional else arguments.keywords.get("input", NEW)
        out = arguments.keywords.get("out")
        if out is not None and aliases(out):
            self._change(out, frame, node)
            return out
        if operations.changes_in_place(name):
            self._change(first, frame, node)
            return first
        if name == "checkpoint" and arguments.positional:
            inner = replace(arguments, positional=arguments.positional[1:])
            return self._call(first, inner, frame, node)
        if name in operations.INPLACE_ARGUMENT:
            inplace = arguments.get(operations.INPLACE_ARGUMENT[name], "inplace")
            if isinstance(inplace, Known) and inplace.object is True:
                self._change(first, frame, node)
                return first
            if "dropout" in name:
                p, training = arguments.get(1, "p"), arguments.get(2, "training")
                if (isinstance(p, Known) and p.object == 0) or (isinstance(training, Known) and not training.object):
                    return first
            return NEW
        return self._viewed(name, first)

    def _viewed(self, name: str, value: Value) -> Value:
        """What an operation that changes nothing gives back."""
        if name in operations.VIEWS:
            seen = view(value, strided=name in operations.STRIDED)
            return replace(seen, holder=True) if name in operations.SEVERAL else seen
        if name in operations.COPIES_IF_STRIDED:
            return NEW if isinstance(value, Tensor) and value.strided else uncertain(value)
        if name in operations.COPIES_IF_NEEDED:
            return uncertain(value)
        return NEW

    def _call(self, function: Value, arguments: _Arguments, frame: _Frame, node: ast.AST) -> Value:
        match function:
            case Known(object=called):
                if _is_module(called):
                    return self._call_module(called, arguments, frame, node)
                if isinstance(called, type):
                    return self._call_class(called, arguments)
                if isinstance(called, BuiltinFunctionType) and called.__module__ == "builtins":
                    return self._call_builtin(called.__name__, arguments)
                if callable(called):
                    return self._call_python(called, arguments, frame, node)
            case Closure():
                if isinstance(function.node, ast.Lambda):
                    names = [argument.arg for argument in function.node.args.args]
                    inner = replace(function.frame, names=dict(zip(names, arguments.positional, strict=False)))
                    inner.names = function.names | inner.names
                    return self._value(function.node.body, inner)
                outer: _Frame = function.frame
                found = replace(outer.source, node=function.node)
                return self._enter(found, None, outer.module, arguments, **function.names)
        return NEW

    def _call_class(self, called: type, arguments: _Arguments) -> Value:
        first = arguments.positional[0] if arguments.positional else NEW
        if called in (int, float, bool, str, range, slice):
            return NUMBER
        if called in (tuple, list):
            if isinstance(first, Items) or not arguments.positional:
                return first if arguments.positional else Items(())
            return _several([first])
        if called is dict:
            return Named(arguments.keywords)
        if called in (zip, enumerate):
            columns = [self._elements(one) for one in arguments.positional]
            columns = [[NUMBER] * len(columns[0]), *columns] if called is enumerate and columns else columns
            return Items(tuple(Items(row) for row in zip(*columns, strict=False)))
        if called in (reversed, map, set):
            return _several(arguments.positional)
        if arguments.keywords or arguments.positional:  # an output, which holds tensors
            return _several(list(arguments.every)) if issubclass(called, dict | tuple) else NEW
        return NEW

    def _call_builtin(self, name: str, arguments: _Arguments) -> Value:
        values = arguments.positional
        if name in ("isinstance", "issubclass", "hasattr", "callable", "len", "getattr"):
            known = [one.object for one in values if isinstance(one, Known)]
            if name == "len" and isinstance(values[0], Items):
                return Known(len(values[0].values))
            if name == "getattr" and len(known) >= 2 and values[1] is not NUMBER:
                default = values[2] if len(values) > 2 else NEW
                return self._attribute(values[0], str(known[1]), default)
            if len(known) == len(values):
                if name == "hasattr":
                    found = self._attribute(values[0], known[1], Known(_MISSING))
                    return Known(not (isinstance(found, Known) and found.object is _MISSING))
                if name in ("isinstance", "issubclass", "callable") or isinstance(known[0], (*_SCALARS, tuple, list)):
                    return _try(lambda: getattr(builtins, name)(*known))
            return NUMBER if name != "getattr" else NEW
        if name in ("iter", "next", "sorted", "filter"):
            return _several(values)
        if name in ("abs", "sum", "max", "min", "round", "pow", "divmod", "any", "all", "id", "hash", "print", "repr"):
            return NUMBER if not any(isinstance(one, Tensor) for one in values) else NEW
        return NEW

    # Attributes

    @staticmethod
    def _forward(module: "nn.Module") -> Callable[..., Any]:
        return vars(module).get("forward") or MethodType(type(module).forward, module)

    def _is_training(self, module: "nn.Module") -> bool:
        """A block is checkpointed in training mode alone; a submodule may be in eval mode by itself."""
        return module.training or not self.block.training

    def _attribute(self, value: Value, name: str, default: Value = NEW) -> Value:
        match value:
            case Known(object=owner):
                return self._known_attribute(owner, name, default)
            case Tensor(holder=False):
                if name in operations.VIEW_ATTRIBUTES:
                    return view(value, strided=name in ("T", "mT", "H", "mH"))
                if name in ("shape", "ndim", "is_cuda", "requires_grad"):
                    return NUMBER
            case Tensor():
                return value  # of an object that holds tensors, or may
            case Named():
                return value.values.get(name, default)
        return NEW

    def _known_attribute(self, owner: Any, name: str, default: Value) -> Value:
        if (id(owner), name) in self.assigned:
            return self.assigned[id(owner), name]
        if _is_module(owner):
            return self._module_attribute(owner, name, default)
        if isinstance(owner, ModuleType):
            found = vars(owner).get(name, _MISSING)
        elif isinstance(owner, (super, dict, list, tuple, str, set)) or _is_configuration(owner):
            found = getattr(owner, name, _MISSING)
        else:
            found = _static(owner, name)
        if found is _MISSING:
            return default
        return _of_object(found)

    def _module_attribute(self, owner: "nn.Module", name: str, default: Value) -> Value:
        if name == "training":
            return Known(self._is_training(owner))
        if name == "__call__":
            return Known(owner)
        if name in owner._modules:
            return Known(owner._modules[name])
        path = ".".join(filter(None, (self.names.get(id(owner), type(owner).__name__), name)))
        for kind, tensors in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            if name in tensors:
                if tensors[name] is None:
                    return NONE
                return Tensor(frozenset({Alias(Origin(kind, path))}))  # type: ignore[arg-type]
        if _POSITION.search(name):
            return NUMBER if name in vars(owner) else default
        if name == "forward":
            return Known(self._forward(owner))
        found = _static(owner, name)
        if name in vars(owner) and _is_tensor(found):
            return Tensor(frozenset({Alias(Origin("attribute", path))}))
        return default if found is _MISSING else _of_object(found)

    # Statements: each says whether the code after it is reached

    def _block(self, statements: Sequence[ast.stmt], frame: _Frame) -> bool:
        return all(self._statement(statement, frame) for statement in statements)

    def _statement(self, node: ast.stmt, frame: _Frame) -> bool:
        self._count()
        match node:
            case ast.Return():
                frame.returned.append(self._value(node.value, frame) if node.value is not None else NONE)
                return False
            case ast.Raise() | ast.Continue() | ast.Break():
                return False
            case ast.Assign():
                value = self._value(node.value, frame)
                for target in node.targets:
                    self._assign(target, value, frame)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, self._value(node.value, frame), frame)
            case ast.AugAssign():
                self._augment(node, frame)
            case ast.Expr():
                self._value(node.value, frame)
            case ast.If():
                return self._if(node, frame)
            case ast.For() | ast.AsyncFor():
                self._for(node, frame)
            case ast.While():
                self._branches(frame, [node.body, [], node.body])
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self._value(item.context_expr, frame)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value, frame)
                return self._block(node.body, frame)
            case ast.Try():
                reached = self._branches(frame, [[*node.body, *node.orelse], *(one.body for one in node.handlers)])
                return self._block(node.finalbody, frame) and reached
            case ast.Match():
                self._value(node.subject, frame)
                self._branches(frame, [[], *(case.body for case in node.cases)])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                frame.names[node.name] = Closure(node, frame.names, frame)
            case ast.Delete():
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        frame.names.pop(target.id, None)
        return True

    def _if(self, node: ast.If, frame: _Frame) -> bool:
        taken = self._truth(self._value(node.test, frame))
        if taken is not None:
            return self._block(node.body if taken else node.orelse, frame)
        name, is_none = _none_test(node.test)
        given: list[dict[str, Value]] = [{}, {}]
        if name is not None:
            given[0 if is_none else 1] = {name: NONE}
        return self._branches(frame, [node.body, node.orelse], given)

    def _branches(
        self, frame: _Frame, bodies: Sequence[Sequence[ast.stmt]], given: Sequence[dict[str, Value]] = ()
    ) -> bool:
        """Runs each on the names as they are now, and joins what comes of it."""
        before, ends = frame.names, []
        for index, body in enumerate(bodies):
            frame.names = before | (given[index] if given else {})
            if self._block(body, frame):
                ends.append(frame.names)
        if not ends:
            frame.names = before
            return False
        shared = dict.fromkeys(name for end in ends for name in end)
        frame.names = {name: joined([end[name] for end in ends if name in end]) for name in shared}
        return True

    def _for(self, node: ast.For | ast.AsyncFor, frame: _Frame) -> None:
        values = self._elements(self._value(node.iter, frame))
        before = dict(frame.names)
        for value in values[:_ELEMENTS]:
            self._assign(node.target, value, frame)
            self._block(node.body, frame)
        for name, value in before.items():
            if name in frame.names and frame.names[name] is not value and not values:
                frame.names[name] = joined([frame.names[name], value])
        self._block(node.orelse, frame)

    def _elements(self, value: Value) -> list[Value]:
        """What a loop over a value runs through, twice where that is not known: what it did the first time counts."""
        match value:
            case Items():
                return list(value.values)
            case Known(object=many) if _is_module(many):
                return [Known(one) for one in many] if hasattr(type(many), "__iter__") else []
            case Known(object=list() | tuple() | range() | set() as many):
                return [_of_object(one) for one in many][:_ELEMENTS]
            case Known(object=dict() as many):
                return [_of_object(one) for one in many][:_ELEMENTS]
            case Number():
                return [NUMBER, NUMBER]
            case Tensor():
                return [Tensor(value.aliases)] * 2
        return [NEW, NEW]

    def _assign(self, target: ast.expr, value: Value, frame: _Frame) -> None:
        match target:
            case ast.Name():
                frame.names[target.id] = value
            case ast.Tuple() | ast.List():
                self._unpack(target.elts, value, frame)
            case ast.Starred():
                self._assign(target.value, value, frame)
            case ast.Subscript():
                container = self._value(target.value, frame)
                if not (isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)):
                    self._change(container, frame, target, f"{ast.unparse(target)} = …")
                self._store(target, container, value, frame)
            case ast.Attribute():
                self._assign_attribute(target, value, frame)

    def _store(self, target: ast.Subscript, container: Value, value: Value, frame: _Frame) -> None:
        """Keeps what is put into a dict or a list."""
        if not isinstance(target.value, ast.Name):
            return
        name, key = target.value.id, self._value(target.slice, frame)
        if isinstance(container, Named) and isinstance(key, Known) and isinstance(key.object, str):
            frame.names[name] = Named({**container.values, key.object: value}, container.rest)
        elif isinstance(container, Items):
            frame.names[name] = _several([container, value])

    def _assign_attribute(self, target: ast.Attribute, value: Value, frame: _Frame) -> None:
        owner = self._value(target.value, frame)
        if isinstance(owner, Tensor):
            if target.attr == "data":
                self._change(owner, frame, target, f"{ast.unparse(target)} = …")
        elif isinstance(owner, Known):
            found = self._known_attribute(owner.object, target.attr, NEW)
            # A plain attribute that is set is no change of the tensor that it was before
            state = {alias.origin for alias in aliases(found) if alias.origin.kind not in ("input", "attribute")}
            if state and not state & {alias.origin for alias in aliases(value)}:
                self._change(found, frame, target, f"{ast.unparse(target)} = …")
            else:
                self.assigned[id(owner.object), target.attr] = value

    def _unpack(self, targets: Sequence[ast.expr], value: Value, frame: _Frame) -> None:
        if isinstance(value, Items) and not any(isinstance(target, ast.Starred) for target in targets):
            values: Sequence[Value] = value.values if len(value.values) == len(targets) else [_several([value])]
        elif isinstance(value, Number):
            values = [NUMBER]
        else:
            values = [Tensor(aliases(value))]
        if len(values) != len(targets):
            values = [values[0] if values else NEW] * len(targets)
        for target, one in zip(targets, values, strict=True):
            self._assign(target, one, frame)

    def _augment(self, node: ast.AugAssign, frame: _Frame) -> None:
        load: ast.expr
        match node.target:
            case ast.Name():
                load = ast.Name(node.target.id, ast.Load())
            case ast.Attribute():
                load = ast.Attribute(node.target.value, node.target.attr, ast.Load())
            case _:
                load = node.target.value
        held, other = self._value(load, frame), self._value(node.value, frame)
        if isinstance(node.target, ast.Subscript) or isinstance(held, Tensor):
            self._change(held, frame, node)
        elif isinstance(node.target, ast.Name):
            frame.names[node.target.id] = self._binary(node.op, held, other)
        elif isinstance(owner := self._value(node.target.value, frame), Known):
            self.assigned[id(owner.object), node.target.attr] = NUMBER

    # Expressions

    def _value(self, node: ast.expr, frame: _Frame) -> Value:
        self._count()
        match node:
            case ast.Name():
                return self._name(node.id, frame)
            case ast.Constant():
                return Known(node.value)
            case ast.Attribute():
                return self._attribute(self._value(node.value, frame), node.attr)
            case ast.Call():
                return self._call_expression(node, frame)
            case ast.Tuple() | ast.List():
                return self._display(node.elts, frame)
            case ast.Dict():
                return self._dict(node, frame)
            case ast.Subscript():
                return self._subscript(node, frame)
            case ast.BinOp():
                return self._binary(node.op, self._value(node.left, frame), self._value(node.right, frame))
            case ast.UnaryOp():
                value = self._value(node.operand, frame)
                truth = self._truth(value)
                if isinstance(node.op, ast.Not):
                    return NUMBER if truth is None else Known(not truth)
                if isinstance(node.op, ast.USub) and isinstance(value, Known) and isinstance(value.object, int | float):
                    return Known(-value.object)
                return value if isinstance(value, Number) else NEW
            case ast.BoolOp():
                return self._bool(node, frame)
            case ast.Compare():
                return self._compare(node, frame)
            case ast.IfExp():
                taken = self._truth(self._value(node.test, frame))
                if taken is not None:
                    return self._value(node.body if taken else node.orelse, frame)
                return joined([self._value(node.body, frame), self._value(node.orelse, frame)])
            case ast.NamedExpr():
                value = self._value(node.value, frame)
                frame.names[node.target.id] = value
                return value
            case ast.Starred() | ast.Await():
                return self._value(node.value, frame)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._comprehension(node.generators, [node.elt], frame)
            case ast.DictComp():
                return self._comprehension(node.generators, [node.value], frame)
            case ast.Lambda():
                return Closure(node, frame.names, frame)
            case ast.JoinedStr():
                return NUMBER
        return NEW

    def _name(self, name: str, frame: _Frame) -> Value:
        if name in frame.names:
            return frame.names[name]
        if name in frame.cells:
            return _of_object(frame.cells[name])
        places = (frame.function.__globals__, vars(builtins)) if frame.function is not None else (vars(builtins),)
        for place in places:
            if name in place:
                return _of_object(place[name])
        return NEW

    def _call_expression(self, node: ast.Call, frame: _Frame) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and "__class__" in frame.cells:
            owner = next(iter(frame.names.values()), NEW)
            if not isinstance(owner, Known):
                return NEW
            instance = owner.object
            return _try(lambda: super(frame.cells["__class__"], instance))
        arguments = self._arguments(node, frame)
        if isinstance(node.func, ast.Attribute):
            of = self._value(node.func.value, frame)
            if not isinstance(of, Known):
                return self._call_method(of, node.func.attr, arguments, frame, node)
            if isinstance(of.object, Mapping) and node.func.attr in ("get", "get_interface"):
                return self._look_up(of.object, node.func.attr, arguments)
            return self._call(self._attribute(of, node.func.attr), arguments, frame, node)
        return self._call(self._value(node.func, frame), arguments, frame, node)

    @staticmethod
    def _look_up(mapping: Mapping[Any, Any], method: str, arguments: _Arguments) -> Value:
        """The function that a table names, as transformers' attention functions are found."""
        known = [one.object for one in arguments.positional if isinstance(one, Known)]
        if len(known) != len(arguments.positional):
            return NEW
        return _try(lambda: getattr(mapping, method)(*known))

    def _call_method(
        self,
        owner: Tensor | Number | Items | Named | Closure,
        name: str,
        arguments: _Arguments,
        frame: _Frame,
        node: ast.AST,
    ) -> Value:
        """A method of a tensor or of a value that is not known."""
        if isinstance(owner, Named):
            key = arguments.positional[0] if arguments.positional else NEW
            if name in ("get", "pop") and isinstance(key, Known) and isinstance(key.object, str):
                default = arguments.positional[1] if len(arguments.positional) > 1 else NONE
                if key.object in owner.values:
                    return owner.values[key.object]
                return default if owner.rest is None else _renamed(owner.rest, key.object, certain=False)
            return _several([owner])
        if isinstance(owner, Items | Number | Closure):
            return _several([owner])
        if owner.holder:
            return Tensor(owner.aliases, holder=name in ("items", "values", "keys")) if name != "update" else NEW
        if name in operations.NUMBERS:
            return NUMBER
        if operations.changes_in_place(name):
            self._change(owner, frame, node)
            return owner
        return self._viewed(name, owner)

    def _arguments(self, node: ast.Call, frame: _Frame) -> _Arguments:
        arguments = _Arguments([], {})
        for one in node.args:
            value = self._value(one, frame)
            if not isinstance(one, ast.Starred):
                arguments.positional.append(value)
            elif isinstance(value, Items):
                arguments.positional.extend(value.values)
            elif isinstance(value, Known) and isinstance(value.object, tuple | list):
                arguments.positional.extend(map(_of_object, value.object))
            else:
                arguments.rest = Tensor(aliases(value))
        for keyword in node.keywords:
            value = self._value(keyword.value, frame)
            if keyword.arg is not None:
                arguments.keywords[keyword.arg] = value
            elif isinstance(value, Named):
                arguments.keywords |= value.values
                arguments.others = value.rest
            else:
                arguments.others = Tensor(aliases(value))
        return arguments

    def _display(self, elements: Sequence[ast.expr], frame: _Frame) -> Value:
        values: list[Value] = []
        for element in elements:
            value = self._value(element, frame)
            if not isinstance(element, ast.Starred):
                values.append(value)
            elif isinstance(value, Items):
                values.extend(value.values)
            else:
                return _several([*values, value, *(self._value(one, frame) for one in elements)])
        return Items(tuple(values))

    def _dict(self, node: ast.Dict, frame: _Frame) -> Value:
        named: dict[str, Value] = {}
        rest: list[Value] = []
        for key, one in zip(node.keys, node.values, strict=True):
            value = self._value(one, frame)
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                named[key.value] = value
            elif key is None and isinstance(value, Named):
                named |= value.values
                rest += [value.rest] if value.rest is not None else []
            else:
                rest.append(value)
        return Named(named, _several(rest) if rest else None)

    def _subscript(self, node: ast.Subscript, frame: _Frame) -> Value:
        value = self._value(node.value, frame)
        if isinstance(node.slice, ast.Slice):
            if isinstance(value, Items):
                bounds = [
                    None if one is None else self._value(one, frame) for one in (node.slice.lower, node.slice.upper)
                ]
                if node.slice.step is None and all(one is None or isinstance(one, Known) for one in bounds):
                    lower, upper = (None if one is None else one.object for one in bounds)  # type: ignore[union-attr]
                    return Items(value.values[lower:upper])
            return value if isinstance(value, Tensor | Number) else _several([value])
        key = self._value(node.slice, frame)
        match value:
            case Items():
                if (
                    isinstance(key, Known)
                    and isinstance(key.object, int)
                    and -len(value.values) <= key.object < len(value.values)
                ):
                    return value.values[key.object]
                return joined(value.values) if value.values else NEW
            case Named():
                if isinstance(key, Known) and key.object in value.values:
                    return value.values[key.object]
                return _several([value])
            case Known(object=held):
                if isinstance(key, Known) and (isinstance(held, Mapping | tuple | list) or _is_module(held)):
                    return _try(lambda: held[key.object])
                if _is_module(held):  # an expert: they are alike
                    return next((Known(one) for one in held.children()), NEW)
                return NEW
            case Number():
                return NUMBER
            case Tensor(holder=True):
                return Tensor(value.aliases)
        return view(value) if _is_basic(node.slice, key) else NEW

    def _binary(self, kind: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(left, Items) and isinstance(right, Items) and isinstance(kind, ast.Add):
            return Items(left.values + right.values)
        if isinstance(left, Items) or isinstance(right, Items):
            return _several([left, right])
        if isinstance(left, Known) and isinstance(right, Known) and type(kind) in _BINARY:
            if isinstance(left.object, _SCALARS) and isinstance(right.object, _SCALARS):
                return _try(lambda: _BINARY[type(kind)](left.object, right.object))
            return NEW
        return NUMBER if all(isinstance(one, Number | Known) for one in (left, right)) else NEW

    def _bool(self, node: ast.BoolOp, frame: _Frame) -> Value:
        is_or, possible = isinstance(node.op, ast.Or), []
        for one in node.values:
            value = self._value(one, frame)
            truth = self._truth(value)
            if truth is None:
                possible.append(value)
            elif truth is is_or:
                return value if not possible else joined([*possible, value])
            elif one is node.values[-1]:
                possible.append(value)
        return joined(possible) if possible else NUMBER

    def _compare(self, node: ast.Compare, frame: _Frame) -> Value:
        left, rights = self._value(node.left, frame), [self._value(one, frame) for one in node.comparators]
        if len(rights) != 1:
            return NUMBER
        right, kind = rights[0], type(node.ops[0])
        if kind in (ast.Is, ast.IsNot):
            if isinstance(left, Known) and isinstance(right, Known):
                return Known((left.object is right.object) is (kind is ast.Is))
            if isinstance(left, Items | Named) and right == NONE:
                return Known(kind is ast.IsNot)
            return NUMBER
        if isinstance(left, Known) and isinstance(right, Known) and isinstance(left.object, _SCALARS):
            if isinstance(right.object, (*_SCALARS, tuple, list, dict, set, frozenset)):
                return _try(lambda: _COMPARE[kind](left.object, right.object))
            return NUMBER
        if kind in (ast.In, ast.NotIn) and isinstance(left, Known) and isinstance(right, Named) and right.rest is None:
            return Known((left.object in right.values) is (kind is ast.In))
        if kind in (ast.In, ast.NotIn) or all(isinstance(one, Number | Known) for one in (left, right)):
            return NUMBER
        return NEW

    def _comprehension(
        self, generators: Sequence[ast.comprehension], elements: Sequence[ast.expr], frame: _Frame
    ) -> Value:
        before, values = frame.names, []
        frame.names = dict(before)
        for generator in generators:
            for value in self._elements(self._value(generator.iter, frame))[:_ELEMENTS]:
                self._assign(generator.target, value, frame)
                for condition in generator.ifs:
                    self._value(condition, frame)
                values += [self._value(element, frame) for element in elements]
        frame.names = before
        return _several(values)

    @staticmethod
    def _truth(value: Value) -> bool | None:
        match value:
            case Known(object=held):
                if isinstance(held, (*_SCALARS, list, tuple, dict, set, frozenset)):
                    return bool(held)
                return True if _is_module(held) or callable(held) else None
            case Items():
                return bool(value.values)
        return None

    def _change(self, value: Value, frame: _Frame, node: ast.AST, statement: str | None = None) -> None:
        """Takes down that a tensor is changed in place."""
        if not isinstance(value, Tensor) or value.holder:
            return
        for alias in value.aliases:
            text = statement or ast.unparse(node)
            self.recorder.add(
                alias, frame.module, " ".join(text.split())[:100], frame.source.file, frame.source.line(node)
            )

    def _count(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise _Enough


def _input(argument: ast.arg, default: ast.expr | None, *, likely: bool) -> Value:
    """What an argument from outside is, by its annotation, its default and how it is used."""
    origin = frozenset({Alias(Origin("input", argument.arg))})
    if argument.arg in _CACHES:
        return NONE
    if argument.arg == "use_cache":
        return Known(False)
    if argument.annotation is not None:
        text = ast.unparse(argument.annotation)
        if _HOLDER.search(text):
            return Tensor(origin, holder=True)
        if _TENSOR.search(text):
            return Tensor(origin)
        return NUMBER if _NUMBER.search(text) else Tensor(origin, holder=True)
    if isinstance(default, ast.Constant) and default.value is not None:
        return NUMBER
    return Tensor(origin, holder=not likely)


def _is_used_as_tensor(node: ast.AST, name: str) -> bool:
    """Whether an argument without annotation is one: it has methods called or a shape asked for, or is sliced."""
    for one in ast.walk(node):
        match one:
            case ast.Attribute(value=ast.Name(id=found)) if found == name:
                if one.attr in {"shape", "dtype", "device", *operations.NUMBERS, *operations.VIEWS} | (
                    operations.COPIES_IF_NEEDED | operations.COPIES_IF_STRIDED
                ) or operations.changes_in_place(one.attr):
                    return True
            case ast.Subscript(value=ast.Name(id=found)) if found == name and _has_slices(one.slice):
                return True
            case ast.BinOp(left=ast.Name(id=found)) | ast.BinOp(right=ast.Name(id=found)) if found == name:
                return True
            case ast.AugAssign(target=ast.Name(id=found)) if found == name:
                if not isinstance(one.value, ast.Constant):
                    return True
    return False


def _has_slices(node: ast.expr) -> bool:
    return any(
        isinstance(one, ast.Slice) or (isinstance(one, ast.Constant) and one.value is ...) for one in ast.walk(node)
    )


def _is_basic(node: ast.expr, key: Value) -> bool:
    """Whether an index gives a view: it is made of numbers, slices, None and Ellipsis."""
    if isinstance(node, ast.Tuple):
        values = key.values if isinstance(key, Items) else (NEW,) * len(node.elts)
        return len(values) == len(node.elts) and all(
            isinstance(one, ast.Slice) or _is_basic(one, value) for one, value in zip(node.elts, values, strict=True)
        )
    if isinstance(key, Number):
        return True
    return (
        isinstance(key, Known)
        and (key.object is ... or isinstance(key.object, int | slice | None))
        and not isinstance(key.object, bool)
    )


def _none_test(node: ast.expr) -> tuple[str | None, bool]:
    """The name that `name is None` or `name is not None` asks about, and whether it is the former."""
    match node:
        case ast.Compare(
            left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as kind], comparators=[ast.Constant(None)]
        ):
            return name, isinstance(kind, ast.Is)
    return None, False


def _several(values: Sequence[Value]) -> Tensor:
    """A container of these, in a number and an order that are not known."""
    return Tensor(frozenset(alias for one in values for alias in aliases(one)), holder=True)


def _renamed(star: Value, name: str, *, certain: bool) -> Tensor:
    """An argument that comes out of `*args` or `**kwargs`, under the name that it has here."""
    found = {
        Alias(Origin("input", name) if alias.origin.name.startswith("*") else alias.origin, alias.certain and certain)
        for alias in aliases(star)
    }
    return Tensor(frozenset(found))


def _of_object(found: Any) -> Value:
    """A value for an object: what is a tensor outside of any module's state is not followed."""
    if _is_tensor(found):
        return NEW
    return Known(found)


def _try(made: Callable[[], Any]) -> Value:
    try:
        return _of_object(made())
    except Exception:  # what fails here is not known
        return NEW


def _static(owner: Any, name: str) -> Any:
    """An attribute, without running code for it; methods are bound."""
    try:
        own = vars(owner)
    except TypeError:
        own = {}
    if name in own and not isinstance(owner, type):
        return own[name]
    found = inspect.getattr_static(owner, name, _MISSING)
    match found:
        case FunctionType():
            return found if isinstance(owner, type) else MethodType(found, owner)
        case staticmethod():
            return found.__func__
        case classmethod():
            return MethodType(found.__func__, owner if isinstance(owner, type) else type(owner))
        case property() | MemberDescriptorType() | GetSetDescriptorType():
            return _MISSING
    return found


def _is_configuration(found: Any) -> bool:
    """One of transformers: its attributes have other names, too."""
    return hasattr(type(found), "attribute_map")


def _is_module(found: Any) -> bool:
    return "torch" in sys.modules and isinstance(found, sys.modules["torch"].nn.Module)


def _is_tensor(found: Any) -> bool:
    return "torch" in sys.modules and isinstance(found, sys.modules["torch"].Tensor)


def _is_autograd_function(found: type) -> bool:
    return issubclass(found, sys.modules["torch"].autograd.Function)
