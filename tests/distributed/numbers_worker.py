"""Gradients of distributed, mixed-precision and offloaded training with activation checkpointing, in both modes.

`python numbers_worker.py RESULT.json` trains every set-up with whatever transformers is on the path, with dropout on,
and writes what was measured (`parallel/set_ups.py`).
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).parent))
from parallel.set_ups import RELEASE, SHORT, SetUp, measure

from overlay.measure import group


def shard(model: PreTrainedModel, layers: dict[str, Any] | None = None, **root: Any) -> nn.Module:
    """FSDP2 with options for the root, and others for the layers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **(root if layers is None else layers))
    return fully_shard(model, mesh=mesh, **root)


def shard_once(model: PreTrainedModel) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


@contextlib.contextmanager
def without_synchronising(module: nn.Module) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    yield
    module.set_requires_gradient_sync(True)


def fsdp2(*schedules: str, distribute: Callable[..., nn.Module] = shard, **more: Any) -> SetUp:
    """A set-up with FSDP2; what `SetUp` does not know is for `fully_shard`."""
    known = {name: more.pop(name) for name in ("family", "options", "around") if name in more}
    return SetUp(
        functools.partial(distribute, **more), schedules or SHORT, without_synchronising=without_synchronising, **known
    )


bf16 = functools.partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)

# What stock loses of two forwards before a backward turns up in the next step of the model, so they come late
PIPELINE = ("1 forward", "1F1B", "2 forwards")
NOT_SYNCHRONISED = ("1 forward", "accumulation", "accumulation without sync", "2 forwards")
ALL = ("1 forward", "accumulation", "accumulation without sync", "1F1B", "2 forwards", "1 forward, next step")

SET_UPS: dict[int, dict[str, SetUp]] = {
    1: {
        "one process": SetUp(schedules=PIPELINE),
        "autocast": SetUp(around=autocast),
    },
    2: {
        "reshard_after_forward=True": fsdp2(*ALL, reshard_after_forward=True),
        "reshard_after_forward=False": fsdp2(*PIPELINE, reshard_after_forward=False),
        "outer fully_shard alone": fsdp2(distribute=shard_once),
        "frozen layers": fsdp2(family="Llama, frozen in part"),
        "layers that own parameters": fsdp2(family="Doge"),
        "CPU offload": fsdp2(*NOT_SYNCHRONISED, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "bf16": fsdp2(mp_policy=bf16()),
        "bf16, inputs not cast": fsdp2(mp_policy=bf16(cast_forward_inputs=False)),
        "bf16 in the layers alone": fsdp2(layers={"mp_policy": bf16(output_dtype=torch.float32)}),
        "autocast": fsdp2(around=autocast),
        "DDP": SetUp(DistributedDataParallel, NOT_SYNCHRONISED, without_synchronising=DistributedDataParallel.no_sync),
    },
    4: {
        "reshard_after_forward=True": fsdp2(reshard_after_forward=True),
        "reshard_after_forward=2": fsdp2(*PIPELINE, reshard_after_forward=2),
    },
}
if RELEASE >= (5, 22):
    for name, options in {"every_n_layers=2": {"every_n_layers": 2}, "offload": {"offload": True}}.items():
        SET_UPS[1][name] = SetUp(options=options)
        SET_UPS[2][name] = fsdp2(options=options)


@contextlib.contextmanager
def unpinned(pin_memory: bool, device_type: str) -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu():
        yield


def work(rank: int, world: int, put: Callable[[Any], None]) -> None:
    # `offload` pins memory, which takes an accelerator
    with mock.patch("transformers.modeling_utils.save_on_cpu", unpinned, create=RELEASE < (5, 22)):
        measure(SET_UPS[world], put)


def main(result: Path) -> None:
    transformers.logging.set_verbosity_error()
    rows = group.train(list(SET_UPS), work)
    result.write_text(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
