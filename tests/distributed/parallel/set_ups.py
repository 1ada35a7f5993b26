"""A set-up trained without checkpointing and in both modes of it, schedule after schedule, and what is compared."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from parallel.families import build, loss
from parallel.schedules import SCHEDULES, Gradients, Step, relative_error, undivided
from torch import Tensor, nn
from transformers import PreTrainedModel

RELEASE = tuple(map(int, transformers.__version__.partition("+")[0].split(".")))
MODES = {"reentrant": True, "non-reentrant": False}
SHORT = ("1 forward", "2 forwards")


def whole(model: PreTrainedModel) -> PreTrainedModel:
    return model


def backward(module: nn.Module, loss: Tensor) -> None:
    loss.backward()


def grad(parameter: Tensor) -> Tensor | None:
    return parameter.grad


@dataclass
class SetUp:
    """How a model is trained."""

    distribute: Callable[[PreTrainedModel], nn.Module] = whole
    schedules: tuple[str, ...] = SHORT
    family: str = "Llama"
    options: Mapping[str, Any] = field(default_factory=dict)
    """What checkpointing is enabled with."""
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Around each forward."""
    backward: Callable[[nn.Module, Tensor], None] = backward
    gradient: Callable[[Tensor], Tensor | None] = grad
    without_synchronising: Callable[[nn.Module], AbstractContextManager[None]] = contextlib.nullcontext
    same_data: bool = False
    """All ranks have the batches of rank 0."""
    finish: Callable[[nn.Module], Any] = nn.Module.zero_grad
    """After each schedule; leaves no gradients, and the weights as they were."""


@dataclass
class Trained:
    """A set-up, checkpointed or not, that runs one schedule after the other."""

    set_up: SetUp
    reentrant: bool | None
    module: nn.Module | None = None
    forwards: int = 0
    layers: int = 0
    """How many layers were run in them, and recomputed."""

    def run(self, schedule: str) -> Gradients:
        module = self.module = self.module or self._make()
        rank = 0 if self.set_up.same_data else dist.get_rank()
        self.forwards = self.layers = 0

        def forward(i: int) -> Tensor:
            self.forwards += 1
            with self.set_up.around():
                return loss(module, rank, i)

        step = Step(
            forward,
            lambda loss: self.set_up.backward(module, loss),
            lambda: self.set_up.without_synchronising(module),
        )
        try:
            SCHEDULES[schedule](step)
            found = undivided(
                [self.set_up.gradient(parameter) for parameter in module.parameters()],
                [parameter.shape for parameter in reference(self.set_up.family).parameters()],
            )
            self.set_up.finish(module)
            return found
        except Exception:
            self.module = None
            raise

    @property
    def recomputed(self) -> float:
        """Layers recomputed for each forward."""
        return self.layers / self.forwards - reference(self.set_up.family).config.num_hidden_layers

    def _make(self) -> nn.Module:
        module = self.set_up.distribute(build(self.set_up.family))
        for name, part in module.named_modules():
            if name.endswith(".input_layernorm"):  # not the layer itself, whose hooks are what the patch is about
                part.register_forward_pre_hook(self._count)
        if self.reentrant is not None:
            enable(getattr(module, "module", module), self.reentrant, self.set_up.options)
        return module

    def _count(self, *_: Any) -> None:
        self.layers += 1


def enable(model: PreTrainedModel, reentrant: bool, options: Mapping[str, Any]) -> None:
    name = "activation_checkpointing_enable" if RELEASE >= (5, 23) else "gradient_checkpointing_enable"
    getattr(model, name)({"use_reentrant": reentrant}, **options)


reference = cache(build)


@cache
def expected(family: str, schedule: str, world: int) -> Gradients:
    """The gradients of a whole model, not checkpointed, for the mean of the losses of all ranks."""
    model = reference(family)
    model.zero_grad()
    step = Step(
        lambda i: torch.stack([loss(model, rank, i) for rank in range(world)]).mean(),
        Tensor.backward,
        contextlib.nullcontext,
    )
    SCHEDULES[schedule](step)
    return [parameter.grad if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def measure(set_ups: Mapping[str, SetUp], put: Callable[[Any], None]) -> None:
    """Put a row for each schedule of each set-up.

    A row says the relative error of the gradients without checkpointing, against the whole model; and for each mode
    that against the same without checkpointing, that against the whole model, and how many layers were recomputed for
    each forward; or the name of an exception.
    """
    world = dist.get_world_size()
    for name, set_up in set_ups.items():
        plain, *checkpointed = (Trained(set_up, reentrant) for reentrant in (None, *MODES.values()))
        for schedule in set_up.schedules:
            what = f"{world} ranks, {name}, {schedule}"
            truth = expected(set_up.family, schedule, 1 if set_up.same_data else world)
            same = _attempt(plain, schedule, f"{what}, not checkpointed")
            row = {"ranks": world, "set-up": name, "schedule": schedule, "not checkpointed": _error(same, truth)}
            for mode, trained in zip(MODES, checkpointed, strict=True):
                found = _attempt(trained, schedule, f"{what}, {mode}")
                row[mode] = (
                    found
                    if isinstance(found, str)
                    else {"same": _error(found, same), "whole": _error(found, truth), "recomputed": trained.recomputed}
                )
            put(row)


def _attempt(trained: Trained, schedule: str, what: str) -> Gradients | str:
    try:
        return trained.run(schedule)
    except Exception as error:
        if dist.get_rank() == 0:
            sys.stderr.write(f"{what}: {error}\n")
            traceback.print_exc()
        return type(error).__name__


def _error(found: Gradients | str, wanted: Gradients | str) -> float | str:
    named = next((value for value in (found, wanted) if isinstance(value, str)), None)
    return named or relative_error(found, wanted)
