"""`use_cache` is on in a configuration of a model that is trained with checkpointing.

How bad that is depends on what checkpoints the layers; measured on a Llama with transformers 5.14.1 and 5.24.0:

- A checkpoint wrapper (PyTorch's `checkpoint_wrapper`, accelerate's `activation_checkpointing`) around layers or
  attentions does not turn the cache off, and the recompute adds the same keys and values once more. With reentrant
  checkpointing that is an **error**: the recompute attends to twice the tokens, and gradients are wrong without an
  error. With non-reentrant checkpointing a **warning**: gradients are right, and the keys and values of all layers are
  kept twice, which is memory that checkpointing was to save.
- The model's own checkpointing (`gradient_checkpointing_enable`) turns it off at each forward and logs so once. An
  **info**: nothing is lost, and gradients are the same. So it was for the 17 families with a cache that were tried.

`Trainer` sets `use_cache=False` by itself; the generation configuration plays no part in training.

`model.config.use_cache = False` while training; of models within a model (`model.config.get_text_config()`), too.
"""

from collections.abc import Iterator
from inspect import unwrap
from typing import TYPE_CHECKING, Any

from overlay.checks.finding import Finding
from overlay.checks.subject import Subject, class_forward, places

if TYPE_CHECKING:
    from torch import nn

CODE = "use-cache"

_FIX = "model.config.use_cache = False"


def in_model(subject: Subject) -> Iterator[Finding]:
    own = {layer.module for layer in subject.checkpointed}
    reentrant = {name for name, _ in subject.reentrant_regions}
    wrapped: dict[bool, list[str]] = {}
    switched: dict[str, None] = {}
    for model, config in _cached(subject):
        inside = set(model.modules())
        for module, name in subject.wrapped.items():
            if module in inside and _attends(module) and module not in own and not _turns_off(model):
                wrapped.setdefault(name in reentrant, []).append(name)
        if own & inside:
            switched[type(config).__name__] = None
    for is_reentrant, names in wrapped.items():
        yield Finding(
            CODE,
            "error" if is_reentrant else "warning",
            places(dict.fromkeys(names)),
            "use_cache=True, and a checkpoint wrapper around what writes the cache",
            "the recompute adds the keys and values once more and attends to both: gradients are wrong without an error"
            if is_reentrant
            else "the keys and values of all layers are kept, twice: memory that checkpointing was to save",
            _FIX,
        )
    if switched and not wrapped:
        yield Finding(
            CODE,
            "info",
            places(switched),
            "use_cache=True with checkpointing",
            "the cache is turned off at each training forward, with a warning in the log",
            _FIX,
        )


def _cached(subject: Subject) -> "Iterator[tuple[nn.Module, Any]]":
    """The models of transformers whose configuration has `use_cache` on, those without a decoder left out.

    A model hands its own setting on to the models within it, T5 to its decoder for instance.
    """
    told: set[nn.Module] = set()
    for model in subject.pretrained:
        config = getattr(model, "config", None)
        use_cache = getattr(config, "use_cache", None)
        if model in told or use_cache is None:
            continue
        told |= set(model.modules())
        if use_cache is True and _decodes(model, config):
            yield model, config


def _decodes(model: "nn.Module", config: Any) -> bool:
    """BERT and its like have `use_cache` on by default, and no cache unless `is_decoder` is on, too."""
    if getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return True
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can())


def _turns_off(model: "nn.Module") -> bool:
    """Whether the model's own checkpointing is on, which turns the cache off before any layer runs."""
    return any(vars(module).get("gradient_checkpointing") is True for module in model.modules())


def _attends(module: "nn.Module") -> bool:
    """Whether a module, or one inside of it, takes a cache."""
    names = {"past_key_values", "past_key_value", "layer_past", "cache", "cache_params"}
    for one in module.modules():
        code = getattr(unwrap(class_forward(one)), "__code__", None)
        if code is not None and names.intersection(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
            return True
    return False
