"""How layers come to their `forward`: classes made here, and every layer class of the package.

`python classes_worker.py RESULT.json` writes two tables:

- made: for each way to inherit and each set-up (kind of checkpointing, with hooks on the layer or without) what was
  observed in a forward and a backward. Calls are those of the layer's linear module.
- package: for each layer class what `inspect` says of its `forward`, before any layer was called; how often the
  checkpoint and the computation itself are entered in a call; and whether after calls, with hooks among them, the class
  reads as before. And the modules that cannot be imported.
"""

import abc
import functools
import gc
import hashlib
import importlib
import inspect
import json
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

Observed = dict[str, Any]
T = TypeVar("T")

# ---- classes made here -----------------------------------------------------------------------------------------------

MADE: dict[str, Callable[[], type[nn.Module]]] = {}


def way(name: str) -> Callable[[Callable[[], type[nn.Module]]], Callable[[], type[nn.Module]]]:
    def register(make: Callable[[], type[nn.Module]]) -> Callable[[], type[nn.Module]]:
        MADE[name] = make
        return make

    return register


def base() -> type[nn.Module]:
    class Base(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x).tanh() * scale

    return Base


@way("a forward of its own")
def own() -> type[nn.Module]:
    return base()


@way("a subclass without a forward")
def inherited() -> type[nn.Module]:
    class Layer(base()):
        pass

    return Layer


@way("super().forward in a chain")
def chain() -> type[nn.Module]:
    class Middle(base()):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale=scale) + 1

    class Layer(Middle):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale=scale) * 2

    return Layer


@way("a mixin before the layer, with super().forward")
def mixin() -> type[nn.Module]:
    class Mixin:
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale=scale) * 3

    class Layer(Mixin, base()):
        pass

    return Layer


@way("a mixin before the layer, with no super().forward")
def mixin_alone() -> type[nn.Module]:
    class Mixin:
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x) * scale

    class Layer(Mixin, base()):
        pass

    return Layer


@way("a mixin after the layer")
def mixin_after() -> type[nn.Module]:
    class Mixin:
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            raise AssertionError

    class Layer(base(), Mixin):
        pass

    return Layer


@way("an abstract base, the forward later in the order of resolution")
def later() -> type[nn.Module]:
    class Abstract(GradientCheckpointingLayer):
        pass

    class Real(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x).tanh() * scale

    class Layer(Abstract, Real):
        pass

    return Layer


@way("an abstract method, and the forward in a subclass")
def abstract() -> type[nn.Module]:
    class Abstract(GradientCheckpointingLayer, abc.ABC):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @abc.abstractmethod
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor: ...

    class Layer(Abstract):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x).tanh() * scale

    try:
        Abstract()
    except TypeError:
        return Layer
    raise AssertionError("a class with an abstract forward was made an instance of")


@way("a diamond")
def diamond() -> type[nn.Module]:
    root = base()

    class Left(root):
        pass

    class Right(root):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x) * 7

    class Layer(Left, Right):
        pass

    return Layer


@way("functools.wraps of the parent's forward, which is not called")
def wraps() -> type[nn.Module]:
    parent = base()

    class Layer(parent):
        @functools.wraps(parent.forward)
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x).sigmoid() * scale

    return Layer


@way("functools.wraps of the parent's forward, which is called")
def wraps_and_calls() -> type[nn.Module]:
    parent = base()

    class Layer(parent):
        @functools.wraps(parent.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return parent.forward(self, *args, **kwargs) + 1

    return Layer


@way("the parent's forward under its own name")
def alias() -> type[nn.Module]:
    parent = base()

    class Layer(parent):
        forward = parent.forward

    return Layer


@way("type() at run time")
def made_by_type() -> type[nn.Module]:
    return type("Layer", (base(),), {"forward": lambda self, x, scale=1.0: self.linear(x) * 2})


@way("types.new_class at run time, without a forward")
def made_by_new_class() -> type[nn.Module]:
    return types.new_class("Layer", (base(),))


@way("a keyword for __init_subclass__")
def keyword() -> type[nn.Module]:
    class Named:
        def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.name = name

    class Layer(base(), Named, name="layer"):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x).tanh() * scale

    assert Layer.name == "layer"
    return Layer


@way("a generic class")
def generic() -> type[nn.Module]:
    class Box(base(), Generic[T]):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x).tanh() * scale

    class Layer(Box[int]):
        pass

    return Layer


@way("a static forward")
def static() -> type[nn.Module]:
    class Layer(base()):
        def __init__(self) -> None:
            super().__init__()
            type(self).shared = self.linear

        @staticmethod
        def forward(x: Tensor, scale: float = 1.0) -> Tensor:
            return Layer.shared(x) * scale

    return Layer


@way("a property as forward")
def a_property() -> type[nn.Module]:
    class Layer(base()):
        def compute(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x) * scale + 3

        @property
        def forward(self) -> Callable[..., Tensor]:
            return functools.partial(self.compute)

    return Layer


