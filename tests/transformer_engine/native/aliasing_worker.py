"""What becomes of a tensor that a pipeline passes through when its caller does something to what comes out.

`python aliasing_worker.py RESULT.json native` asks the transformer_engine on the path. With `alone` in the place of
`native` its fuser and its operations are loaded without the native library (overlay.measure.te_stand_ins), so that a
release answers whose library is not there.
"""

import importlib
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from overlay.measure import te_stand_ins
from tests.transformer_engine.native import devices

OWN, VIEW = "the caller's tensor", "a view of it"
KEPT, CHANGED, FREED = "harmless", "changes the caller's tensor", "frees the caller's tensor"
STOPPED = "the caller's tensor stops training"
RIGHT, WRONG = "right gradients", "wrong gradients, silently"
IN_FORWARD = "RuntimeError in the forward"


def load(how: str) -> None:
    """Import transformer_engine and megatron-core. Megatron finds only a whole transformer_engine, or none."""
    if how == "alone":
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    for module in ("tensor_parallel.random", "pipeline_parallel.schedules"):
        importlib.import_module(f"megatron.core.{module}")
    if how == "alone":
        del sys.modules["transformer_engine"]
        te_stand_ins.load_operations()
    else:
        importlib.import_module("transformer_engine.pytorch")


def operation(name: str, module: str, *arguments: Any, **options: Any) -> nn.Module:
    return getattr(importlib.import_module(f"transformer_engine.pytorch.ops.basic.{module}"), name)(
        *arguments, **options
    )


def sequential(*operations: nn.Module) -> nn.Module:
    return importlib.import_module("transformer_engine.pytorch.ops.sequential").Sequential(*operations)


def pipeline() -> nn.Module:
    """Gives what it is given, scaled, and passes it through as well."""
    return sequential(
        operation("MakeExtraOutput", "make_extra_output"), operation("ConstantScale", "constant_scale", 2.0)
    )


def leaf() -> Tensor:
    return torch.randn((4, 8), generator=torch.Generator().manual_seed(0)).requires_grad_()


def hidden() -> Tensor:
    """What a layer is given in training: no leaf, and it requires gradients."""
    return leaf() * 1


def with_gradients(tensor: Tensor) -> Tensor:
    return pipeline()(tensor)[1]


def without_gradients(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return pipeline()(tensor)[1]


def from_a_checkpoint(tensor: Tensor) -> Tensor:
    return checkpoint(pipeline(), tensor, use_reentrant=True)[1]


MODES = {
    "with gradients": with_gradients,
    "from a reentrant checkpoint": from_a_checkpoint,
    "without gradients": without_gradients,
    "without gradients, of a tensor that requires none": lambda tensor: without_gradients(tensor.detach_()),
}


def relation(tensor: Tensor, found: Tensor) -> str:
    assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return OWN if found is tensor else VIEW


def data(do: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], str]:
    """What becomes of the caller's values."""

    def becomes(tensor: Tensor, found: Tensor) -> str:
        before = tensor.detach().clone()
        do(found)
        if tensor.untyped_storage().nbytes() == 0:
            return FREED
        return KEPT if tensor.shape == before.shape and torch.equal(tensor, before) else CHANGED

    return becomes


def training(do: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], str]:
    """What becomes of the caller's gradients."""

    def becomes(tensor: Tensor, found: Tensor) -> str:
        do(found)
        return KEPT if tensor.requires_grad else STOPPED

    return becomes


def hook(tensor: Tensor, found: Tensor) -> str:
    called: list[Tensor] = []
    found.register_hook(called.append)
    tensor.sum().backward()
    return "runs for the caller's tensor" if called else KEPT


def assign(tensor: Tensor) -> None:
    tensor.data = torch.empty(1)


def deallocate(tensor: Tensor) -> None:
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    schedules.deallocate_output_tensor(tensor, deallocate_pipeline_outputs=True)


