"""A checkpointed block changes its input, a parameter or a buffer in place, and the recompute starts from the change.

Found in the source of the block's `forward`, of its submodules' and of the functions that these call: `x += …`,
`x[...] = …`, `x.add_(…)`, `F.relu(x, inplace=True)`, `out=`, and modules with `inplace=True`, where `x` is an argument
of the block, a view of one, or state of a module. A change of a tensor that the block itself has made is not reported
(most are harmless; [`overlay bench`](bench.md) names those that are not), nor is one in a branch that the block's
attributes rule out. Nothing is run.

- An argument of the block, or a parameter: an **error**. Backward raises RuntimeError (`modified by an inplace
  operation`, or `a leaf Variable that requires grad`). It does not for an argument that is passed by keyword or in a
  tuple, or is changed through `.data`, and in reentrant mode for one without gradients, `.detach()` included: gradients
  are wrong, without an error.
- An argument that may have been copied before (`x.float()`, `x.contiguous()`, one of two branches): a **warning**.
- A parameter that `.data.clamp_(…)`, `zero_` or `fill_` changes: a **warning**. The recompute does the same again, and
  gradients are right unless the block read the parameter before.
- A buffer, or a tensor in a plain attribute of a module: a **warning**. It moves twice a step, and gradients are wrong,
  without an error, where it is read as well.
- Batch normalisation in training mode: a **warning**. Gradients are right; the running statistics, which eval mode
  reads, move twice a step. With transformers 5.14.1 these have it in what they checkpoint: the Conformer layers of
  Wav2Vec2, SeamlessM4T, Parakeet and LASR, and EfficientLoFTR, MobileViT, PP-LCNet, SLANet, SwiftFormer and UVDoc.

Write the operation out of place (`x = x + y`), or change a copy (`x.clone()`). Count in a hook that does not run in the
recompute, or outside of the model.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlay.checks.finding import Finding, Severity
from overlay.checks.subject import Subject, places

if TYPE_CHECKING:
    from torch import nn

    from overlay.in_place import Change

CODE = "in-place-operation"

_INPUT = "the recompute starts from what was changed: backward raises RuntimeError, or gradients are wrong, silently"
_BUFFER = "it is changed again in the recompute; gradients are wrong, without an error, where it is read as well"
_SAME = "the recompute does the same again; gradients are wrong, without an error, where it was read before"
_STATISTICS = "the running statistics move twice a step, so that eval mode differs from training without checkpointing"
_IDEMPOTENT = re.compile(r"\.data\.(clamp|clamp_max|clamp_min|clip|fill|zero)_\(")
FIX = "write it out of place (`x = x + y`), or change a copy (`x.clone()`)"


def in_model(subject: Subject) -> Iterator[Finding]:
    found: dict[tuple[str, str, str, int], list[tuple[str, Change]]] = {}
    for name, block in _blocks(subject):
        for change in _changes(block):
            key = ("", "", "", 0) if change.origin.kind == "statistics" else _key(change)
            found.setdefault(key, []).append((name, change))
    for changes in found.values():
        _, change = changes[0]
        if change.origin.kind == "statistics":
            yield Finding(
                CODE,
                "warning",
                places(_dotted(name, one.origin.name) for name, one in changes),
                "batch normalisation in a checkpointed block",
                _STATISTICS,
                "put it in eval mode where its statistics are not to move, or leave this block out of checkpointing",
            )
            continue
        severity, what, why = _told(change)
        yield Finding(
            CODE,
            severity,
            places(dict.fromkeys(_dotted(name, one.module) for name, one in changes)),
            f"`{change.statement}` changes {what} in place ({change.file}:{change.line})",
            why,
            FIX,
        )


def _blocks(subject: Subject) -> "Iterator[tuple[str, nn.Module]]":
    for layer in subject.checkpointed:
        yield layer.name, layer.module
    own = {layer.module for layer in subject.checkpointed}
    yield from ((name, module) for module, name in subject.wrapped.items() if module not in own)


def _changes(block: "nn.Module") -> "list[Change]":
    from overlay import in_place

    return in_place.changes(block)


def _key(change: "Change") -> tuple[str, str, str, int]:
    return change.origin.kind, change.statement, change.file, change.line


def _told(change: "Change") -> tuple[Severity, str, str]:
    name = change.origin.name
    if change.origin.kind in ("buffer", "attribute"):
        return "warning", f"the {change.origin.kind} `{name}`", _BUFFER
    if change.origin.kind == "parameter" and _IDEMPOTENT.search(change.statement):
        return "warning", f"the parameter `{name}`", _SAME
    of = f"the argument `{name}`" if change.origin.kind == "input" else f"the parameter `{name}`"
    return ("error", of, _INPUT) if change.certain else ("warning", f"what may be {of}", _INPUT)


def _dotted(*names: str) -> str:
    return ".".join(name for name in names if name)
