"""Frozen parameters in layers with non-reentrant checkpointing, under ZeRO-3 of a DeepSpeed before 0.19.3.

An **error**, as with PEFT: DeepSpeed has partitioned the frozen parameters again when the recompute reads them, and
backward raises CheckpointError, those that it keeps whole (`stage3_param_persistence_threshold`) not excepted.

Upgrade DeepSpeed. Reentrant checkpointing trains too, with one forward before each backward and inputs that require
gradients (`model.enable_input_require_grads()`). Silent where transformers has this project's guard
(`modeling_utils.py`, patched or overlaid), which does that by itself.
"""

from collections.abc import Iterator

from overlay.checks.environment import Environment
from overlay.checks.finding import Finding
from overlay.checks.subject import Layer, Subject, places

CODE = "peft-zero3"

_MENDED = "0.19.3"
_FIX = f'pip install "deepspeed>={_MENDED}"'


def in_environment(environment: Environment) -> Iterator[Finding]:
    if _faulty(environment) and environment.version("peft") and environment.version("transformers"):
        yield Finding(
            CODE,
            "info",
            f"deepspeed {environment.version('deepspeed')}",
            "PEFT is installed beside it, and transformers has no guard",
            "under ZeRO-3, backward raises CheckpointError for frozen parameters in non-reentrant checkpointing",
            _FIX,
        )


def in_model(subject: Subject) -> Iterator[Finding]:
    if not _faulty(subject.environment):
        return
    names = [layer.name for layer in subject.checkpointed if layer.reentrant is False and _has_frozen_partitions(layer)]
    trained = any(parameter.requires_grad for parameter in subject.model.parameters())
    if names and trained:
        yield Finding(
            CODE,
            "error",
            places(names),
            f"frozen parameters under ZeRO-3 of DeepSpeed {subject.environment.version('deepspeed')}, with "
            "use_reentrant=False",
            "they are partitioned in the recompute, and backward raises CheckpointError",
            f'{_FIX}, or model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": True}}) '
            "and model.enable_input_require_grads()",
        )


def _faulty(environment: Environment) -> bool:
    return environment.before("deepspeed", _MENDED) and "transformers.modeling_utils" not in environment.patched


def _has_frozen_partitions(layer: Layer) -> bool:
    """By the attributes that ZeRO-3 gives to parameters."""
    return any(hasattr(parameter, "ds_id") and not parameter.requires_grad for parameter in layer.module.parameters())
