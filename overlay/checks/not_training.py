"""Checkpointing is on, and the layers are not in training mode, so that it does not take place.

A **warning** for layers with parameters that require gradients. `from_pretrained` leaves a model in eval mode; a
`Trainer` changes that when it starts, a loop of your own has to. Layers without such parameters, as those of a frozen
tower, are left out.

Call `model.train()` before training.
"""

from collections.abc import Iterator

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, places

CODE = "not-training"


def in_model(subject: Subject) -> Iterator[Finding]:
    names = [layer.name for layer in subject.checkpointed if not layer.module.training and layer.trains]
    if names:
        yield Finding(
            CODE,
            "warning",
            places(names),
            "checkpointing is on, and the layer is in eval mode",
            "it is not checkpointed: memory is used as without checkpointing",
            "model.train()",
        )
