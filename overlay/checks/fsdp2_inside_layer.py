"""A module that `fully_shard` shards lies inside of what is checkpointed with `use_reentrant=True`.

An **error** on every release, patched or not: `fully_shard(layer.mlp)`, experts that are sharded by themselves, or
PyTorch's reentrant `checkpoint_wrapper` around a sharded layer. Frozen modules are left out: they have no gradients to
lose. A **warning** where the checkpoint function is not PyTorch's, so that it cannot be told whether it is reentrant.

The hooks of the module run again in the recompute, and FSDP2 then drops its gradients of all but one of the forwards
before a backward. Stock transformers, 5.23 and later included, say nothing. The patched wheel and the overlay raise in
the backward that would lose them.

Use non-reentrant checkpointing, or shard whole layers only.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, places

if TYPE_CHECKING:
    from torch import nn

CODE = "fsdp2-inside-layer"

_WHY = (
    "with two forwards before a backward its gradients are dropped without an error, or refused where transformers is "
    "patched"
)
_FIX = (
    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}), or fully_shard whole '
    "checkpointed layers only"
)


def in_model(subject: Subject) -> Iterator[Finding]:
    reentrant = {name: None for _, region in subject.reentrant_regions for name in _inside(subject, region)}
    if reentrant:
        yield Finding(
            CODE,
            "error",
            places(reentrant),
            "fully_shard on a module inside of what is checkpointed with use_reentrant=True",
            _WHY,
            _FIX,
        )
    unknown = {
        name: None
        for layer in subject.checkpointed
        if layer.reentrant is None
        for name in _inside(subject, layer.module)
        if name not in reentrant
    }
    if unknown:
        yield Finding(
            CODE,
            "warning",
            places(unknown),
            "fully_shard on a module inside of what a checkpoint function of unknown kind checkpoints",
            f"if it is reentrant, {_WHY}",
            _FIX,
        )


def _inside(subject: Subject, region: "nn.Module") -> Iterator[str]:
    """What is sharded inside of a region, and trains."""
    for module in region.modules():
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if module is not region and module in subject.sharded and trains:
            yield subject.names[module]
