"""With `use_reentrant=True`, no input of the first layers requires gradients, so that their parameters get none.

An **error**: a reentrant checkpoint whose inputs require no gradients returns outputs that require none, whatever its
parameters do. So it is with frozen embeddings, as of LoRA, where nothing makes their output require gradients
(`model.enable_input_require_grads()`; transformers calls it by itself for models with `input_ids` when checkpointing
is turned on, and not for a ViT). PyTorch warns that none of the inputs require gradients, and training goes on.

What comes before a layer is told by the order of the modules in the innermost transformers model that it is in: the
encoder of Whisper, each tower of a model of yours. Silent if anything there has a parameter that requires gradients, a
hook that may make the output do so, or a `forward` that does. A **warning** where the inputs of that model may come
from something that trains: from what comes before it in a larger transformers model, as a projector of images, or from
a part of your own around it, as a prompt that is tuned. PyTorch's reentrant `checkpoint_wrapper` counts as well.

Use non-reentrant checkpointing, or call `model.enable_input_require_grads()`.
"""

from collections.abc import Iterator
from functools import partial
from inspect import unwrap
from typing import TYPE_CHECKING

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, class_forward, places

if TYPE_CHECKING:
    from torch import nn

CODE = "inputs-without-gradients"

_HARMLESS = ("torch.", "deepspeed.", "transformers.utils.output_capturing", "transformers.utils.generic")
"""Whose hooks do not make an output require gradients: FSDP2's and ZeRO-3's are on every module."""


def in_model(subject: Subject) -> Iterator[Finding]:
    regions = {module for _, module in subject.reentrant_regions if module.training}
    if not regions:
        return
    owners = dict.fromkeys(subject.names, subject.model)
    for model in subject.pretrained:  # outermost first
        owners |= dict.fromkeys(model.modules(), model)
    certain: list[str] = []
    uncertain: list[str] = []
    for owner in dict.fromkeys(owners[region] for region in subject.names if region in regions):
        own = {region for region in regions if owners[region] is owner}
        names = _without_gradients(subject, owner, own)
        if names and not _embeddings_train(subject, owner):
            (uncertain if _may_get_inputs(subject, owner) else certain).extend(names)
    for names, what in (
        (certain, "nothing before it requires gradients"),
        (uncertain, "nothing before it in its own model requires gradients, though something outside of that does"),
    ):
        if names:
            yield Finding(
                CODE,
                "error" if names is certain else "warning",
                places(names),
                f"checkpointed with use_reentrant=True, and {what}",
                "the output of the layer requires none either, and its parameters get no gradient"
                if names is certain
                else "if its inputs require none, neither does its output, and its parameters get no gradient",
                "model.enable_input_require_grads(), or model.gradient_checkpointing_enable("
                'gradient_checkpointing_kwargs={"use_reentrant": False})',
            )


def _without_gradients(subject: Subject, owner: "nn.Module", regions: "set[nn.Module]") -> list[str]:
    """The regions of a model that train, up to the first of its modules that makes what follows require gradients."""
    within: set[nn.Module] = set()
    names: list[str] = []
    for module in owner.modules():
        if module in within:
            continue
        if module in regions:
            within.update(module.modules())
            if any(parameter.requires_grad for parameter in module.parameters()):
                names.append(subject.names[module])
        elif _gives_gradients(module):
            break  # and so it goes on
    return names


def _may_get_inputs(subject: Subject, owner: "nn.Module") -> bool:
    """Whether something outside of a model trains that may make its inputs: a part of no transformers model, or of the
    larger one that it is in, before it."""
    if owner is subject.model:
        return False
    whole = next((model for model in subject.pretrained if owner in set(model.modules())), owner)  # outermost first
    inside = {id(parameter) for parameter in whole.parameters()}
    if any(one.requires_grad and id(one) not in inside for one in subject.model.parameters()):
        return True
    for module in whole.modules():
        if module is owner:
            break
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            return True
    return False


def _gives_gradients(module: "nn.Module") -> bool:
    if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return True
    code = getattr(unwrap(class_forward(module)), "__code__", None)
    if code is not None and not {"requires_grad", "requires_grad_"}.isdisjoint(code.co_names):
        return True  # it sees to that itself, as Wav2Vec2's feature extractor
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not _module_of(hook).startswith(_HARMLESS) for hook in hooks)


def _module_of(hook: object) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def _embeddings_train(subject: Subject, model: "nn.Module") -> bool:
    """For a model whose modules are not in the order that they run in."""
    embeddings = subject.input_embeddings(model)
    return embeddings is not None and any(_gives_gradients(part) for part in embeddings.modules())
