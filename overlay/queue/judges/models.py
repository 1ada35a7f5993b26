"""Judge of how transformers' `PreTrainedModel` (modeling_utils.py) enables checkpointing."""

import functools
import importlib.metadata
import sys
from typing import Any

from overlay.queue.judges import MODELS, CannotJudgeError, Files, Verdict, extract, stand_ins
from overlay.queue.judges.stand_ins import Importer, Module, NNModule, Parameter, Tensor

_ENABLING = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
_DEEPSPEED = "0.19.2"
"""The last one with the fault."""


class _Layer(NNModule):
    """In the place of `GradientCheckpointingLayer`."""

    gradient_checkpointing = False

    def forward(self, hidden: Any) -> Any:
        self._ran.append(True)
        return hidden


def peft_zero3(files: Files) -> Verdict:
    """Which kind of checkpoint a layer gets that ZeRO-3 has partitioned and PEFT has frozen, beside a DeepSpeed that
    cannot recompute it in a non-reentrant one.

    A guard anywhere else than in `modeling_utils.py` (in the trainer, in the layer, in PEFT or TRL) is not seen: the
    fault is live then for whoever trains without it.
    """
    _install_deepspeed()
    layers = Module("transformers.modeling_layers", GradientCheckpointingLayer=_Layer)
    source = extract.Module(files[MODELS], "transformers.modeling_utils")
    base = source.run_methods(
        "PreTrainedModel", _ENABLING, ("enable_input_require_grads",), Importer(layers).builtins, NNModule
    )
    model_class = type(
        "Model",
        (base,),
        {
            "supports_gradient_checkpointing": True,
            "main_input_name": "input_ids",
            "enable_input_require_grads": lambda _model: None,
        },
    )
    found = {}
    for enabling in _ENABLING:
        for chosen in ((), ({"use_reentrant": False},)):
            if hasattr(base, enabling):
                found[f"{enabling}({', '.join(map(str, chosen))})"] = _kind(model_class(), enabling, chosen)
    wrong = [call for call, kind in found.items() if kind is False]
    if wrong:
        return Verdict("live", f"a layer with frozen partitions is checkpointed non-reentrantly: {', '.join(wrong)}")
    return Verdict("not live", "a layer with frozen partitions is checkpointed reentrantly")


def _kind(model: Any, enabling: str, chosen: tuple[Any, ...]) -> bool:
    """What `use_reentrant` is for a partitioned layer of `model` after this call."""
    layer = model.layer = _Layer()
    layer._ran = []
    for name, trained in (("weight", False), ("lora", True)):
        setattr(layer, name, Parameter(trained))
        getattr(layer, name).ds_id = 1
    model.train()
    getattr(model, enabling)(*chosen)
    if layer.gradient_checkpointing is not True:
        raise CannotJudgeError(f"expected {enabling} to turn checkpointing on, found that it did not")
    stand_ins.reentrant.clear()
    layer._gradient_checkpointing_func(functools.partial(layer.__call__), Tensor(requires_grad=True))
    if len(stand_ins.reentrant) != 1 or len(layer._ran) != 1 or stand_ins.reentrant[0] not in (True, False):
        raise CannotJudgeError(
            f"expected one checkpoint with use_reentrant set, found {stand_ins.reentrant} and "
            f"{len(layer._ran)} forwards"
        )
    return bool(stand_ins.reentrant[0])


def _install_deepspeed() -> None:
    """Makes this process believe that there is such a DeepSpeed, by whichever way it is asked."""
    sys.modules["deepspeed"] = Module("deepspeed", __version__=_DEEPSPEED)

    def version(distribution_name: str) -> str:
        if distribution_name == "deepspeed":
            return _DEEPSPEED
        raise importlib.metadata.PackageNotFoundError(distribution_name)

    importlib.metadata.version = version
