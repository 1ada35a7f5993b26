"""A loss can be put on outputs that are captured inside of a layer with reentrant checkpointing.

An **error** where the configuration asks for router logits (`output_router_logits=True`) and gives their loss a
coefficient: the auxiliary loss of a mixture of experts then has no gradient at all, on every release, patched or not.
The routers train on the other losses alone, and nothing says so.

A **warning** where the configuration asks for router logits without a coefficient, or for attentions
(`output_attentions=True`): a loss of your own on them has no gradient either.

A reentrant checkpoint runs its first forward without gradients, and what transformers captures inside of it comes from
there. What the layer itself returns is right, so `output_hidden_states=True` is no finding.

Use non-reentrant checkpointing.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from overlay.checks.finding import Finding, Severity
from overlay.checks.subject import Subject, places

if TYPE_CHECKING:
    from torch import nn

CODE = "captured-outputs"

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
_ASKED_AS = {"cross_attentions": "attentions", "mask_decoder_attentions": "attentions"}
"""Outputs that transformers captures when another one is asked for."""


def in_model(subject: Subject) -> Iterator[Finding]:
    inside = {
        module: subject.names[module]
        for _, region in subject.reentrant_regions
        if any(parameter.requires_grad for parameter in region.parameters())
        for module in region.modules()
        if module is not region
    }
    found: dict[str, tuple[Severity, dict[str, None]]] = {}
    for model in subject.pretrained if inside else ():
        config = getattr(model, "config", None)
        for key, specs in (getattr(model, "_can_record_outputs", None) or {}).items():
            option = f"output_{_ASKED_AS.get(key, key)}"
            if not getattr(config, option, False):
                continue
            names = {
                inside[module]: None for module in model.modules() if module in inside and _any(specs, module, inside)
            }
            if names:
                severity: Severity = "error" if key == "router_logits" and _has_loss(config) else "warning"
                _, others = found.get(option, (severity, {}))
                found[option] = severity, others | names
    for option, (severity, names) in found.items():
        loss = "the auxiliary loss" if severity == "error" else "a loss of your own"
        yield Finding(
            CODE,
            severity,
            places(names),
            f"config.{option} captures outputs inside of layers with use_reentrant=True",
            f"{loss} on them has no gradient, on every release",
            'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
        )


def _has_loss(config: Any) -> bool:
    return any(getattr(config, name, None) for name in _COEFFICIENTS)


def _any(specs: Any, module: "nn.Module", names: "dict[nn.Module, str]") -> bool:
    """Whether transformers captures from a module: its class, or the end of its name, and a part of its name."""
    for spec in specs if isinstance(specs, list) else [specs]:
        kind = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
        suffix = spec if isinstance(spec, str) else getattr(spec, "class_name", None)
        part = getattr(spec, "layer_name", None)
        matches = (kind is not None and isinstance(module, kind)) or (suffix and names[module].endswith(suffix))
        if matches and (part is None or f".{part.strip('.')}." in f"{names[module]}."):
            return True
    return False
