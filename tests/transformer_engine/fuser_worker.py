"""What TransformerEngine's fusible operations do to the caller's tensors, without its native library.

`python fuser_worker.py RESULT.json` runs the fuser and the operations of the transformer_engine on the path. Only what
these import besides has stand-ins: the state of FP8, which is off here, quantised tensors, of which there are none, and
fused kernels, which take the place of none of these operations.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class NoFP8:
    """FP8GlobalStateManager as far as the operations ask it, with FP8 off."""

    is_fp8_enabled = fp8_graph_capturing = is_first_fp8_module = staticmethod(lambda: False)
    get_fp8_recipe = get_fp8_group = staticmethod(lambda: None)


def restored(context: Any) -> tuple[Tensor, ...]:
    """What 2.15 and later have in the place of `restore_from_saved`."""
    return context.saved_tensors


def unfused(name: str) -> Callable[..., list[Any]]:
    """What releases up to 2.12 import from `ops.fused` by name; later ones register it with the fuser."""
    if not name.startswith("fuse_"):
        raise AttributeError(name)
    return lambda operations, *_: operations


def stand_in(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def package(name: str, folder: Path) -> None:
    """A package with the modules of `folder`, whose own `__init__.py` is not run: it would load the native library."""
    stand_in(name, __path__=[str(folder)])


def load_operations() -> None:
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for name in (
        "transformer_engine",
        *(f"transformer_engine.{part}" for part in ("common", "pytorch", "pytorch.ops", "pytorch.ops.basic")),
    ):
        package(name, root.joinpath(*name.split(".")[1:]))
    recipe = importlib.import_module("transformer_engine.common.recipe")
    stand_in(
        "transformer_engine.pytorch.quantization",
        FP8GlobalStateManager=NoFP8,
        Recipe=recipe.Recipe,
        DelayedScaling=recipe.DelayedScaling,
        RecipeState=object,
        QuantizerRole=object,
        autocast=None,
    )
    stand_in("transformer_engine.pytorch.tensor", Quantizer=object)
    stand_in(
        "transformer_engine.pytorch.quantized_tensor",
        prepare_for_saving=lambda *tensors: (tensors, [None] * len(tensors)),
        restore_from_saved=lambda objects, tensors: tensors,
        restore_from_func_ctx=restored,
    )
    stand_in("transformer_engine.pytorch.ops.fused", __getattr__=unfused)


def operation(name: str, module: str, *arguments: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module(f"transformer_engine.pytorch.ops.basic.{module}"), name)(*arguments)


IDENTITY = operation("Identity", "identity")
EXTRA_OUTPUT = operation("MakeExtraOutput", "make_extra_output")
EXTRA_INPUT = operation("AddExtraInput", "add_extra_input")
RESHAPE = operation("Reshape", "reshape", (4, 8))
SCALE = operation("ConstantScale", "constant_scale", 2.0)

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


def main(result: Path) -> None:
    load_operations()
    found = [
        {"pipeline": pipeline, "input": kind, "gradients": gradients, **apply(operations, make, gradients)}
        for pipeline, operations in PIPELINES.items()
        for kind, make in INPUTS.items()
        for gradients in (True, False)
    ]
    result.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
