"""Judge of TransformerEngine's `OperationFuser` (pytorch/ops/fuser.py)."""

from types import SimpleNamespace
from typing import Any

from overlay.queue.judges import FUSER, CannotJudgeError, Files, Verdict, extract, stand_ins
from overlay.queue.judges.stand_ins import Importer, Module, Tensor, miss

_OPS = "transformer_engine.pytorch"


class _Operation:
    """A basic operation that hands its input on, as `Identity` does, and once more, as `MakeExtraOutput` does."""

    is_fused_op = False
    num_extra_inputs = 0
    _extra_input_channels = ()

    def __init__(self, extra_outputs: int) -> None:
        self.num_extra_outputs = extra_outputs
        self._extra_output_channels = (None,) * extra_outputs
        self._extra_output_to_caller = (True,) * extra_outputs
        self.runs = 0

    def _nothing(self, *_arguments: Any, **_keywords: Any) -> None:
        return None

    reset_recipe_state = pre_first_fuser_forward = pre_fuser_forward = _lock_extra_tensor_channels = _nothing
    get_grad_output_quantizer = get_input_quantizer = _nothing

    def parameters(self) -> list[Any]:
        return []

    def fuser_forward(self, _contexts: Any, value: Any, **_keywords: Any) -> tuple[Any, list[tuple[Any, ...]]]:
        self.runs += 1
        return value, [(value,) * self.num_extra_outputs]

    def __getattr__(self, name: str) -> Any:
        miss(f"transformer_engine.pytorch.ops.BasicOperation.{name}")


class _Fused(Module):
    """The package `ops.fused`: up to 2.12 the fuser imports its fusions by name. None of them fits these operations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("fuse_"):
            return lambda operations, *_recipe: operations
        return super().__getattr__(name)


class _NoFP8:
    """`FP8GlobalStateManager`, with FP8 off."""

    is_fp8_enabled = is_first_fp8_module = staticmethod(lambda: False)


def _importer() -> Importer:
    recipe = type("Recipe", (), {})
    base, fused = type("BasicOperation", (), {}), type("FusedOperation", (), {})
    return Importer(
        Module(
            f"{_OPS}.quantization", FP8GlobalStateManager=_NoFP8, Recipe=recipe, DelayedScaling=type("D", (recipe,), {})
        ),
        Module(
            f"{_OPS}.quantized_tensor",
            prepare_for_saving=lambda *tensors: (tensors, [None] * len(tensors)),
            restore_from_saved=lambda _objects, tensors: tensors,
            restore_from_func_ctx=lambda context: context.saved_tensors,
        ),
        Module(
            f"{_OPS}.ops.op",
            BasicOperation=base,
            FusibleOperation=object,
            FusedOperation=fused,
            OperationContext=lambda: SimpleNamespace(to_save=None),
        ),
        _Fused(f"{_OPS}.ops.fused"),
    )


def requires_grad(files: Files) -> Verdict:
    """Whether the fuser sets `requires_grad` of the caller's own tensors under no_grad: of a non-leaf, which raises,
    and of a leaf, which stops training."""
    fuser = extract.Module(files[FUSER], f"{_OPS}.ops.fuser").run("OperationFuser", _importer().builtins)
    seen = []
    for extra in (0, 1):
        for is_leaf in (False, True):
            tensor = Tensor(requires_grad=True, is_leaf=is_leaf)
            operation = _Operation(extra)
            what = f"{'MakeExtraOutput' if extra else 'Identity'}, {'a leaf' if is_leaf else 'a non-leaf'}"
            try:
                with stand_ins.set_grad_enabled(False):
                    outputs = fuser([operation])(tensor, basic_op_kwargs=[{}])
            except RuntimeError as error:
                if is_leaf or str(error) != stand_ins.LEAVES_ONLY:
                    raise
                seen.append(f"{what}: RuntimeError")
                continue
            returned = outputs if isinstance(outputs, tuple) else (outputs,)
            if (
                operation.runs != 1
                or len(returned) != 1 + extra
                or not all(isinstance(one, Tensor) for one in returned)
            ):
                raise CannotJudgeError(
                    f"expected the operation to run once and {1 + extra} outputs, found {operation.runs} and "
                    f"{len(returned)}"
                )
            if not tensor.requires_grad:
                seen.append(f"{what}: its flag was turned off")
    if seen:
        return Verdict("live", f"under no_grad {'; '.join(seen)}")
    return Verdict("not live", "under no_grad a tensor of the caller keeps its flag")
