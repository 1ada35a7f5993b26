"""With `use_reentrant=True`, no input of the first layers requires gradients, so that their parameters get none.

An **error**: a reentrant checkpoint whose inputs require no gradients returns outputs that require none, whatever its
parameters do. So it is with frozen embeddings, as of LoRA, where nothing makes their output require gradients
(`model.enable_input_require_grads()`; transformers calls it by itself for models with `input_ids` when checkpointing
is turned on, and not for a ViT). PyTorch warns that none of the inputs require gradients, and training goes on.

What comes before a layer is told by the order of the modules. Silent if anything there has a parameter that requires
gradients, a hook that may make the output do so, or a `forward` that does.

Use non-reentrant checkpointing, or call `model.enable_input_require_grads()`.
"""

from collections.abc import Iterator
from functools import partial
from inspect import unwrap
from typing import TYPE_CHECKING

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, places

if TYPE_CHECKING:
    from torch import nn

CODE = "inputs-without-gradients"

_HARMLESS = ("torch.", "deepspeed.", "transformers.utils.output_capturing", "transformers.utils.generic")
"""Whose hooks do not make an output require gradients: FSDP2's and ZeRO-3's are on every module."""


def in_model(subject: Subject) -> Iterator[Finding]:
    layers = {layer.module: layer for layer in subject.checkpointed if layer.reentrant and layer.module.training}
    if not layers:
        return
    within: set[nn.Module] = set()
    names: list[str] = []
    for module in subject.names:
        if module in within:
            continue
        if module not in layers:
            if _gives_gradients(module):
                break  # and so it goes on
            continue
        within.update(module.modules())
        if layers[module].trains:
            names.append(layers[module].name)
    if names and not _embeddings_train(subject, set(layers)):
        yield Finding(
            CODE,
            "error",
            places(names),
            "checkpointed with use_reentrant=True, and nothing before it requires gradients",
            "the output of the layer requires none either, and its parameters get no gradient",
            "model.enable_input_require_grads(), or model.gradient_checkpointing_enable(gradient_checkpointing_kwargs="
            '{"use_reentrant": False})',
        )


def _gives_gradients(module: "nn.Module") -> bool:
    if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return True
    code = getattr(unwrap(type(module).forward), "__code__", None)
    if code is not None and not {"requires_grad", "requires_grad_"}.isdisjoint(code.co_names):
        return True  # it sees to that itself, as Wav2Vec2's feature extractor
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not _module_of(hook).startswith(_HARMLESS) for hook in hooks)


def _module_of(hook: object) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


def _embeddings_train(subject: Subject, layers: "set[nn.Module]") -> bool:
    """For a model whose modules are not in the order that they run in."""
    for model in subject.pretrained:
        if layers.isdisjoint(model.modules()):
            continue
        embeddings = subject.input_embeddings(model)
        if embeddings is not None and any(_gives_gradients(part) for part in embeddings.modules()):
            return True
    return False
