"""TransformerEngine's fuser and fusible operations without its native library, so that any machine can run them.

Only what these import besides has stand-ins: the state of FP8, which is off here, quantised tensors, of which there are
none, and fused kernels, which take the place of none of these operations.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn


class NoFP8:
    """FP8GlobalStateManager as far as the operations ask it, with FP8 off."""

    is_fp8_enabled = fp8_graph_capturing = is_first_fp8_module = staticmethod(lambda: False)
    get_fp8_recipe = get_fp8_group = staticmethod(lambda: None)


def restored(context: Any) -> Any:
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
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine")
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
