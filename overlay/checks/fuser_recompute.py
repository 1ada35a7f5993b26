"""TransformerEngine's operation fuser changes `requires_grad` of the caller's tensors under `no_grad`.

With TransformerEngine before 2.16, unpatched. An **error** where fusible operations (`transformer_engine.pytorch.ops`)
lie inside of what is checkpointed with `use_reentrant=True`, whose first forward runs without gradients; a **warning**
where they are anywhere else in the model, for a forward under `no_grad` of evaluation or generation does the same; and
a **warning** for an environment that has such a TransformerEngine.

Where an operation passes a tensor through (`MakeExtraOutput`, `Identity`, `Dropout` in eval mode), a tensor that is no
leaf raises `you can only change requires_grad flags of leaf variables`. A leaf raises nothing: it stops training.

Mend TransformerEngine (`overlay doctor` says how), or upgrade to 2.16.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlay.checks.environment import Environment
from overlay.checks.finding import Finding, Severity
from overlay.checks.subject import Subject, places

if TYPE_CHECKING:
    from torch import nn

CODE = "fuser-recompute"

_OPERATIONS = "transformer_engine.pytorch.ops"
_WHY = (
    "under no_grad, requires_grad is set on the caller's own tensors: one that is no leaf raises, and a leaf stops "
    "training without an error"
)
_FIX = 'mend TransformerEngine as `overlay doctor` says, or pip install "transformer_engine[pytorch]>=2.16"'


def in_environment(environment: Environment) -> Iterator[Finding]:
    if _faulty(environment):
        version = environment.version("transformer_engine") or ""
        yield Finding(
            CODE, "warning", f"transformer_engine {version}".rstrip(), "its operation fuser is unpatched", _WHY, _FIX
        )


def in_model(subject: Subject) -> Iterator[Finding]:
    if not _faulty(subject.environment):
        return
    operations = {module: name for module, name in subject.names.items() if _is_operation(module)}
    inside = {
        operations[module]: None
        for _, region in subject.reentrant_regions
        for module in region.modules()
        if module in operations
    }
    outside = [name for name in operations.values() if name not in inside]
    severity: Severity
    for severity, names, what in (
        ("error", inside, "fusible operations of an unpatched fuser, checkpointed with use_reentrant=True"),
        ("warning", outside, "fusible operations of an unpatched fuser"),
    ):
        if names:
            yield Finding(CODE, severity, places(names), what, _WHY, _FIX)


def _faulty(environment: Environment) -> bool:
    """By the source: a build from a commit says little in its version.

    Without gradients the fuser calls its forward by itself since 1.13, and that does not set flags since 2.16.
    """
    source = environment.source(f"{_OPERATIONS}.fuser")
    return source is not None and b"is_grad_enabled" in source and b"set_output_requires_grad" not in source


def _is_operation(module: "nn.Module") -> bool:
    return any(one.__module__.startswith(f"{_OPERATIONS}.") for one in type(module).__mro__)
