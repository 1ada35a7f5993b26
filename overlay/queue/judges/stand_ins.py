"""Stand-ins for what upstream's code imports: as much of torch and of the packages' other modules as the judges need.

They are made once a process, and a process judges one fault of one release. Whatever has no stand-in is an `Unknown`:
it may be imported, but using it raises, and `missed` says that it was used, should the code have caught that. Nothing
here computes: a tensor is its flags.
"""

import builtins
import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any, NoReturn

from overlay.versions import key

missed: list[str] = []
"""What was used and has no stand-in."""


class NoStandInError(Exception):
    """Something was used that has no stand-in."""


def miss(name: str) -> NoReturn:
    """Raises NoStandInError, and remembers it."""
    missed.append(name)
    raise NoStandInError(name)


class Unknown:
    """Something that has no stand-in."""

    def __init__(self, name: str) -> None:
        vars(self)["_name"] = name

    def _miss(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        miss(vars(self)["_name"])

    __call__ = __iter__ = __bool__ = __len__ = __getitem__ = __contains__ = __enter__ = __mro_entries__ = _miss
    __instancecheck__ = __subclasscheck__ = __or__ = __ror__ = __eq__ = __hash__ = __setattr__ = _miss

    def __getattr__(self, name: str) -> Any:
        self._miss()


class Module(ModuleType):
    """A module: what has a stand-in, and everything else as `Unknown`."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        vars(self).update(contents)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self.__name__}.{name}")


class _State:
    gradients = True
    task = -1
    """The number of the backward that runs, or -1."""


state = _State()


class set_grad_enabled(ContextDecorator):
    """`torch.set_grad_enabled`, as a context manager or a decorator."""

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before, state.gradients = state.gradients, self._mode

    def __exit__(self, *_error: object) -> None:
        state.gradients = self._before


LEAVES_ONLY = "you can only change requires_grad flags of leaf variables."


class Tensor:
    """A tensor: whether it is a leaf, and whether it requires gradients."""

    def __init__(self, requires_grad: bool = False, is_leaf: bool = True) -> None:
        self.is_leaf = is_leaf
        self._requires_grad = requires_grad

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if not self.is_leaf and not flag:
            raise RuntimeError(LEAVES_ONLY)
        self._requires_grad = flag

    def requires_grad_(self, flag: bool = True) -> "Tensor":
        self.requires_grad = flag
        return self

    def detach(self) -> "Tensor":
        return Tensor()

    def view_as(self, _other: "Tensor") -> "Tensor":
        graph = self.requires_grad and state.gradients
        return Tensor(graph, not graph)

    def is_floating_point(self) -> bool:
        return True

    def is_complex(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "ds_")):  # what others hang on a tensor
            raise AttributeError(name)
        miss(f"torch.Tensor.{name}")


class Parameter(Tensor):
    """A leaf that a module owns."""

    def __init__(self, requires_grad: bool = True) -> None:
        super().__init__(requires_grad)


class Handle:
    """What takes a hook away again."""

    def __init__(self, hooks: dict[int, Any], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        self._hooks.pop(self._number, None)


_numbers = count()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class NNModule:
    """`torch.nn.Module`: parameters, submodules, forward hooks, and a call in the form that torch has had since 2.0:
    `__call__` is `_wrapped_call_impl`, which calls `_call_impl`, which reads `forward` or `_slow_forward`."""

    training = True
    _compiled_call_impl: Any = None

    def __init__(self) -> None:
        for name in (*_HOOKS, "_modules", "_parameters"):
            vars(self)[name] = OrderedDict()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, NNModule):
            vars(self)["_modules"][name] = value
        elif isinstance(value, Parameter):
            vars(self)["_parameters"][name] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        for kind in ("_modules", "_parameters"):
            if name in vars(self).get(kind, ()):
                return vars(self)[kind][name]
        if name.startswith("_") or not hasattr(_REAL, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        miss(f"torch.nn.Module.{name}")

    def forward(self, *_arguments: Any) -> Any:
        miss("torch.nn.Module.forward")

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        forward_call = self._slow_forward if _tracing() else self.forward
        for hook, with_kwargs in list(self._forward_pre_hooks.values()):
            found = hook(self, args, kwargs) if with_kwargs else hook(self, args)
            if found is not None and with_kwargs:
                args, kwargs = found
            elif found is not None:
                args = found if isinstance(found, tuple) else (found,)
        result = forward_call(*args, **kwargs)
        for hook, with_kwargs in list(self._forward_hooks.values()):
            found = hook(self, args, kwargs, result) if with_kwargs else hook(self, args, result)
            result = result if found is None else found
        return result

    def _wrapped_call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)

    __call__ = _wrapped_call_impl

    def _hook(self, kind: str, hook: Any, prepend: bool, with_kwargs: bool) -> Handle:
        number, hooks = next(_numbers), vars(self)[kind]
        hooks[number] = (hook, with_kwargs)
        if prepend:
            hooks.move_to_end(number, last=False)
        return Handle(hooks, number)

    def register_forward_pre_hook(self, hook: Any, *, prepend: bool = False, with_kwargs: bool = False) -> Handle:
        return self._hook("_forward_pre_hooks", hook, prepend, with_kwargs)

    def register_forward_hook(
        self, hook: Any, *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> Handle:
        return self._hook("_forward_hooks", hook, prepend, with_kwargs)

    def named_modules(self, memo: Any = None, prefix: str = "") -> Iterator[tuple[str, "NNModule"]]:
        yield prefix, self
        for name, module in self._modules.items():
            yield from module.named_modules(None, f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator["NNModule"]:
        return (module for _, module in self.named_modules())

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        for module in self.modules() if recurse else [self]:
            yield from module._parameters.values()

    def train(self, mode: bool = True) -> "NNModule":
        for module in self.modules():
            vars(module)["training"] = mode
        return self

    def eval(self) -> "NNModule":
        return self.train(False)

    def compile(self, *_arguments: Any, **_options: Any) -> None:
        self._compiled_call_impl = self._call_impl


_REAL = ModuleType("the names of torch.nn.Module that have no stand-in")
for _name in (
    "apply",
    "children",
    "named_children",
    "named_parameters",
    "buffers",
    "state_dict",
    "to",
    "requires_grad_",
):
    setattr(_REAL, _name, None)


def _tracing() -> Any:
    return None


class FSDPModule:
    """`torch.distributed.fsdp.FSDPModule`: `fully_shard` makes a subclass of it and of the module's class."""

    _judged_state: Any = None

    def _get_fsdp_state(self) -> Any:
        return self._judged_state


class Name:
    """A member of an enumeration, as far as its name is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name


class FSDPGroup:
    """FSDP2's state of a group of parameters."""

    reduce_grads = True

    def __init__(self, training_state: str) -> None:
        self._training_state = Name(training_state)


class FSDPState:
    """FSDP2's state of a module, with the names of torch 2.6 to 2.14."""

    def __init__(self, training_state: str, group: str) -> None:
        self._training_state = Name(training_state)
        self._fsdp_param_group = FSDPGroup(group)
        self._fsdp_param_groups = [self._fsdp_param_group]
        self._state_ctx = Module("state", is_last_backward=True)


def shard(module: NNModule) -> None:
    """As `fully_shard` does: another class, and hooks on the module."""
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    vars(module)["_judged_state"] = FSDPState("IDLE", "IDLE")


class Checkpoint:
    """A checkpoint function that is reentrant: the forward has no gradients, and the recompute comes in a backward,
    which is right after it here.

    `calls` are what it was given, `depth` is above 0 while it runs one; `before_recompute` is called between the two.
    """

    def __init__(self, before_recompute: Callable[[], None] = lambda: None) -> None:
        self.calls: list[Any] = []
        self.depth = 0
        self._before_recompute = before_recompute

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(function)
        self.depth += 1
        try:
            with set_grad_enabled(False):
                result = function(*args, **kwargs)
            self._before_recompute()
            state.task = 1
            with set_grad_enabled(True):
                function(*args, **kwargs)
        finally:
            state.task = -1
            self.depth -= 1
        return result


reentrant: list[Any] = []
"""What `use_reentrant` was in each call of `torch.utils.checkpoint.checkpoint`."""


def checkpoint(
    function: Any,
    *args: Any,
    use_reentrant: Any = None,
    context_fn: Any = None,
    determinism_check: Any = None,
    debug: Any = None,
    early_stop: Any = None,
    preserve_rng_state: Any = True,
    **kwargs: Any,
) -> Any:
    """`torch.utils.checkpoint.checkpoint`: the forward alone."""
    reentrant.append(use_reentrant)
    with set_grad_enabled(False) if use_reentrant else nullcontext():
        return function(*args, **kwargs)


checkpoint.__module__ = "torch.utils.checkpoint"


class Function:
    """`torch.autograd.Function`."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        with set_grad_enabled(False):
            return cls.forward(Context(), *args)

    @staticmethod
    def forward(*_arguments: Any) -> Any:
        miss("torch.autograd.Function.forward")


class Context:
    """What a forward may save for its backward."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


class Logger:
    """The logger of transformers."""

    def _nothing(self, *_arguments: Any, **_keywords: Any) -> None:
        return None

    debug = info = warning = error = warning_once = info_once = warning_advice = _nothing


def _same(value: Any = None, *_arguments: Any, **_keywords: Any) -> Any:
    return value


class Version:
    """`packaging.version.Version`, as far as it is compared."""

    def __init__(self, text: str) -> None:
        self._key = key(text)
        self.base_version = text

    def __lt__(self, other: "Version") -> bool:
        return self._key < other._key

    def __le__(self, other: "Version") -> bool:
        return self._key <= other._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class InvalidVersion(ValueError):
    """`packaging.version.InvalidVersion`."""


def _torch() -> Mapping[str, Module]:
    functions = {
        "Tensor": Tensor,
        "is_grad_enabled": lambda: state.gradients,
        "set_grad_enabled": set_grad_enabled,
        "no_grad": partial(set_grad_enabled, False),
        "enable_grad": partial(set_grad_enabled, True),
        "empty": lambda *_sizes, requires_grad=False, **_options: Tensor(requires_grad),
        "is_tensor": lambda value: isinstance(value, Tensor),
        "compile": _same,
    }
    return {
        "torch": Module("torch", **functions),
        "torch._C": Module("torch._C", _current_graph_task_id=lambda: state.task, _get_tracing_state=_tracing),
        "torch.nn": Module("torch.nn", Module=NNModule, Parameter=Parameter),
        "torch.compiler": Module(
            "torch.compiler",
            is_compiling=lambda: False,
            is_dynamo_compiling=lambda: False,
            disable=_same,
            assume_constant_result=_same,
        ),
        "torch.autograd": Module("torch.autograd", Function=Function),
        "torch.autograd.function": Module(
            "torch.autograd.function", Function=Function, FunctionCtx=Context, once_differentiable=_same
        ),
        "torch.utils": Module("torch.utils"),
        "torch.utils.checkpoint": Module(
            "torch.utils.checkpoint", checkpoint=checkpoint, noop_context_fn=lambda: (nullcontext(), nullcontext())
        ),
        "torch.distributed": Module("torch.distributed"),
        "torch.distributed.fsdp": Module("torch.distributed.fsdp", FSDPModule=FSDPModule),
        "packaging": Module("packaging"),
        "packaging.version": Module("packaging.version", parse=Version, Version=Version, InvalidVersion=InvalidVersion),
    }


def _transformers() -> Mapping[str, Module]:
    logging = Module("transformers.utils.logging", get_logger=lambda *_name: Logger())
    available: Mapping[str, Any] = {"is_torch_available": lambda: True, "requires": lambda **_backends: _same}
    return {
        "transformers.utils": Module("transformers.utils", logging=logging, **available),
        "transformers.utils.logging": logging,
        "transformers.utils.import_utils": Module("transformers.utils.import_utils", **available),
        "transformers.utils.output_capturing": Module(
            "transformers.utils.output_capturing", _active_collector=ContextVar("collector", default=None)
        ),
    }


class Importer:
    """An `__import__` that finds stand-ins, the standard library, and `Unknown` for everything else."""

    def __init__(self, *more: Module) -> None:
        self._known: dict[str, Any] = {**_torch(), **_transformers(), **{module.__name__: module for module in more}}
        for name, module in self._known.items():
            parent, _, last = name.rpartition(".")
            if parent in self._known:
                setattr(self._known[parent], last, module)
        sys.modules.update({name: one for name, one in self._known.items() if name.startswith(("torch", "packaging"))})

    @property
    def builtins(self) -> Mapping[str, Any]:
        """Those of Python, with this import."""
        return {**vars(builtins), "__import__": self}

    def __call__(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        wanted = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
        top = wanted.partition(".")[0]
        if top in sys.stdlib_module_names:
            return builtins.__import__(name, None, None, fromlist or (), 0)
        found: ModuleType = self._known.setdefault(wanted, Module(wanted))
        return found if fromlist or level else self._known.setdefault(top, Module(top))
