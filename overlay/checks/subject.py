"""The model that is checked, as the rules ask for it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from overlay.checks.environment import Environment
from overlay.errors import OverlayError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Layer:
    """A module that transformers checkpoints, or would.

    Attributes:
        name: as `named_modules` gives it.
        module: a `GradientCheckpointingLayer`.
        on: whether its checkpointing is on (`gradient_checkpointing`); it takes place in training mode alone.
        function: what checkpoints it, None where checkpointing was never turned on.
        reentrant: whether `function` is torch's or DeepSpeed's, reentrant; None where that cannot be told, as of a
            custom function.
    """

    name: str
    module: "nn.Module"
    on: bool
    function: Callable[..., Any] | None
    reentrant: bool | None

    @property
    def trains(self) -> bool:
        """Whether the layer has a parameter that requires gradients."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def base(self) -> type:
        """The class `GradientCheckpointingLayer` itself, which does the checkpointing."""
        return next(base for base in type(self.module).__mro__ if base.__name__ == _LAYER)

    @property
    def wraps_forward(self) -> bool:
        """Whether transformers checkpoints it as from 5.23 on: by a wrapper of each class's `forward`."""
        return "__init_subclass__" in vars(self.base)


class Subject:
    """A model, its optimizer, and the environment."""

    def __init__(self, model: "nn.Module", optimizer: Any, environment: Environment) -> None:
        self.model = model
        self.optimizer = optimizer
        self.environment = environment

    @cached_property
    def names(self) -> "dict[nn.Module, str]":
        """Every module's name; the root's is its class."""
        return {module: name or type(module).__name__ for name, module in self.model.named_modules()}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every `GradientCheckpointingLayer` in the model, outermost first."""
        return tuple(_layers(self.model.named_modules()))

    @property
    def checkpointed(self) -> Iterator[Layer]:
        """The layers whose checkpointing is on."""
        return (layer for layer in self.layers if layer.on)

    @cached_property
    def reentrant_regions(self) -> "tuple[tuple[str, nn.Module], ...]":
        """What is checkpointed by reentrant checkpointing, by name: layers, and PyTorch's `checkpoint_wrapper`."""
        layers = [(layer.name, layer.module) for layer in self.checkpointed if layer.reentrant]
        wrappers = [(name, module) for module, name in self.names.items() if _is_reentrant_wrapper(module)]
        return (*layers, *wrappers)

    @cached_property
    def wrapped(self) -> "dict[nn.Module, str]":
        """The modules that a checkpoint wrapper is around, PyTorch's or fairscale's, with the names of the wrappers."""
        found = {}
        for module, name in self.names.items():
            if _derives(module, "CheckpointWrapper"):
                found[module._modules.get("_checkpoint_wrapped_module") or module] = name
            elif getattr(getattr(vars(module).get("forward"), "func", None), "__name__", "") == "_checkpointed_forward":
                found[module] = name
        return found

    @cached_property
    def sharded(self) -> "dict[nn.Module, str]":
        """The modules that `fully_shard` (FSDP2) was called on, with their names."""
        return {module: name for module, name in self.names.items() if _derives(module, "FSDPModule")}

    @cached_property
    def configs(self) -> tuple[Any, ...]:
        """The configurations of the transformers models in the model, each once."""
        found = {id(config): config for module in self.model.modules() if (config := _config(module)) is not None}
        return tuple(found.values())

    @cached_property
    def pretrained(self) -> "tuple[nn.Module, ...]":
        """The transformers models in the model: itself, and those within it."""
        return tuple(module for module in self.model.modules() if _derives(module, "PreTrainedModel"))

    @staticmethod
    def input_embeddings(model: "nn.Module") -> "nn.Module | None":
        """The module that a transformers model looks its inputs up in, None where it names none."""
        try:
            return model.get_input_embeddings()
        except Exception:  # not implemented, or a model of somebody's own
            return None

    def hooks_inside(self, layer: Layer) -> bool:
        """Whether a layer's hooks, FSDP2's among them, run inside of its checkpoint, and so again in the recompute.

        Told by the class and not by the version alone: that of a build from a commit says little. So on stock up to
        5.22; and with this project's patch where the call of the layer is not `nn.Module`'s own.
        """
        from torch import nn

        if not hasattr(layer.base, "_gc_run_forward"):
            return "__call__" in vars(layer.base) and self.environment.before("transformers", "5.23")
        classes = type(layer.module).__mro__
        below = classes[classes.index(layer.base) + 1 :]
        call = next(vars(one)["__call__"] for one in below if "__call__" in vars(one))
        return call is not nn.Module.__call__ or type(layer.module)._call_impl is not nn.Module._call_impl


@contextmanager
def in_training(model: "nn.Module") -> Iterator[None]:
    """Has each module of a model in training mode, and puts its mode back.

    Without a call of `train`, which may change weights: that of loralib's layers merges and unmerges them.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = True
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def expect_module(model: object) -> None:
    """Takes a module, and nothing else.

    Raises:
        OverlayError: it is none.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise OverlayError(f"expected a torch.nn.Module, found {found}: hand over the model that is trained")


def class_forward(module: "nn.Module") -> Any:
    """The `forward` of a module's class, as it is there; that of a traced or scripted module has no code."""
    return getattr_static(type(module), "forward", None)


def places(names: Iterable[str]) -> str:
    """Names for a finding's `where`: at most three, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


_LAYER = "GradientCheckpointingLayer"


def _derives(module: "nn.Module", base: str) -> bool:
    """By name: the class need not be imported for this, and then there is no such module."""
    return any(one.__name__ == base for one in type(module).__mro__)


def _layers(modules: "Iterable[tuple[str, nn.Module]]") -> Iterator[Layer]:
    for name, module in modules:
        if not _derives(module, _LAYER):
            continue
        function = getattr(module, "_gradient_checkpointing_func", None)
        on = bool(getattr(module, "gradient_checkpointing", False))
        yield Layer(name, module, on, function, _reentrant(function))


def _reentrant(function: Any) -> bool | None:
    keywords: dict[str, Any] = {}
    while isinstance(function, partial):
        keywords = function.keywords | keywords
        function = function.func
    from torch.utils.checkpoint import checkpoint

    if function is checkpoint:
        return keywords.get("use_reentrant") in (None, True)  # None is torch's default, and stands for True
    module = getattr(function, "__module__", "")
    if module == "deepspeed.runtime.activation_checkpointing.checkpointing":
        return getattr(function, "__name__", "") == "checkpoint"  # the other one is `non_reentrant_checkpoint`
    return None


def _is_reentrant_wrapper(module: "nn.Module") -> bool:
    if not _derives(module, "CheckpointWrapper"):
        return False
    return getattr(getattr(module, "checkpoint_impl", None), "name", "") == "REENTRANT"


def _config(module: "nn.Module") -> Any:
    try:
        config = getattr(module, "config", None)
        return config if hasattr(config, "to_dict") else None
    except Exception:  # a property, or a `__getattr__`, of somebody's own
        return None
