"""What activation checkpointing keeps in memory, and what a sharded step (FSDP2) communicates.

`python counts_worker.py RESULT.json` writes, for each kind of checkpointing, the bytes that are alive in a training
step of a small Llama, and the collectives of a step on two gloo ranks. Nothing here is a timing: the same build gives
the same numbers.
"""

import json
import os
import socket
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 4
RANKS = 2
MODES = {"none": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}
COLLECTIVES = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}
IDS = torch.arange(2 * 32).reshape(2, 32)


def build(mode: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
    )
    model = LlamaForCausalLM(config).train()
    if (options := MODES[mode]) is not None:
        model.gradient_checkpointing_enable(options)
    return model


def loss(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


class Alive:
    """Bytes of the storages that are alive, each counted once however many tensors share it, and the most so far."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self.storages: dict[int, tuple[int, int]] = {}

    def add(self, address: int, size: int) -> None:
        holders, _ = self.storages.get(address, (0, 0))
        self.storages[address] = (holders + 1, size)
        if not holders:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def drop(self, address: int) -> None:
        holders, size = self.storages.pop(address)
        if holders > 1:
            self.storages[address] = (holders - 1, size)
        else:
            self.bytes -= size


class Packed:
    """A tensor that autograd has saved, counted for as long as autograd holds it."""

    def __init__(self, tensor: Tensor, alive: Alive) -> None:
        self.tensor = tensor
        storage = tensor.untyped_storage()
        alive.add(storage.data_ptr(), storage.nbytes())
        weakref.finalize(self, alive.drop, storage.data_ptr())


def is_weight(tensor: Tensor, model: nn.Module) -> bool:
    """Whether a tensor shares the storage of a parameter as it is now: FSDP2 exchanges them for each layer's call."""
    now = (parameter for parameter in model.parameters() if not isinstance(parameter, DTensor))
    return tensor.untyped_storage().data_ptr() in {parameter.untyped_storage().data_ptr() for parameter in now}


def saved(model: nn.Module) -> dict[str, int]:
    """What autograd saves, parameters apart: after the forward, and the most in the step.

    A non-reentrant checkpoint has hooks of its own inside, so that its recompute shows in `allocated` alone.
    """
    alive = Alive()

    def pack(tensor: Tensor) -> Tensor | Packed:
        return tensor if is_weight(tensor, model) else Packed(tensor, alive)

    with saved_tensors_hooks(pack, lambda held: held.tensor if isinstance(held, Packed) else held):
        result = loss(model)
        after_forward = alive.bytes
        result.backward()
    assert not alive.bytes, "autograd holds tensors after the backward"
    return {"saved after the forward": after_forward, "most saved": alive.peak}


class Storages(TorchDispatchMode):
    """Counts what operators make, from the first tensor of a storage to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = Alive()
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                self.known.add(key)
                self.alive.add(key, tensor.untyped_storage().nbytes())
                weakref.finalize(tensor.untyped_storage(), self.freed, key)
        return result

    def freed(self, key: int) -> None:
        self.known.discard(key)
        self.alive.drop(key)


def allocated(model: nn.Module) -> dict[str, int]:
    """The most that a step has allocated at once: saved activations, what the recompute makes, gradients."""
    with Storages() as storages:
        loss(model).backward()
    return {"most allocated": storages.alive.peak}


def listen(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: None)
        layer.register_forward_hook(lambda module, args, output: None)


def activations() -> dict[str, dict[str, int]]:
    counted = {}
    for mode in MODES:
        for hooks in (False, True):
            found: dict[str, int] = {}
            for count in (saved, allocated):
                model = build(mode)
                if hooks:
                    listen(model)
                found |= count(model)
            counted[f"{mode}{', hooks' * hooks}"] = found
    return counted


def sharded(mode: str) -> LlamaForCausalLM:
    model = build(mode)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def collectives(mode: str, forwards: int) -> dict[str, int]:
    """Of one step with so many forwards before its backward."""
    model = sharded(mode)
    step: Callable[[], Any] = lambda: sum(loss(model) for _ in range(forwards)).backward()  # noqa: E731
    step()  # the first initialises
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    counted = Counter(COLLECTIVES.get(event.name, "other") for event in profiled.events() if "c10d::" in event.name)
    return {name: counted[name] for name in ("all-gather", "reduce-scatter", "other")}


def run_rank(rank: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=10)
    )
    counted = {
        "collectives": {
            f"{mode}, {forwards} forward{'s' * (forwards > 1)}": collectives(mode, forwards)
            for mode in MODES
            for forwards in (1, 2)
        },
        "activations": {f"{mode}, fully_shard": saved(sharded(mode)) for mode in MODES},
    }
    results.put(counted)
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks() -> dict[str, dict[str, dict[str, int]]]:
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ.update(GLOO_SOCKET_IFNAME=loopback[0], TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore")
    # A fork shares what is imported here; nothing has started a thread so far. Elsewhere a fork is not safe.
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=run_rank, args=(rank, f"{folder}/meeting", results)) for rank in range(RANKS)]
        for process in started:
            process.start()
        one, other = (results.get() for _ in started)
        for process in started:
            process.join()
    assert one == other, "the ranks do not agree"
    return one


def main(result: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    counted = on_two_ranks()
    counted["activations"] |= activations()
    result.write_text(json.dumps(counted), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
