"""Checkpoint functions, and what else trainers put in the place of parts of transformers, by their techniques.

`python functions_worker.py RESULT.json` writes what was observed. Written anew after reading LLaMA-Factory
(model/model_utils/checkpointing.py), axolotl (monkeypatch/gradient_checkpointing, checkpoint_activation_offload.py and
selective_checkpointing.py) and unsloth-zoo (compiler.py, gradient_checkpointing.py).
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

sys.path.append(str(Path(__file__).parent))
from shared_worker import (
    COUNTS,
    Observed,
    Setup,
    build,
    count,
    counted,
    gradients,
    main,
    replaced,
    same,
    step,
)


def compare(setup: Setup, model: LlamaForCausalLM, reference: LlamaForCausalLM) -> Observed:
    count(model, setup)
    step(model)
    return counted(setup) | {"gradients": same(gradients(model), gradients(reference))}


# ---- LLaMA-Factory: only layers that train are checkpointed, and what goes into them is made to require gradients


def trained_layers_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        layer: nn.Module = (call.func if isinstance(call, functools.partial) else call).__self__
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            return call(*args, **kwargs)
        next(arg for arg in args if torch.is_tensor(arg) and arg.is_floating_point()).requires_grad_()
        return function(call, *args, **kwargs)

    return run


def half_frozen() -> LlamaForCausalLM:
    model = build()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def llama_factory(setup: Setup) -> Observed:
    reference, model = half_frozen(), half_frozen()
    step(reference)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=trained_layers_alone(setup.function()))
    return compare(setup, model, reference)


# ---- axolotl, unsloth: a checkpoint function that keeps the layer's input elsewhere, in the place of PyTorch's


class Offloading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        with torch.no_grad():
            output = call(hidden, *args)
        ctx.save_for_backward(hidden.clone())
        ctx.call, ctx.args = call, args
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.call(hidden, *ctx.args)
        torch.autograd.backward(output, gradient)
        return (None, hidden.grad, *(None for _ in ctx.args))


def offloading(call: Any, *args: Any, use_reentrant: bool | None = None) -> Any:
    assert isinstance(call.func.__self__, GradientCheckpointingLayer)
    return Offloading.apply(call, *args)


def offloading_anything(call: Any, *args: Any, use_reentrant: bool | None = None) -> Any:
    return Offloading.apply(call, *args)


def axolotl_offloading(setup: Setup) -> Observed | None:
    if not setup.reentrant:  # the function is reentrant, whatever it is told
        return None
    reference, model = build(attention_dropout=0.0), build(attention_dropout=0.0)
    step(reference)
    with replaced(transformers.modeling_utils, "checkpoint", offloading):
        setup.enable(model)
    return compare(setup, model, reference)


# ---- axolotl: a `__call__` around that of all layers marks the inputs, and those of the saved tensors are offloaded


def axolotl_marks(setup: Setup) -> Observed | None:
    if setup.reentrant:  # it saves nothing where saved tensors have hooks
        return None
    reference, model = build(), build()
    step(reference)
    setup.enable(model)
    marked: list[Tensor] = []
    original = GradientCheckpointingLayer.__call__

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if layer.training and layer.gradient_checkpointing and torch.is_grad_enabled():
            marked.append(args[0])
            COUNTS["marked"] += 1
        return original(layer, *args, **kwargs)

    def pack(tensor: Tensor) -> Tensor:
        COUNTS["offloaded"] += any(tensor is one for one in marked)
        return tensor

    with replaced(GradientCheckpointingLayer, "__call__", call), saved_tensors_hooks(pack, lambda tensor: tensor):
        count(model, setup)
        step(model)
    return {
        "marked": COUNTS["marked"],
        "offloaded": COUNTS["offloaded"],
        **counted(setup),
        "gradients": same(gradients(model), gradients(reference)),
    }


# ---- axolotl: which operations are saved, a layer's hook says


def axolotl_selective(setup: Setup) -> Observed | None:
    if setup.reentrant:
        return None
    reference, model = build(attention_dropout=0.0), build(attention_dropout=0.0)
    step(reference)
    window = {"sliding": False}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if "scaled_dot_product" not in operation.name():
            return CheckpointPolicy.PREFER_RECOMPUTE
        COUNTS["recomputed" if window["sliding"] else "saved"] += 1
        return CheckpointPolicy.PREFER_RECOMPUTE if window["sliding"] else CheckpointPolicy.MUST_SAVE

    def begin(*args: object) -> None:
        window["sliding"] = True

    def end(*args: object) -> None:
        window["sliding"] = False

    sliding = model.model.layers[0]
    sliding.register_forward_pre_hook(begin)
    sliding.register_forward_hook(end, always_call=True)
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    )
    count(model, setup)
    step(model)
    return {
        "saved": COUNTS["saved"],
        "recomputed": COUNTS["recomputed"],
        **counted(setup),
        "gradients": same(gradients(model), gradients(reference)),
    }


# ---- unsloth: a `forward` of its own on the class of the layers


def fast_forward(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **kwargs: Any
) -> Tensor:
    COUNTS["fast"] += 1
    residual = hidden_states
    hidden_states, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def unsloth(when: str, function: Callable[..., Any] | None = None) -> Callable[[Setup], Observed | None]:
    def run(setup: Setup) -> Observed | None:
        if function and not setup.reentrant:
            return None
        options = {"attention_dropout": 0.0} if function else {}
        reference = build(**options)
        step(reference)
        with ExitStack() as stack:
            if function:
                stack.enter_context(replaced(transformers.modeling_utils, "checkpoint", function))
            if when == "before":
                stack.enter_context(replaced(LlamaDecoderLayer, "forward", fast_forward))
            model = build(**options)
            setup.enable(model)
            if when == "after":
                stack.enter_context(replaced(LlamaDecoderLayer, "forward", fast_forward))
            count(model, setup)
            step(model)
        return {
            "fast": COUNTS["fast"],
            **counted(setup),
            "gradients": same(gradients(model), gradients(reference)),
        }

    return run


SCENARIOS = {
    "LLaMA-Factory, a layer frozen": llama_factory,
    "axolotl, offloading checkpoint function": axolotl_offloading,
    "axolotl, __call__ of the layers replaced": axolotl_marks,
    "axolotl, a layer's hook says what is saved": axolotl_selective,
    "unsloth, class's forward replaced before the model is built": unsloth("before"),
    "unsloth, class's forward replaced after checkpointing is enabled": unsloth("after"),
    "unsloth, class's forward and checkpoint function replaced": unsloth("before", offloading_anything),
}

if __name__ == "__main__":
    main(SCENARIOS)
