"""`torch.compile` and `torch.export` of models with checkpointing.

`python compile_worker.py RESULT.json` writes, for each case, how many graphs were compiled after each of two steps, and
whether the gradients of both are those of the model that is not compiled, within rounding.
"""

import functools
import gc
import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.testing
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

IDS = torch.arange(32).reshape(2, 16)
FORWARD = LlamaDecoderLayer.forward

Observed = dict[str, Any]


def build(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
    )
    return LlamaForCausalLM(config).train()


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


@functools.cache
def reference(layers: int) -> list[torch.Tensor]:
    model = build(layers)
    step(model)
    return [parameter.grad for parameter in model.parameters()]


def close(model: nn.Module) -> bool:
    return all(
        parameter.grad is not None and torch.allclose(parameter.grad, expected, atol=1e-6)
        for parameter, expected in zip(model.parameters(), reference(model.config.num_hidden_layers), strict=True)
    )


def call_old(old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return old(*args, **kwargs)


def checkpoint_trained(call: Any, *args: Any, reentrant: bool) -> Any:
    """A checkpoint function that looks at the layer."""
    if not any(parameter.requires_grad for parameter in call.func.__self__.parameters()):
        return call(*args)
    return checkpoint(call, *args, use_reentrant=reentrant)


Backend = torch._dynamo.testing.CompileCounterWithBackend
How = Callable[[LlamaForCausalLM, Backend], nn.Module]


def whole_model(model: LlamaForCausalLM, backend: Backend) -> nn.Module:
    return torch.compile(model, fullgraph=True, backend=backend)


def each_layer(model: LlamaForCausalLM, backend: Backend) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    return model


def wrapped_layers(model: LlamaForCausalLM, backend: Backend) -> nn.Module:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, fullgraph=True, backend=backend)
    return model


def compiled(
    how: How, *, reentrant: bool, hooks: bool = False, replace: str = "", own: bool = False, layers: int = 2
) -> Observed:
    torch._dynamo.reset()
    model = build(layers)
    if own:
        function = functools.partial(checkpoint_trained, reentrant=reentrant)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.model.layers:
        if hooks:
            layer.register_forward_pre_hook(lambda module, args: None)
            layer.register_forward_hook(lambda module, args, output: None)
        if replace == "layer":
            layer.forward = functools.partial(call_old, layer.forward)
    if replace == "class":
        LlamaDecoderLayer.forward = lambda self, *args, **kwargs: FORWARD(self, *args, **kwargs)
    backend = Backend("aot_eager")
    frames, gradients = [], []
    try:
        called = how(model, backend)
        for _ in range(2):
            step(called)
            frames.append(backend.frame_count)
            gradients.append(close(model))
    finally:
        LlamaDecoderLayer.forward = FORWARD
    return {"frames": frames, "gradients": gradients}


def exported() -> Observed:
    model = build().eval()
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: None)
    program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    with torch.no_grad():
        one = program.module()(input_ids=IDS, use_cache=False).logits
        other = model(input_ids=IDS, use_cache=False).logits
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return {
        "operators": len(operators),
        "checkpoints": sum("checkpoint" in one for one in operators),
        "outputs": torch.allclose(one, other, atol=1e-6),
    }


def cases() -> dict[str, Callable[[], Observed]]:
    made: dict[str, Callable[[], Observed]] = {}
    for reentrant in (True, False):
        kind = "reentrant" if reentrant else "non-reentrant"
        for name, how in (("model", whole_model), ("layer.compile()", each_layer)):
            layers = 1 if how is whole_model else 2
            made[f"{name}, {kind}"] = functools.partial(compiled, how, reentrant=reentrant, layers=layers)
            layers = 1 if how is whole_model and reentrant else 2
            made[f"{name}, {kind}, hooks"] = functools.partial(
                compiled, how, reentrant=reentrant, hooks=True, layers=layers
            )
    more = functools.partial(compiled, reentrant=False)
    made["model, non-reentrant, hooks, layer's forward replaced"] = functools.partial(
        more, whole_model, hooks=True, replace="layer", layers=1
    )
    made["model, non-reentrant, hooks, class's forward replaced"] = functools.partial(
        more, whole_model, hooks=True, replace="class", layers=1
    )
    made["layer.compile(), own checkpoint function, hooks"] = functools.partial(more, each_layer, own=True, hooks=True)
    made["torch.compile(layer), non-reentrant, hooks"] = functools.partial(more, wrapped_layers, hooks=True)
    made["torch.export in eval mode"] = exported
    return made


def attempt(case: Callable[[], Observed]) -> Observed:
    """Run a case in a thread of its own, which nothing that an earlier case left behind in a thread can help."""
    observed: Observed = {}

    def run() -> None:
        try:
            observed.update(case())
        except Exception as error:
            traceback.print_exc()
            observed["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return observed


def main(result: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    gc.disable()
    result.write_text(json.dumps({name: attempt(case) for name, case in cases().items()}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
