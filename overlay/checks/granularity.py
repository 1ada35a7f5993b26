"""What is checkpointed is finer than a block, or only some of the blocks are: less memory is saved than could be.

- A checkpoint wrapper around parts of a block that is not checkpointed itself: a **warning**. A checkpoint keeps its
  inputs and what is between the checkpoints. Bytes that a Llama of eight layers keeps for the backward, in per cent of
  those without checkpointing: a wrapper around each block 7, around each attention and each MLP 24, around the MLPs
  alone 47, around the attentions alone 78, around the norms 91; around linear modules or activation functions 100, for
  these keep but their inputs anyway, and are computed twice for nothing.
- Some blocks of a list are checkpointed and others of the same class are not: an **info**, since that may be meant to
  trade memory for time.

Checkpoint whole blocks: `model.gradient_checkpointing_enable()`, or `checkpoint_wrapper(block)`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, places

if TYPE_CHECKING:
    from torch import nn

CODE = "granularity"


def in_model(subject: Subject) -> Iterator[Finding]:
    blocks = _blocks(subject)
    checkpointed = {layer.module for layer in subject.checkpointed} | subject.wrapped.keys()
    leaves: list[str] = []
    parts: list[str] = []
    for block in blocks:
        if block in checkpointed:
            continue
        for part in block.modules():
            if part is not block and part in subject.wrapped:
                (parts if any(part.children()) else leaves).append(subject.wrapped[part])
    for names, what, why in (
        (leaves, "a checkpoint around a single operation", "it keeps the same input as the operation by itself would"),
        (
            parts,
            "checkpoints around parts of a block",
            "what goes in and out of each part is kept, not of the block alone",
        ),
    ):
        if names:
            yield Finding(
                CODE,
                "warning",
                places(dict.fromkeys(names)),
                what,
                f"{why}: time is lost for little memory",
                "checkpoint whole blocks: model.gradient_checkpointing_enable(), or checkpoint_wrapper(block)",
            )
    yield from _some(subject, blocks, checkpointed)


def _blocks(subject: Subject) -> "dict[nn.Module, str]":
    """What the model repeats: layers of transformers, and modules of the classes in `_no_split_modules`."""
    classes = {name for model in subject.pretrained for name in getattr(model, "_no_split_modules", None) or ()}
    layers = {layer.module: layer.name for layer in subject.layers}
    return layers | {
        module: name
        for module, name in subject.names.items()
        if any(base.__name__ in classes for base in type(module).__mro__)
    }


def _some(subject: Subject, blocks: "dict[nn.Module, str]", checkpointed: "set[nn.Module]") -> Iterator[Finding]:
    inside = {part for block in checkpointed for part in block.modules()}
    rows: dict[tuple[str, type], list[nn.Module]] = {}
    for block, name in blocks.items():
        above = name.removesuffix("._checkpoint_wrapped_module").rpartition(".")[0]
        rows.setdefault((above, type(block)), []).append(block)
    for (above, made), row in rows.items():
        without = [
            block for block in row if block not in inside and any(one.requires_grad for one in block.parameters())
        ]
        if above and any(block in checkpointed for block in row) and without:
            yield Finding(
                CODE,
                "info",
                places(blocks[block] for block in without),
                f"{len(without)} of the {len(row)} {made.__name__} in {above} are not checkpointed",
                "they keep all that their backward needs",
                "leave it so if that is meant, else model.gradient_checkpointing_enable()",
            )
