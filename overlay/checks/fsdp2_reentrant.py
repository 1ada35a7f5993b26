"""A layer sharded by `fully_shard` is checkpointed with `use_reentrant=True`, its hooks inside of the checkpoint.

Fires on stock transformers 5.0 to 5.22, and where somebody else has replaced the call of a patched layer. An **error**
where a layer is checkpointed so; a **warning** where the checkpoint function is not PyTorch's, so that it cannot be
told whether it is reentrant.

FSDP2 does its work in hooks of the layer. Run again in a recompute, they leave the gradients of all but one of the
forwards before a backward behind (DPO, RL, a layer that is shared within one forward): nothing is raised, and the
relative error of the gradients is about 0.5. One forward before each backward is right.

Use non-reentrant checkpointing, or mend transformers (`overlay doctor` says how). Silent with the patched wheel, with
the overlay, and from 5.23 on, where upstream keeps the hooks outside.

Where neither can be done, this stops the run before it trains wrongly:

```python
overlay.check(model, raise_on_error=True)
```
"""

from collections.abc import Iterator

from overlay.checks.environment import Environment
from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, places

CODE = "fsdp2-reentrant"

_MODULE = "transformers.modeling_layers"
_WHY = "gradients of all but one of the forwards before a backward are dropped without an error"
_FIX = (
    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}), or mend transformers '
    "as `overlay doctor` says"
)


def in_environment(environment: Environment) -> Iterator[Finding]:
    there = environment.source(_MODULE) is not None and _MODULE not in environment.patched
    if there and environment.before("transformers", "5.23"):
        yield Finding(
            CODE,
            "info",
            f"transformers {environment.version('transformers')}",
            "the hooks of a layer run inside of its checkpoint",
            f"with fully_shard and use_reentrant=True, {_WHY}",
            "mend it as `overlay doctor` says, or use non-reentrant checkpointing, which is the default",
        )


def in_model(subject: Subject) -> Iterator[Finding]:
    layers = [
        layer
        for layer in subject.checkpointed
        if layer.module in subject.sharded and layer.trains and subject.hooks_inside(layer)
    ]
    reentrant = [layer.name for layer in layers if layer.reentrant]
    if reentrant:
        yield Finding(
            CODE,
            "error",
            places(reentrant),
            "fully_shard and use_reentrant=True, with the hooks of the layer inside of its checkpoint",
            _WHY,
            _FIX,
        )
    unknown = [layer.name for layer in layers if layer.reentrant is None]
    if unknown:
        yield Finding(
            CODE,
            "warning",
            places(unknown),
            "fully_shard and a checkpoint function of unknown kind, with the hooks of the layer inside of it",
            f"if it is reentrant, {_WHY}",
            _FIX,
        )
