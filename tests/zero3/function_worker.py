"""The checkpoint function of a model that is trained in one process, without ZeRO-3.

`python function_worker.py RESULT.json` writes what it is, whether training imports DeepSpeed, how the model compiles,
and which versions of DeepSpeed are taken to have the fault.
"""

import functools
import importlib.metadata
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils

VERSIONS = ("0.14.0", "0.19.2", "0.19.2+a1b2c3d", "0.19.3.dev0", "0.19.3", "0.19.3+a1b2c3d", "0.20.0rc1", "unknown")
IDS = torch.arange(32).reshape(2, 16)


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).train()


def train(model: LlamaForCausalLM, called: Any) -> list[Tensor]:
    model.zero_grad()
    called(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def main(result: Path) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model = build()
    expected = train(model, model)
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    model.gradient_checkpointing_enable()
    layer = model.model.layers[0]
    function = layer._gradient_checkpointing_func
    found = {
        "type": type(function).__name__,
        "is a partial of PyTorch's": isinstance(function, functools.partial) and function.func is checkpoint,
        "keywords": function.keywords,
        "right": all(map(torch.equal, train(model, model), expected)),
        "hooks": sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()) - hooks,
        "imports DeepSpeed": "deepspeed" in sys.modules,
    }
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = [train(model, compiled) for _ in range(2)]
    close = [all(map(torch.allclose, each, expected)) for each in gradients]
    found["compiled"] = {"right": all(close), "graphs": counters["stats"]["unique_graphs"]}

    others = []
    for options in ({"use_reentrant": True}, {"use_reentrant": None}, {"preserve_rng_state": False}):
        model.gradient_checkpointing_enable(options)
        others.append(type(layer._gradient_checkpointing_func).__name__)
    with mock.patch.object(modeling_utils, "checkpoint", mock.Mock()):  # as unsloth does
        model.gradient_checkpointing_enable()
        others.append(type(layer._gradient_checkpointing_func).__name__)
    found["others"] = others
    versions = {}
    for version in VERSIONS:
        with mock.patch.object(importlib.metadata, "version", return_value=version):
            model.gradient_checkpointing_enable()
            versions[version] = type(layer._gradient_checkpointing_func).__name__
    found["versions"] = versions
    result.write_text(json.dumps({"transformers": transformers.__version__} | found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