@way("a class method as forward")
def class_method() -> type[nn.Module]:
    class Layer(base()):
        def __init__(self) -> None:
            super().__init__()
            type(self).shared = self.linear

        @classmethod
        def forward(cls, x: Tensor, scale: float = 1.0) -> Tensor:
            return cls.shared(x) * scale

    return Layer


@way("a functools.partialmethod as forward")
def partial_method() -> type[nn.Module]:
    class Layer(base()):
        def compute(self, x: Tensor, scale: float = 1.0, shift: float = 0.0) -> Tensor:
            return self.linear(x) * scale + shift

        forward = functools.partialmethod(compute, shift=1.0)

    return Layer


@way("an object as forward")
def an_object() -> type[nn.Module]:
    class Compute:
        def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return Layer.shared(x) * scale

    class Layer(base()):
        forward = Compute()

        def __init__(self) -> None:
            super().__init__()
            type(self).shared = self.linear

    return Layer


@way("the subclass's forward put there later")
def put_later() -> type[nn.Module]:
    class Layer(base()):
        pass

    Layer.forward = lambda self, x, scale=1.0: self.linear(x) * 5
    return Layer


@way("the parent's forward replaced later")
def parent_replaced() -> type[nn.Module]:
    parent = base()

    class Layer(parent):
        pass

    parent.forward = lambda self, x, scale=1.0: self.linear(x) * 9
    return Layer


@way("the parent's forward replaced later, under super().forward")
def parent_replaced_under_super() -> type[nn.Module]:
    parent = base()

    class Layer(parent):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale=scale) + 1

    parent.forward = lambda self, x, scale=1.0: self.linear(x) * 9
    return Layer


@way("a __call__ of its own")
def own_call() -> type[nn.Module]:
    class Layer(base()):
        def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().__call__(x, scale=scale) * 2

    return Layer


@way("a __call__ after the layer's in the order of resolution")
def call_after() -> type[nn.Module]:
    class Calling(nn.Module):
        def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().__call__(x, scale=scale) * 2

    class Layer(base(), Calling):
        pass

    return Layer


@way("a _call_impl of its own")
def own_call_impl() -> type[nn.Module]:
    class Layer(base()):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Tensor:
            return super()._call_impl(*args, **kwargs) * 2

    return Layer


@way("a __call__ after the layer's that calls forward and no hooks")
def call_after_alone() -> type[nn.Module]:
    class Calling(nn.Module):
        def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.forward(x, scale=scale) * 2

    class Layer(base(), Calling):
        pass

    return Layer


@way("a __call__ after the layer's that reads forward first")
def call_after_reading() -> type[nn.Module]:
    class Calling(nn.Module):
        def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
            assert callable(self.forward)
            return super().__call__(x, scale=scale) * 2

    class Layer(base(), Calling):
        pass

    return Layer


@way("a parametrized layer")
def parametrized() -> type[nn.Module]:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Layer(base()):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            parametrize.register_parametrization(self, "weight", Double())

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.linear(x).tanh() * scale * self.weight

    return Layer


@way("the class of the layer exchanged")
def class_exchanged() -> type[nn.Module]:
    class Layer(base()):
        def __init__(self) -> None:
            super().__init__()
            self.__class__ = type("Sharded", (Layer,), {})

    return Layer


@way("the flag on the class")
def flag_on_class() -> type[nn.Module]:
    class Layer(base()):
        gradient_checkpointing = True

    return Layer


@way("a forward that calls itself")
def recursion() -> type[nn.Module]:
    class Layer(base()):
        def forward(self, x: Tensor, scale: float = 1.0, again: bool = True) -> Tensor:
            x = self.linear(x).tanh() * scale
            return self.forward(x, scale, again=False) if again else x

    return Layer


@way("a forward that calls another layer's forward")
def other_forward() -> type[nn.Module]:
    class Layer(base()):
        def __init__(self) -> None:
            super().__init__()
            self.inner = base()()

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.inner.forward(self.linear(x), scale=scale)

    return Layer


@way("a layer inside, called twice")
def nested() -> type[nn.Module]:
    class Layer(base()):
        def __init__(self) -> None:
            super().__init__()
            self.inner = base()()

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.inner(self.inner(self.linear(x), scale=scale))

    return Layer


@way("no forward at all")
def missing() -> type[nn.Module]:
    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

    return Layer


def refusal(layer: nn.Module, x: Tensor) -> str:
    layer.gradient_checkpointing = True
    try:
        layer(x.requires_grad_())
    except NotImplementedError as error:
        return str(error)
    raise AssertionError("a layer without a forward was called")


def signature(cls: type[nn.Module]) -> str:
    try:
        return str(inspect.signature(cls.forward))
    except TypeError:
        return "none: TypeError"


