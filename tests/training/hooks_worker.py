"""What a layer's hooks see in one forward and one backward, without checkpointing and with each kind of it.

`python hooks_worker.py RESULT.json` writes, for each, the calls in order (kind of hook, layer, whether gradients were
enabled, and what it was given), and how often the insides of the layers were computed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = {"without": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=97,
        )
    ).train()


def listen(layer: nn.Module, index: int, calls: list[Any]) -> None:
    def note(kind: str, *more: object) -> None:
        calls.append([kind, index, torch.is_grad_enabled(), *more])

    def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        note("forward pre", args[0].requires_grad, sorted(kwargs))

    def after(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        note("forward", args[0].requires_grad, sorted(kwargs), hidden.requires_grad)

    def in_backward(module: nn.Module, given: tuple[Tensor | None, ...], outgoing: tuple[Tensor | None, ...]) -> None:
        note("backward", [gradient is not None for gradient in given])

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)
    layer.register_forward_pre_hook(lambda module, args: note("plain forward pre"))
    layer.register_forward_hook(lambda module, args, output: note("plain forward"))
    layer.register_full_backward_pre_hook(lambda module, outgoing: note("backward pre"))
    layer.register_full_backward_hook(in_backward)


def hooks(options: dict[str, bool] | None) -> dict[str, Any]:
    model = build()
    calls: list[Any] = []
    inside: list[int] = []
    if options is not None:
        model.gradient_checkpointing_enable(options)
    for index, layer in enumerate(model.model.layers):
        listen(layer, index, calls)
        layer.mlp.register_forward_pre_hook(lambda module, args: inside.append(1))
    ids = torch.arange(32).reshape(2, 16)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    calls.append(["between"])
    loss.backward()
    return {"calls": calls, "computed": len(inside)}


def main(result: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    result.write_text(json.dumps({kind: hooks(options) for kind, options in KINDS.items()}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
