"""Generation from a model in training mode with checkpointing on gives other tokens than in eval mode.

An **info** on stock transformers 5.0 to 5.23 for a model that can generate, is in training mode and has checkpointed
layers, as in RL; for GPT-2 on every release, patched or not. No warning, because nothing shows that you do generate:
without, there is nothing to do.

The layers drop their cache and the model keeps its positions and masks, so that the tokens differ from the second on,
without an error.

Generate in eval mode, or mend transformers (`overlay doctor` says how).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject

if TYPE_CHECKING:
    from torch import nn

CODE = "training-generation"


def in_model(subject: Subject) -> Iterator[Finding]:
    training = {layer.module for layer in subject.checkpointed if layer.module.training}
    reported: set[nn.Module] = set()
    for model in subject.pretrained:
        if model in reported or not _generates(model):
            continue
        parts = set(model.modules())
        if parts.isdisjoint(training):
            continue
        reported |= parts
        always = any(type(part).__name__ == "GPT2Model" for part in parts)
        if always or _faulty(subject):
            yield Finding(
                CODE,
                "info",
                subject.names[model],
                "can generate, is in training mode, and has checkpointed layers",
                "model.generate() in this mode gives other tokens than in eval mode, without an error",
                "model.eval() before model.generate(), and model.train() after it"
                + ("" if always else "; or mend transformers as `overlay doctor` says"),
            )


def _faulty(subject: Subject) -> bool:
    environment = subject.environment
    return environment.before("transformers", "5.24") and "transformers.modeling_layers" not in environment.patched


def _generates(model: "nn.Module") -> bool:
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can())
