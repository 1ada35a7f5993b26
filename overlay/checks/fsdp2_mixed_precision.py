"""FSDP2 casts a layer's inputs in the forward, and not in the recompute.

An **error** on torch before 2.13 with stock transformers 5.0 to 5.22: a checkpointed layer is sharded with
`MixedPrecisionPolicy(param_dtype=...)`, and what the embeddings hand to the layers is of another dtype, as with a
policy on the layers only. The recompute then computes with inputs of two dtypes and raises, `Expected query, key, and
value to have the same dtype`: with non-reentrant checkpointing always, with reentrant at two forwards before a
backward. Measured on torch 2.11; the code is the same from 2.6 to 2.12.

Shard the root with the same policy, upgrade torch, or mend transformers (`overlay doctor` says how): with the hooks
outside of the checkpoint the cast is part of no recompute.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, places

if TYPE_CHECKING:
    from torch import nn

CODE = "fsdp2-mixed-precision"


def in_model(subject: Subject) -> Iterator[Finding]:
    if not subject.environment.before("torch", "2.13"):
        return
    found: dict[str, None] = {}
    dtypes: set[str] = set()
    for model in subject.pretrained:
        incoming = _dtype_of_embeddings(subject, model)
        within = set(model.modules())
        for layer in subject.checkpointed if incoming is not None else ():
            policy = _policy(layer.module)
            dtype = policy.param_dtype if getattr(policy, "cast_forward_inputs", False) else None
            if layer.module in within and dtype not in (None, incoming) and subject.hooks_inside(layer):
                found[layer.name] = None
                dtypes.add(f"{dtype}, and {incoming} comes in")
    if found:
        yield Finding(
            CODE,
            "error",
            places(found),
            f"MixedPrecisionPolicy with param_dtype {'; '.join(sorted(dtypes))}, on torch "
            f"{subject.environment.version('torch')} and with the hooks of the layer inside of its checkpoint",
            "the recompute skips the cast of the inputs, and raises for two dtypes in one operation",
            "fully_shard(model, mp_policy=...) with the policy of the layers, or torch 2.13, or mend transformers as "
            "`overlay doctor` says",
        )


def _policy(module: "nn.Module") -> Any:
    try:
        return module._get_fsdp_state()._mp_policy
    except AttributeError:
        return None


def _dtype_of_embeddings(subject: Subject, model: "nn.Module") -> Any:
    """What a model's input embeddings compute in: the policy of the innermost sharded module around them, or theirs."""
    embeddings = subject.input_embeddings(model)
    parameters = [] if embeddings is None else [one for one in embeddings.parameters() if one.is_floating_point()]
    if not parameters:
        return None
    around = [module for module in subject.sharded if any(part is embeddings for part in module.modules())]
    policy = _policy(around[-1]) if around else None  # outermost first
    return getattr(policy, "param_dtype", None) or parameters[0].dtype
