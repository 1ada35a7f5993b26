"""Gradients of training by what transformers integrates, with activation checkpointing, in both modes.

`python integrations_worker.py RESULT.json` trains its own FSDP2 and tensor parallelism, DeepSpeed's ZeRO-3 and layers
that bitsandbytes quantised, with dropout on, and writes what was measured (`parallel/set_ups.py`).
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).parent))
os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
import deepspeed
from parallel.set_ups import RELEASE, SetUp, measure

from overlay.measure import group

STEPS = ("1 forward", "1 forward, next step", "2 forwards")
"""DeepSpeed notes in the first step in which order the parameters are needed, and fetches them ahead in the next."""


def load(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    # Where torch is a CUDA build, transformers takes CUDA for granted
    with mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu")):
        return type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **options).train()


def fsdp2(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """From 5.17 on `from_pretrained` shards; before, no family had a plan."""
    config = DistributedConfig(fsdp_size=dist.get_world_size(), **options)
    if RELEASE >= (5, 17):
        return load(model, distributed_config=config)
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallel

    model.config.distributed_config = config
    model._fsdp_plan = {
        "model.embed_tokens": "free_full_weight",
        "model.layers.*": "free_full_weight",
        "model.norm": "keep_full_weight",
        "lm_head": "keep_full_weight",
    }
    return apply_fully_sharded_data_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp2_in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    return fsdp2(model, fsdp_mixed_precision=True)


def tensor_parallel(model: PreTrainedModel) -> PreTrainedModel:
    world = dist.get_world_size()
    if RELEASE >= (5, 17):
        return load(model, distributed_config=DistributedConfig(tp_size=world))
    return load(model, tp_plan="auto", tp_size=world)


def quantise(model: PreTrainedModel) -> PreTrainedModel:
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    return load(model, quantization_config=four, device_map="cpu")


def zero3(model: PreTrainedModel) -> nn.Module:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # a step leaves the weights as they are
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def zero3_backward(engine: Any, loss: Tensor) -> None:
    engine.backward(loss)


def zero3_gradient(parameter: Tensor) -> Tensor | None:
    return deepspeed.utils.safe_get_full_grad(parameter)


def zero3_finish(engine: Any) -> None:
    engine.step()


def by_zero3(family: str) -> SetUp:
    return SetUp(zero3, STEPS, family, backward=zero3_backward, gradient=zero3_gradient, finish=zero3_finish)


SET_UPS: dict[int, dict[str, SetUp]] = {
    1: {"quantised to 4 bits": SetUp(quantise)},
    2: {
        "transformers' FSDP2": SetUp(fsdp2),
        "transformers' FSDP2 in bf16": SetUp(fsdp2_in_bf16),
        "transformers' tensor parallelism": SetUp(tensor_parallel, family="Phi", same_data=True),
        "ZeRO-3": by_zero3("Llama"),
        "ZeRO-3, layers that own parameters": by_zero3("Doge"),
        "ZeRO-3, frozen layers": by_zero3("Llama, frozen in part"),
    },
}


def work(rank: int, world: int, put: Callable[[Any], None]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed asks for it
    measure(SET_UPS[world], put)


def main(result: Path) -> None:
    transformers.logging.set_verbosity_error()
    rows = group.train(list(SET_UPS), work)
    result.write_text(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
