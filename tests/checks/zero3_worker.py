"""What the rule about PEFT under ZeRO-3 finds in real models, and whether a step fails. One gloo rank.

`python zero3_worker.py RESULT.json` writes it for each scenario: with the DeepSpeed that is installed, where that says
that it is 0.19.2, and where that and the patched `modeling_utils` of transformers are there.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where the overlay wheel is not installed
import overlay
from overlay.checks.environment import Environment

TOKENS = torch.arange(20).view(2, 10)


def model(reentrant: bool, lora: bool = True, **zero: Any) -> nn.Module:
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=99
    )
    llama = LlamaForCausalLM(config).train()
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    made = get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj"])) if lora else llama
    options = {"stage": 3, "stage3_param_persistence_threshold": 0} | zero
    return deepspeed.initialize(
        model=made,
        optimizer=torch.optim.SGD([one for one in made.parameters() if one.requires_grad], lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": options,
            "zero_allow_untested_optimizer": True,
        },
    )[0]


SCENARIOS: dict[str, Callable[[], nn.Module]] = {
    "LoRA, non-reentrant": lambda: model(False),
    "LoRA, reentrant": lambda: model(True),
    "LoRA, non-reentrant, parameters kept whole": lambda: model(False, stage3_param_persistence_threshold=10**6),
    "LoRA, non-reentrant, ZeRO-2": lambda: model(False, stage=2),
    "all parameters trained, non-reentrant": lambda: model(False, lora=False),
}


def found(model: nn.Module | None = None) -> list[list[str]]:
    return [[one.severity, one.where] for one in overlay.check(model) if one.code == "peft-zero3"]


def observe(model: nn.Module | None = None) -> dict[str, list[list[str]]]:
    row = {"as installed": found(model)}
    with mock.patch.object(deepspeed, "__version__", "0.19.2"):
        row["0.19.2"] = found(model)
        with mock.patch.object(Environment, "patched", frozenset({"transformers.modeling_utils"})):
            row["0.19.2, guarded"] = found(model)
    return row


def step(engine: Any) -> str:
    try:
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss)
    except Exception as error:
        return type(error).__name__
    return "trains"


def main(result: Path) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute or more
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = {"no model": observe()}
    for name, make in SCENARIOS.items():
        engine = make()
        rows[name] = {**observe(engine), "step": step(engine)}
        engine.destroy()
    dist.destroy_process_group()
    result.write_text(json.dumps({"deepspeed": deepspeed.__version__, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
