"""What is done to a layer class, or to a layer of it, before and after a layer of the class was called.

`python later_worker.py RESULT.json` writes for each scenario what was observed with a class that was not used yet, and
with one that was.
"""

import copy
import functools
import inspect
import json
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

Observed = dict[str, Any]
Layer = type[nn.Module]

SCENARIOS: dict[str, Callable[[Layer], Observed]] = {}
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def scenario(name: str) -> Callable[[Callable[[Layer], Observed]], Callable[[Layer], Observed]]:
    def register(run: Callable[[Layer], Observed]) -> Callable[[Layer], Observed]:
        assert name not in SCENARIOS
        SCENARIOS[name] = run
        return run

    return register


def make() -> Layer:
    """A class that can be pickled."""

    class Made(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            """What the layer computes."""
            return self.linear(x).tanh()

    Made.__qualname__ = "Made"
    Made.forward.__qualname__ = "Made.forward"
    globals()["Made"] = Made
    return Made


def ready(layer: nn.Module, *, hook: bool = True) -> nn.Module:
    """Checkpointed, with a hook if so asked."""
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    if hook:
        layer.register_forward_pre_hook(nothing)
    return layer


def nothing(module: nn.Module, args: Any) -> None:
    pass


def called(layer: nn.Module) -> Observed:
    """How often a checkpoint was entered and the linear module called in a forward and a backward; the output's factor.

    The factor is that over the output of the class as it was made, so that a replacement shows which one ran.
    """
    calls: list[int] = []
    checkpoints: list[int] = []
    function = layer._gradient_checkpointing_func

    def counting(call: Any, *args: Any) -> Any:
        checkpoints.append(1)
        return function(call, *args)

    layer._gradient_checkpointing_func = counting
    handle = layer.linear.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        given = X.clone().requires_grad_()
        output = layer(given)
        output.sum().backward()
    finally:
        handle.remove()
        layer._gradient_checkpointing_func = function
    factor = output.detach().div(layer.linear(X).tanh().detach()).mean().item()
    return {"checkpoints": len(checkpoints), "calls": len(calls), "factor": round(factor, 3)}


def times(factor: float) -> Callable[..., Tensor]:
    """A forward of one's own."""

    def replacement(self: nn.Module, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * factor

    return replacement


def twice(layer: nn.Module, x: Tensor) -> Tensor:
    """A forward of one's own that can be pickled."""
    return layer.linear(x).tanh() * 2


# ---- on the class ----------------------------------------------------------------------------------------------------


@scenario("class's forward replaced, and put back")
def class_replaced(cls: Layer) -> Observed:
    layer = ready(cls())
    old, new = cls.forward, times(2)
    cls.forward = new
    observed = {"read": cls.forward is new, "replaced": called(layer), "read after": cls.forward is new}
    cls.forward = old
    return {**observed, "put back": called(layer), "read at last": cls.forward is old}


@scenario("class's forward replaced twice, and put back in turn")
def class_replaced_twice(cls: Layer) -> Observed:
    layer = ready(cls())
    first = cls.forward
    cls.forward = times(2)
    observed = {"first": called(layer)}
    second = cls.forward
    cls.forward = lambda self, x: second(self, x) * 3
    observed["second"] = called(layer)
    cls.forward = second
    observed["one back"] = called(layer)
    cls.forward = first
    return {**observed, "both back": called(layer)}


@scenario("class's forward replaced, as pytest's monkeypatch does and undoes it")
def monkeypatched(cls: Layer) -> Observed:
    layer = ready(cls())
    kept = vars(cls)["forward"]
    cls.forward = times(2)
    observed = {"replaced": called(layer)}
    cls.forward = kept
    return {**observed, "undone": called(layer)}


@scenario("class's forward replaced with functools.wraps of the old one, which it calls")
def class_wrapped(cls: Layer) -> Observed:
    layer = ready(cls())
    old = cls.forward

    @functools.wraps(old)
    def replacement(self: nn.Module, x: Tensor) -> Tensor:
        return old(self, x) * 2

    cls.forward = replacement
    return {**called(layer), "unwrapped": inspect.unwrap(cls.forward) is old}


@scenario("class's forward deleted")
def class_deleted(cls: Layer) -> Observed:
    sub = type("Sub", (cls,), {"forward": times(2)})
    layer = ready(sub())
    observed = {"its own": called(layer)}
    del sub.forward
    return {**observed, "deleted": called(layer)}


@scenario("mock.patch.object(Class, 'forward', wraps=layer.forward)")
def class_mocked(cls: Layer) -> Observed:
    layer = ready(cls())
    with mock.patch.object(cls, "forward", wraps=layer.forward) as forward:
        observed = called(layer)
    return {**observed, "mocked": forward.call_count, "after": called(layer)}


@scenario("mock.patch.object(Class, 'forward', autospec=True)")
def class_autospecced(cls: Layer) -> Observed:
    layer = ready(cls())
    with mock.patch.object(cls, "forward", autospec=True, side_effect=times(2)) as forward:
        result = layer(X)
    return {"a tensor": isinstance(result, Tensor), "mocked": forward.call_count, "after": called(layer)}


class Faithful:
    """A wrapper that says of itself that it is of the class of what it wraps, as those of wrapt do."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    @property
    def __class__(self) -> type:
        return type(self.wrapped)

    def __get__(self, layer: nn.Module | None, cls: Layer | None = None) -> Any:
        bound = self.wrapped.__get__(layer, cls)
        return bound if layer is None else lambda *args, **kwargs: bound(*args, **kwargs) * 2


@scenario("class's forward wrapped as wrapt does it")
def class_wrapped_by_wrapt(cls: Layer) -> Observed:
    layer = ready(cls())
    cls.forward = Faithful(vars(cls)["forward"])
    return called(layer)


@scenario("a property put in the place of the class's forward, with a setter")
def property_with_setter(cls: Layer) -> Observed:
    class Settable(cls):
        def get(self) -> Callable[..., Tensor]:
            return self.__dict__.get("kept", functools.partial(times(2), self))

        def set(self, forward: Callable[..., Tensor]) -> None:
            self.__dict__["kept"] = forward

        forward = property(get, set)

    layer = ready(Settable())
    observed = {"got": called(layer)}
    layer.forward = functools.partial(times(3), layer)
    return {**observed, "set": called(layer), "kept": "kept" in vars(layer), "in __dict__": "forward" in vars(layer)}


@scenario("reads of the class")
def class_read(cls: Layer) -> Observed:
    layer = ready(cls())
    layer(X)
    forward = cls.forward
    return {
        "function": isinstance(forward, types.FunctionType),
        "name": [forward.__name__, forward.__qualname__, forward.__module__],
        "docstring": forward.__doc__,
        "signature": str(inspect.signature(forward)),
        "source": inspect.getsource(forward).splitlines()[0].strip(),
        "code": forward.__code__.co_name,
        "bound": [layer.forward.__func__ is forward, layer.forward.__self__ is layer, inspect.ismethod(layer.forward)],
        "pickled": pickle.loads(pickle.dumps(forward)) is forward,  # noqa: S301
        "members": dict(inspect.getmembers(cls))["forward"] is forward,
        "super": super(GradientCheckpointingLayer, layer).forward.__name__,
        "hasattr": hasattr(layer, "forward") and hasattr(cls, "forward"),
    }


@scenario("vars(Class)['forward'], called")
def class_dict(cls: Layer) -> Observed:
    layer = ready(cls())
    layer(X)
    return {"equal": torch.equal(vars(cls)["forward"](layer, X), layer(X))}


@scenario("inspect.getattr_static")
def static(cls: Layer) -> Observed:
    layer = ready(cls())
    layer(X)
    return {
        "class": isinstance(inspect.getattr_static(cls, "forward"), types.FunctionType),
        "layer": isinstance(inspect.getattr_static(layer, "forward"), types.FunctionType),
    }


@scenario("a class made of vars(Class)")
def cloned(cls: Layer) -> Observed:
    layer = ready(cls())
    layer(X)
    namespace = {"__init__": initialise, "forward": vars(cls)["forward"]}
    clone = type("Clone", (GradientCheckpointingLayer,), namespace)
    other = ready(clone())
    observed = {"clone": called(other)}
    other.forward = functools.partial(times(2), other)
    return {**observed, "replaced": called(other), "read": other.forward is vars(other)["forward"]}


def initialise(self: nn.Module) -> None:
    GradientCheckpointingLayer.__init__(self)
    self.linear = nn.Linear(4, 4)


# ---- on a layer ------------------------------------------------------------------------------------------------------


@scenario("layer's forward replaced, read, deleted")
def layer_replaced(cls: Layer) -> Observed:
    layer, other = ready(cls()), ready(cls())
    new = functools.partial(times(2), layer)
    layer.forward = new
    observed = {
        "read": layer.forward is new and vars(layer)["forward"] is new,
        "replaced": called(layer),
        "the other": called(other),
        "without hooks": called(ready(cls(), hook=False)),
        "directly": round((layer.forward(X) / layer.linear(X).tanh()).mean().item(), 3),
    }
    del layer.forward
    observed["deleted"] = [called(layer), "forward" in vars(layer)]
    try:
        del layer.forward
    except AttributeError as error:
        observed["deleted again"] = type(error).__name__
    return observed


@scenario("layer's forward replaced, through object.__setattr__ and __dict__")
def layer_replaced_otherwise(cls: Layer) -> Observed:
    layer = ready(cls())
    object.__setattr__(layer, "forward", functools.partial(times(2), layer))
    observed = {"object.__setattr__": called(layer)}
    vars(layer)["forward"] = functools.partial(times(3), layer)
    observed["__dict__"] = called(layer)
    vars(layer).pop("forward")
    return {**observed, "popped": called(layer)}


@scenario("mock.patch.object(layer, 'forward', wraps=layer.forward)")
def layer_mocked(cls: Layer) -> Observed:
    layer = ready(cls())
    with mock.patch.object(layer, "forward", wraps=layer.forward) as forward:
        observed = called(layer)
    return {**observed, "mocked": forward.call_count, "left": "forward" in vars(layer), "after": called(layer)}


@scenario("mock.patch.object(layer, 'forward', autospec=True)")
def layer_autospecced(cls: Layer) -> Observed:
    layer = ready(cls())
    double = functools.partial(times(2), layer)
    with mock.patch.object(layer, "forward", autospec=True, side_effect=double) as forward:
        observed = called(layer)
    return {**observed, "mocked": forward.call_count, "left": "forward" in vars(layer), "after": called(layer)}


@scenario("copies of a layer whose forward was replaced")
def copied(cls: Layer) -> Observed:
    layer = ready(cls())
    layer.forward = functools.partial(twice, layer)
    layer(X)
    observed = {}
    for name, duplicate in {
        "copy.deepcopy": copy.deepcopy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),  # noqa: S301
        "copy.copy": copy.copy(layer),
        "replica": replicate(layer),
    }.items():
        owner = duplicate.forward.args[0]
        observed[name] = [called(duplicate), owner is duplicate, owner is layer, type(duplicate) is cls]
    return observed


def replicate(layer: nn.Module) -> nn.Module:
    replica = layer._replicate_for_data_parallel()
    replica._parameters, replica._modules = dict(layer._parameters), dict(layer._modules)
    return replica


@scenario("copies of a layer whose forward was read and set, as accelerate leaves it")
def copied_method(cls: Layer) -> Observed:
    layer = ready(cls())
    layer.forward = layer.forward
    layer(X)
    observed = {}
    for name, duplicate in {
        "copy.deepcopy": copy.deepcopy(layer),
        "pickle": pickle.loads(pickle.dumps(layer)),  # noqa: S301
    }.items():
        observed[name] = [called(duplicate), duplicate.forward.__self__ is duplicate]
    return observed


# ---- subclasses ------------------------------------------------------------------------------------------------------


@scenario("subclasses, with a forward and without")
def subclasses(cls: Layer) -> Observed:
    class Without(cls):
        pass

    class With(cls):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    class Below(Without, With):
        pass

    observed: Observed = {}
    for sub in (Without, With, Below, Below, With, Without):  # each before and after a class that is related to it
        layer = ready(sub())
        replaced = ready(sub())
        replaced.forward = functools.partial(times(3), replaced)
        observed.setdefault(sub.__name__, []).append(
            [called(layer), called(ready(sub(), hook=False)), called(replaced)]
        )
    return observed


@scenario("class's forward replaced below a subclass")
def replaced_below(cls: Layer) -> Observed:
    class Sub(cls):
        pass

    layer = ready(Sub())
    observed = {"before": called(layer)}
    cls.forward = times(2)
    observed["parent's replaced"] = called(layer)
    Sub.forward = times(3)
    observed["its own put in"] = called(layer)
    del Sub.forward
    return {**observed, "its own taken out": called(layer), "read": Sub.forward is cls.forward}


def super_forward(cls: Layer, *, hook: bool) -> Observed:
    class Sub(cls):
        def double(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    layer = ready(Sub(), hook=hook)
    layer.forward = layer.double
    return called(layer)


@scenario("layer's forward replaced by a method of a subclass that calls super().forward")
def super_forward_with_hook(cls: Layer) -> Observed:
    return super_forward(cls, hook=True)


@scenario("layer's forward replaced by a method of a subclass that calls super().forward, no hooks")
def super_forward_without_hook(cls: Layer) -> Observed:
    return super_forward(cls, hook=False)


@scenario("layer's forward replaced by one that calls super(Class, layer).forward")
def super_of_base(cls: Layer) -> Observed:
    class Sub(cls):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 5

    layer = ready(Sub())
    layer.forward = lambda x: super(Sub, layer).forward(x) * 2
    return {"super": called(layer), "class": round((Sub.forward(layer, X) / cls.forward(layer, X)).mean().item(), 3)}


@scenario("an instance of GradientCheckpointingLayer itself")
def of_the_base(cls: Layer) -> Observed:
    layer = ready(GradientCheckpointingLayer())
    layer.linear = nn.Linear(4, 4)
    layer.forward = functools.partial(times(2), layer)
    observed = {"base": called(layer), "class": called(ready(cls()))}
    try:
        ready(GradientCheckpointingLayer())(X)
    except NotImplementedError as error:
        observed["no forward"] = str(error)
    return observed


@scenario("the class of a layer exchanged for a subclass, and back")
def exchanged(cls: Layer) -> Observed:
    layer = ready(cls())
    sub = type("Sharded", (cls,), {})
    observed = {"before": called(layer)}
    layer.__class__ = sub
    observed["sub"] = called(layer)
    layer.forward = functools.partial(times(2), layer)
    observed["replaced"] = called(layer)
    layer.__class__ = cls
    return {**observed, "back": called(layer)}


@scenario("layer.compile(), where torch.compile is switched off")
def compiled_without_compiler(cls: Layer) -> Observed:
    layer = ready(cls())
    layer.compile(disable=True)
    return called(layer)


def attempt(run: Callable[[Layer], Observed], *, used: bool) -> Observed:
    torch.manual_seed(0)
    cls = make()
    if used:
        ready(cls())(X)
    torch.manual_seed(0)
    try:
        return run(cls)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def main(result: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    observed = {
        name: {"new": attempt(run, used=False), "used": attempt(run, used=True)} for name, run in SCENARIOS.items()
    }
    result.write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