def resize(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


ACTIONS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor], str]]] = {
    "nothing: what `out` is": (hidden, relation),
    "`out += x`": (hidden, data(lambda out: out.add_(1))),
    "`out.data = x`": (hidden, data(assign)),
    "`deallocate_output_tensor(out)` of Megatron-LM": (hidden, data(deallocate)),
    "`out.untyped_storage().resize_(0)`": (hidden, data(resize)),
    "`out.detach_()`": (hidden, training(Tensor.detach_)),
    "`out.requires_grad_(False)`, a leaf": (leaf, training(lambda out: out.requires_grad_(False))),
    "`out.register_hook(f)`": (hidden, hook),
}
"""What is done, to what."""


def observe(make: Callable[[], Tensor], apply: Callable[[Tensor], Tensor], act: Callable[[Tensor, Tensor], str]) -> str:
    tensor = make()
    try:
        found = apply(tensor)
    except RuntimeError:
        return IN_FORWARD
    try:
        return act(tensor, found)
    except (RuntimeError, AssertionError) as error:
        return type(error).__name__


def checkpointed(tensor: Tensor) -> tuple[Any, Tensor, Tensor]:
    """A pipeline under Megatron's `CheckpointWithoutOutput`: this, and what comes out."""
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    kept = module.CheckpointWithoutOutput(**({} if module.HAVE_TE else {"fp8": None}))
    return kept, *kept.checkpoint(pipeline(), tensor)


def all_discarded() -> str:
    tensor = hidden()
    try:
        kept, scaled, _ = checkpointed(tensor)
    except RuntimeError:
        return IN_FORWARD
    loss = scaled.square().sum()
    kept.discard_output_and_register_recompute(loss)
    return f"{KEPT if tensor.untyped_storage().nbytes() else FREED}; {ending(loss.backward)}"


def ending(do: Callable[[], Any]) -> str:
    """How a call ends, in a process of its own."""
    child = os.fork()
    if child == 0:
        torch.cuda._is_in_bad_fork = lambda: False  # there is no device that minds
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            do()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "an exception" if os.WEXITSTATUS(status) else "no error"


def others_discarded() -> str:
    """Gradients against no recompute, where what is passed through is kept."""
    tensor, reference = hidden(), hidden()
    for one in (tensor, reference):
        one.retain_grad()
    try:
        kept, scaled, out = checkpointed(tensor)
    except RuntimeError:
        return IN_FORWARD
    kept.outputs = (scaled,)
    loss = scaled.square()
    kept.discard_output_and_register_recompute(loss)
    assert scaled.untyped_storage().nbytes() == 0
    (loss + out).sum().backward()
    scaled, out = pipeline()(reference)
    (scaled.square() + out).sum().backward()
    return RIGHT if torch.equal(tensor.grad, reference.grad) else WRONG


def added_in_place() -> str:
    """`AddExtraInput(in_place=True)` and what needs its values, under a reentrant checkpoint, against no recompute."""

    def run(*tensors: Tensor) -> Tensor:
        return sequential(operation("AddExtraInput", "add_extra_input", in_place=True))(*tensors).square()

    found = []
    for recompute in (False, True):
        main, extra = hidden(), hidden()
        extra.retain_grad()
        output = checkpoint(run, main, extra, use_reentrant=True) if recompute else run(main, extra)
        output.sum().backward()
        found.append(extra.grad)
    return RIGHT if torch.equal(*found) else WRONG


def main(result: Path, how: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    load(how)
    devices.answer()
    crash = all_discarded()  # before any backward, after which a fork has none
    found = {
        "actions": {
            name: {mode: observe(make, apply, act) for mode, apply in MODES.items()}
            for name, (make, act) in ACTIONS.items()
        },
        "recomputes": {
            "`CheckpointWithoutOutput` of Megatron-LM, all discarded": crash,
            "`CheckpointWithoutOutput` of Megatron-LM, all but `out` discarded": others_discarded(),
            "`AddExtraInput(in_place=True)` under a reentrant checkpoint": added_in_place(),
        },
    }
    result.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
