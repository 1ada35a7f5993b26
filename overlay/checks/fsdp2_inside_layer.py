"""A module that `fully_shard` shards lies inside of what is checkpointed with `use_reentrant=True`.

An **error** on every release, patched or not: `fully_shard(layer.mlp)`, experts that are sharded by themselves, or
PyTorch's reentrant `checkpoint_wrapper` around a sharded layer. Frozen modules are left out: they have no gradients to
lose.

The hooks of the module run again in the recompute, and FSDP2 then drops its gradients of all but one of the forwards
before a backward. Stock transformers, 5.23 and later included, say nothing. The patched wheel and the overlay raise in
the backward that would lose them.

Use non-reentrant checkpointing, or shard whole layers only.
"""

from collections.abc import Iterator

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, places

CODE = "fsdp2-inside-layer"


def in_model(subject: Subject) -> Iterator[Finding]:
    inside = {
        subject.names[module]: None
        for _, region in subject.reentrant_regions
        for module in region.modules()
        if module is not region
        and module in subject.sharded
        and any(parameter.requires_grad for parameter in module.parameters())
    }
    if inside:
        yield Finding(
            CODE,
            "error",
            places(inside),
            "fully_shard on a module inside of what is checkpointed with use_reentrant=True",
            "with two forwards before a backward its gradients are dropped without an error, or refused where "
            "transformers is patched",
            'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}), or '
            "fully_shard whole checkpointed layers only",
        )
