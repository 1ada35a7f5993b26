"""Where a recompute is refused whose gradients FSDP2 would lose, and where not: gradients against a whole model's.

`python refusal_worker.py RESULT.json` trains a small model whose layers have an `mlp` that is sharded by itself, on two
gloo ranks with batches of their own, in every case, with whatever transformers is on the path. It writes for each the
relative error of the gradients, without checkpointing and with it; how often a layer was computed with it, for each
time without; how many graphs were compiled; and what was said where something was refused. Weights are float64.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.testing
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).parent))
from parallel.counted import COMPUTED, counted
from parallel.schedules import Gradients, relative_error, undivided

from overlay.measure import group

RANKS = 2
SIZE = 8
SHARDED = {"mlp and layer": True, "mlp alone": False}
"""Whether the layers are sharded, too, and so have hooks."""
REFUSED = "is sharded by itself (`fully_shard`)"

Backend = torch._dynamo.testing.CompileCounterWithBackend


class Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.Tanh(), nn.Linear(2 * SIZE, SIZE))
        self.detached = False
        """Whether what `mlp` is called with requires no gradients."""

    def forward(self, hidden: Tensor, calls: int = 1) -> Tensor:
        """So many calls of `mlp`; there is no loop, in which a graph break would keep all of it from being compiled."""
        hidden = hidden + counted(self.linear(hidden)).tanh()
        if calls > 0:
            hidden = hidden + self.mlp(hidden.detach() if self.detached else hidden)
        if calls > 1:
            hidden = hidden + self.mlp(hidden)
        # A backward comes here first, so that a non-reentrant recompute begins before the backward of `mlp`
        return hidden.tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, hidden: Tensor, calls: int = 1) -> Tensor:
        first, second = self.layers
        hidden = second(first(self.embed(hidden), calls=calls), calls=calls)
        return self.head(hidden).square().mean()


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """One side of the comparison: a model that is whole or sharded, checkpointed or not."""

    model: Model
    forward: Callable[[int, int], Tensor]
    """The loss of a micro-batch, with so many calls of each `mlp`."""
    sharded: bool
    refused: list[str] = field(default_factory=list)
    """What was said, where it goes on after that."""
    batches: Iterator[int] = field(default_factory=lambda: iter(range(10)))

    def losses(self, *calls: int) -> list[Tensor]:
        return [self.forward(next(self.batches), count) for count in calls]

    def backward(self, *calls: int) -> None:
        """A forward for each number of calls, and one backward of them all."""
        torch.stack(self.losses(*calls)).sum().backward()

    def set(self, **switches: bool) -> None:
        """Turn switches of FSDP2."""
        for name, on in switches.items():
            if self.sharded:
                getattr(self.model, f"set_{name}")(on)


Step = Callable[[Training], None]


def forwards(*calls: int) -> Step:
    return lambda training: training.backward(*calls)


def accumulate(first: tuple[int, ...], last: tuple[int, ...], *switches: str) -> Step:
    """Two backwards, the first of them with switches of FSDP2 off."""

    def step(training: Training) -> None:
        training.set(**dict.fromkeys(switches, False))
        training.backward(*first)
        training.set(**dict.fromkeys(switches, True))
        training.backward(*last)

    return step


def second_step(training: Training) -> None:
    """One that finds compiled what the first step needed."""
    training.backward(1)
    training.model.zero_grad()
    COMPUTED.clear()
    training.backward(1, 1)


def refused(training: Training) -> None:
    """A step that goes on if it is refused."""
    try:
        training.backward(1, 1)
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        training.refused.append(str(error))


def fail(gradient: Tensor) -> None:
    raise ArithmeticError


def failed(training: Training) -> None:
    """An error that has nothing to do with checkpointing, in a backward that has come half the way."""
    losses = training.losses(1, 1)
    if training.sharded:
        losses[0].register_hook(fail)
    try:
        torch.stack(losses).sum().backward()
    except ArithmeticError:
        return
    assert not training.sharded


def zero(training: Training) -> None:
    training.model.zero_grad()


def reset(training: Training) -> None:
    """FSDP2's own way to go on after an error, and what it leaves to the caller: the gradients.

    They are in the parameters of each module that is unsharded, which the model shows before, and in the sharded ones.
    """
    training.model.zero_grad()
    if training.sharded:
        training.model.reset_iter_state()
    training.model.zero_grad()


def after(first: Step, then: Step) -> Step:
    """A step with non-reentrant checkpointing after one that may have failed, and what was done about that."""

    def step(training: Training) -> None:
        first(training)
        then(training)
        for layer in training.model.layers:
            layer._gradient_checkpointing_func = non_reentrant
        COMPUTED.clear()
        training.backward(1, 1)

    return step


# ---- checkpoint functions, and what is done to a model ---------------------------------------------------------------


reentrant = functools.partial(checkpoint, use_reentrant=True)
non_reentrant = functools.partial(checkpoint, use_reentrant=False)


def without_gradients_first(call: Any, *args: Any) -> Any:
    with torch.no_grad():
        call(*args)
    return non_reentrant(call, *args)


def share_a_layer(model: Model) -> None:
    model.layers[1] = model.layers[0]


def detach(model: Model) -> None:
    for layer in model.layers:
        layer.detached = True


def freeze(model: Model, name: str) -> None:
    for layer in model.layers:
        layer.get_submodule(name).requires_grad_(False)


def shard(model: Model, layers: bool, mesh: DeviceMesh) -> Model:
    for layer in dict.fromkeys(model.layers):
        fully_shard(layer.mlp, mesh=mesh)
        if layers:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_and_compile_layers(model: Model, layers: bool, mesh: DeviceMesh, backend: Backend) -> nn.Module:
    shard(model, layers, mesh)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def compile_mlp_and_shard(model: Model, layers: bool, mesh: DeviceMesh, backend: Backend) -> nn.Module:
    for layer in model.layers:
        layer.mlp = torch.compile(layer.mlp, backend=backend)
    return shard(model, layers, mesh)


def shard_and_compile(model: Model, layers: bool, mesh: DeviceMesh, backend: Backend) -> nn.Module:
    return torch.compile(shard(model, layers, mesh), backend=backend)


@dataclass(frozen=True)
class Case:
    step: Step
    function: Callable[..., Any] = reentrant
    alter: Callable[[Model], None] = lambda model: None
    """What is done to both models before anything else."""
    compile: Callable[[Model, bool, DeviceMesh, Backend], nn.Module] | None = None
    """How the model is sharded and compiled, where it is checkpointed."""


LAST, SYNC = "is_last_backward", "requires_gradient_sync"

CASES: dict[str, Case] = {
    "mlp in both of 2 forwards": Case(forwards(1, 1)),
    "mlp in the first of 2 forwards": Case(forwards(1, 0)),
    "mlp in the second of 2 forwards": Case(forwards(0, 1)),
    "mlp in the middle one of 3 forwards": Case(forwards(0, 1, 0)),
    "mlp in the first and the last of 3 forwards": Case(forwards(1, 0, 1)),
    "mlp twice in 1 forward": Case(forwards(2)),
    "a layer twice in 1 forward": Case(forwards(1), alter=share_a_layer),
    "2 forwards, mlp frozen": Case(forwards(1, 1), alter=functools.partial(freeze, name="mlp")),
    "2 forwards, mlp frozen in part": Case(forwards(1, 1), alter=functools.partial(freeze, name="mlp.0")),
    "2 forwards, mlp called with what requires no gradients": Case(forwards(1, 1), alter=detach),
    "not the last backward: 1 forward, then 1": Case(accumulate((1,), (1,), LAST)),
    "not the last backward: 2 forwards, then 1": Case(accumulate((1, 1), (1,), LAST)),
    "not the last backward: 2 forwards, then 1 without mlp": Case(accumulate((1, 1), (0,), LAST)),
    "not the last backward: 1 forward, then 2": Case(accumulate((1,), (1, 1), LAST)),
    "no sync: 1 forward, then 1": Case(accumulate((1,), (1,), SYNC)),
    "no sync: 2 forwards, then 1": Case(accumulate((1, 1), (1,), SYNC)),
    "no sync: 2 forwards, then 1 without mlp": Case(accumulate((1, 1), (0,), SYNC)),
    "no sync: 1 forward, then 2": Case(accumulate((1,), (1, 1), SYNC)),
    "no sync, not the last backward: 2 forwards, then 1": Case(accumulate((1, 1), (1,), SYNC, LAST)),
    "2 forwards, non-reentrant": Case(forwards(1, 1), non_reentrant),
    "2 forwards, without gradients first, non-reentrant": Case(forwards(1, 1), without_gradients_first),
    "after 2 forwards: zero_grad": Case(after(refused, zero)),
    "after 2 forwards: zero_grad, reset_iter_state, zero_grad": Case(after(refused, reset)),
    "after another error: zero_grad": Case(after(failed, zero)),
    "after another error: zero_grad, reset_iter_state, zero_grad": Case(after(failed, reset)),
    **{
        f"2 forwards, {how}, {kind}": Case(second_step, function, compile=compile)
        for how, compile in {
            "layer.compile()": shard_and_compile_layers,
            "torch.compile(layer.mlp), then sharded": compile_mlp_and_shard,
            "torch.compile(model)": shard_and_compile,
        }.items()
        for kind, function in {"reentrant": reentrant, "non-reentrant": non_reentrant}.items()
    },
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def build(case: Case) -> Model:
    torch.manual_seed(0)
    model = Model().double().train()
    case.alter(model)
    return model


def batch(rank: int, i: int) -> Tensor:
    return torch.randn(4, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + i))


def training_of(model: Model, called: nn.Module, of: range, sharded: bool) -> Training:
    """A model, called through `called`, that is trained on the mean loss over the batches of some ranks."""

    def forward(i: int, calls: int) -> Tensor:
        return torch.stack([called(batch(rank, i), calls=calls) for rank in of]).mean()

    return Training(model, forward, sharded)


def of_whole_model(case: Case, world: int) -> Gradients:
    model = build(case)
    case.step(training_of(model, model, range(world), sharded=False))
    return [parameter.grad for parameter in model.parameters()]


def of_sharded_model(case: Case, layers: bool, checkpointed: bool, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """The gradients, and what was said and counted on the way."""
    model = build(case)
    shapes = [parameter.shape for parameter in model.parameters()]
    backend = Backend("eager")
    if checkpointed:
        for layer in model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = case.function
    if case.compile and checkpointed:
        torch._dynamo.reset()
        called = case.compile(model, layers, mesh, backend)
    else:
        called = shard(model, layers, mesh)
    # What an optimizer holds: where a step has failed, a model has others
    parameters = list(model.parameters())
    training = training_of(model, called, range(rank, rank + 1), sharded=True)
    COMPUTED.clear()
    try:
        case.step(training)
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        return {"gradients": None, "refused": [*training.refused, str(error)], "graphs": backend.frame_count}
    return {
        "gradients": undivided([parameter.grad for parameter in parameters], shapes),
        "refused": training.refused,
        "computed": len(COMPUTED),
        "graphs": backend.frame_count,
    }


def measure(case: Case, layers: bool, rank: int, world: int, mesh: DeviceMesh) -> dict[str, Any]:
    whole = of_whole_model(case, world)
    plain, found = (of_sharded_model(case, layers, checkpointed, rank, mesh) for checkpointed in (False, True))
    row = {"plain": relative_error(plain["gradients"], whole), "refused": found["refused"], "graphs": found["graphs"]}
    if found["gradients"] is None:
        return row | {"error": "refused"}
    return row | {
        "error": relative_error(found["gradients"], whole),
        "computed": found["computed"] / plain["computed"],
    }


def work(rank: int, world: int, put: Callable[[Any], None]) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for name, case in CASES.items():
        for sharded, layers in SHARDED.items():
            put({"case": name, "sharded": sharded} | measure(case, layers, rank, world, mesh))


def main(result: Path) -> None:
    transformers.logging.set_verbosity_error()
    rows = group.train((RANKS,), work)
    result.write_text(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