def observe(make: Callable[[], type[nn.Module]], reentrant: bool, hooks: bool) -> Observed:
    cls = make()
    torch.manual_seed(0)
    layer = cls()
    calls: list[nn.Module] = []
    checkpoints: list[nn.Module | None] = []
    in_hooks: list[str] = []

    def function(call: Any, *args: Any) -> Any:
        checkpoints.append(getattr(call.func, "__self__", None))
        return checkpoint(call, *args, use_reentrant=reentrant)

    layers = [module for module in layer.modules() if isinstance(module, GradientCheckpointingLayer)]
    for one in layers:
        one._gradient_checkpointing_func = function
        one.linear.register_forward_pre_hook(lambda module, args: calls.append(module))
        if hooks:
            one.register_forward_pre_hook(lambda module, args: in_hooks.append("pre"))
            one.register_forward_hook(lambda module, args, output: in_hooks.append("post"))
    x = torch.linspace(-1, 1, 8).reshape(2, 4)

    def step(enabled: bool) -> tuple[Tensor, list[Tensor | None]]:
        for one in layers:
            one.gradient_checkpointing = enabled
        layer.zero_grad()
        for _ in range(2):  # whatever the first call left behind is there in the second
            calls.clear()
            checkpoints.clear()
            in_hooks.clear()
            layer.zero_grad()
            given = x.clone().requires_grad_()
            output = layer(given, scale=2.0)
            output.sum().backward()
        return output.detach(), [given.grad, *(parameter.grad for parameter in layer.parameters())]

    if cls.forward is nn.Module.forward:
        return {"refused": refusal(layer, x)}
    expected = step(False)
    output, gradients = step(True)
    observed: Observed = {
        "checkpoints": len(checkpoints),
        "calls": len(calls),
        "gradients": all(
            one is two is None or torch.equal(one, two) for one, two in zip(gradients, expected[1], strict=True)
        ),
        "outputs": torch.equal(output, expected[0]),
        "its own": all(any(one is other for other in layers) for one in checkpoints),
        "value": output.sum().item(),
        "signature": signature(cls),
    }
    if hooks:
        observed["hooks"] = {kind: in_hooks.count(kind) for kind in ("pre", "post")}
    return observed


def attempt(make: Callable[[], type[nn.Module]], reentrant: bool, hooks: bool) -> Observed:
    try:
        return observe(make, reentrant, hooks)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def made() -> dict[str, dict[str, Observed]]:
    return {
        name: {
            ("reentrant" if reentrant else "non-reentrant") + (", hooks" if hooks else ""): attempt(
                make, reentrant, hooks
            )
            for hooks in (False, True)
            for reentrant in (True, False)
        }
        for name, make in MADE.items()
    }


# ---- every class of the package --------------------------------------------------------------------------------------


def import_models() -> dict[str, str]:
    """Import each module with a model in it; returns those that cannot be, with the reason."""
    refused = {}
    models = Path(transformers.__file__).with_name("models")
    for path in sorted(models.glob("*/modeling_*.py")):
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            importlib.import_module(name)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return refused


def subclasses(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        yield one
        yield from subclasses(one)


def digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


def wrappers(function: Any) -> int:
    count = 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count


def entered(cls: type[nn.Module], hooks: bool) -> list[int]:
    """How often a call enters the checkpoint, and the class's own computation, which fails: it has no modules."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.gradient_checkpointing = True
    checkpoints = 0

    def function(call: Any, *args: Any) -> Any:
        nonlocal checkpoints
        checkpoints += call.func.__self__ is layer
        return call(*args)

    layer._gradient_checkpointing_func = function
    if hooks:
        layer.register_forward_pre_hook(lambda module, args: None)
    code = inspect.unwrap(cls.forward).__code__
    needed = [
        object()
        for parameter in list(inspect.signature(cls.forward).parameters.values())[1:]
        if parameter.default is parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    ]
    try:
        layer(*needed)
    except Exception as error:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        return [checkpoints, frames.count(code)]
    return [checkpoints, -1]


def looks(cls: type[nn.Module]) -> Observed:
    forward = cls.forward
    return {
        "wrappers": wrappers(forward),
        "name": [forward.__name__, forward.__qualname__, forward.__module__],
        "signature": str(inspect.signature(forward)),
        "annotations": str(forward.__annotations__),
        "docstring": digest(forward.__doc__),
        "class docstring": digest(cls.__doc__),
        "source": digest(inspect.getsource(forward)),
        "code": [forward.__code__.co_name, forward.__code__.co_firstlineno, forward.__code__.co_varnames],
        "call": "__call__" in vars(cls),
    }


def package() -> Observed:
    refused = import_models()
    classes = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in subclasses(GradientCheckpointingLayer)}
    before = {name: looks(cls) | {"own": "forward" in vars(cls)} for name, cls in classes.items()}
    forwards = {name: cls.forward for name, cls in classes.items()}
    entries = {name: [entered(cls, hooks=False), entered(cls, hooks=True)] for name, cls in classes.items()}
    unlike = [
        name
        for name, cls in classes.items()
        if cls.forward is not forwards[name] or looks(cls) | {"own": before[name]["own"]} != before[name]
    ]
    described = {name: before[name] | {"entered": entries[name]} for name in sorted(classes)}
    return {"refused": refused, "classes": described, "not as before": unlike}


def main(result: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    gc.disable()
    observed = package()  # before the classes made here are among the subclasses
    observed["made"] = made()
    result.write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
