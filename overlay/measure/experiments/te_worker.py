"""What TransformerEngine's fusible operations do to the caller's tensors, without its native library.

A worker (`overlay.measure.rows`), which runs the fuser and the operations of the transformer_engine on the path, with
stand-ins for the rest (`overlay.measure.te_stand_ins`).
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlay.measure import rows
from overlay.measure.experiments import loaded
from overlay.measure.experiments.te import CHECKPOINT, GRADIENTS, NO_GRAD
from overlay.measure.te_stand_ins import EXTRA_INPUT, EXTRA_OUTPUT, IDENTITY, RESHAPE, SCALE, load_operations

PIPELINES = {
    "Identity": [IDENTITY],
    "MakeExtraOutput": [EXTRA_OUTPUT],
    "MakeExtraOutput, Identity": [EXTRA_OUTPUT, IDENTITY],
    "Identity, MakeExtraOutput": [IDENTITY, EXTRA_OUTPUT],
    "MakeExtraOutput, MakeExtraOutput": [EXTRA_OUTPUT, EXTRA_OUTPUT],
    "MakeExtraOutput, ConstantScale": [EXTRA_OUTPUT, SCALE],
    "ConstantScale, MakeExtraOutput": [SCALE, EXTRA_OUTPUT],
    "Reshape, MakeExtraOutput": [RESHAPE, EXTRA_OUTPUT],
    "MakeExtraOutput, AddExtraInput": [EXTRA_OUTPUT, EXTRA_INPUT],
}


def values() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


INPUTS: dict[str, Callable[[], Tensor]] = {
    "leaf": lambda: values().requires_grad_(),
    "parameter": lambda: nn.Parameter(values()),
    "plain leaf": values,
    "non-leaf": lambda: values().requires_grad_() * 1,
    "view of a leaf": lambda: values().requires_grad_().view(8, 4).view(4, 8),
    "view of a plain leaf": lambda: values().view(8, 4).view(4, 8),
    "detached leaf": lambda: values().requires_grad_().detach().requires_grad_(),
}


TRAINED = [name for name, make in INPUTS.items() if make().requires_grad]


def describe(tensor: Tensor) -> list[Any]:
    return [tensor.requires_grad, tensor.is_leaf, tensor.tolist()]


def apply(pipeline: list[Callable[[], nn.Module]], make: Callable[[], Tensor], gradients: bool) -> dict[str, Any]:
    """The caller's tensors before and after a call of the pipeline, and with gradients enabled also their gradients."""
    model = importlib.import_module("transformer_engine.pytorch.ops.sequential").Sequential(
        *(operation() for operation in pipeline)
    )
    given = [make() for _ in range(2 if EXTRA_INPUT in pipeline else 1)]
    for tensor in given:
        if tensor.requires_grad:
            tensor.retain_grad()
    found: dict[str, Any] = {"before": [describe(tensor) for tensor in given]}
    try:
        with torch.set_grad_enabled(gradients):
            outputs = model(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found["outputs"] = [tensor.tolist() for tensor in outputs]
        if gradients:
            found["output flags"] = [describe(tensor)[:2] for tensor in outputs]
            differentiable = [(i + 1) * (tensor**2).sum() for i, tensor in enumerate(outputs) if tensor.requires_grad]
            if differentiable:
                torch.stack(differentiable).sum().backward()
            found["gradients"] = [None if tensor.grad is None else tensor.grad.tolist() for tensor in given]
    except RuntimeError as error:
        found["error"] = str(error)
    found["after"] = [describe(tensor) for tensor in given]
    return found


def recompute(pipeline: list[Callable[[], nn.Module]], make: Callable[[], Tensor]) -> dict[str, Any]:
    """Whether the gradients of the caller's tensors are the same in a reentrant checkpoint, whose forward is without
    gradients, as without one."""

    def trained(checkpointed: bool) -> list[Tensor | None]:
        given = [make() for _ in range(2 if EXTRA_INPUT in pipeline else 1)]
        for tensor in given:
            tensor.retain_grad()
        model = importlib.import_module("transformer_engine.pytorch.ops.sequential").Sequential(
            *(operation() for operation in pipeline)
        )

        def block(*inputs: Tensor) -> Tensor:
            outputs = model(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return torch.stack([(tensor**2).sum() for tensor in outputs]).sum()

        loss = checkpoint(block, *given, use_reentrant=True) if checkpointed else block(*given)
        (loss + torch.zeros((), requires_grad=True)).backward()  # as where other parts of a model train
        return [tensor.grad for tensor in given]

    try:
        found, expected = trained(True), trained(False)
    except RuntimeError as error:
        return {"error": str(error)}
    pairs = zip(found, expected, strict=True)
    return {"same": all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)}


def main() -> None:
    rows.told()
    load_operations()
    calls = [(pipeline, kind, way) for pipeline in PIPELINES for kind in INPUTS for way in (GRADIENTS, NO_GRAD)]
    recomputes = [(pipeline, kind, CHECKPOINT) for pipeline in PIPELINES for kind in TRAINED]
    owed = [{"pipeline": pipeline, "input": kind, "way": way} for pipeline, kind, way in calls + recomputes]
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:  # a tree on the path
        version = ""
    rows.put(
        {
            "transformer_engine": version,
            "state": loaded.state("transformer_engine"),
            "torch": torch.__version__,
            "owed": owed,
        }
    )
    for row in owed:
        pipeline, make = PIPELINES[row["pipeline"]], INPUTS[row["input"]]
        found = (
            recompute(pipeline, make) if row["way"] == CHECKPOINT else apply(pipeline, make, row["way"] == GRADIENTS)
        )
        rows.put(row | found)
    rows.done()


if __name__ == "__main__":
    main()
