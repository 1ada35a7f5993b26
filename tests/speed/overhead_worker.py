"""How long a call of a layer and a training step take, with whatever transformers is on the path.

`python overhead_worker.py` answers on stdin and stdout (see turns.py):

- `layer STATE HOOKS CALLS`: nanoseconds of a call of an empty layer, with a checkpoint function that only calls
  through, so that what is measured is the class of the layer.
- `step MODE STEPS`: milliseconds of a training step.
- `sharded step MODE STEPS`: milliseconds of a training step on two gloo ranks (FSDP2), of the rank that takes longer.

All in CPU time, so that other processes count for little. A rank's waiting for the other one is left out with it: how
often it has to is what counts_worker.py counts.
"""

import contextlib
import functools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import repeat
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from overlay.measure.turns import no_collection, serve

RANKS = 2
BURSTS = 3
MODES = {"none": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}
IDS = torch.arange(2 * 32).reshape(2, 32)


CHECKPOINTED: list[int] = []


def call_through(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def call_through_and_note(function: Callable[..., Any], *args: Any) -> Any:
    CHECKPOINTED.append(1)
    return function(*args)


def checkpointed(layer: nn.Module) -> int:
    """How many times one call of the layer calls its checkpoint function."""
    layer._gradient_checkpointing_func = call_through_and_note
    CHECKPOINTED.clear()
    layer(torch.zeros(1, requires_grad=True))
    layer._gradient_checkpointing_func = call_through
    return len(CHECKPOINTED)


@functools.cache
def empty_layer(state: str, hooks: bool) -> nn.Module:
    """A layer of a class of its own: what was done to one class must not show in another's figure.

    Args:
        state: `module` (no layer but an `nn.Module`), `off`, `on`, or `off again`, after a call with checkpointing on.
    """

    class Empty(nn.Module if state == "module" else GradientCheckpointingLayer):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    layer = Empty().train()
    if hooks:
        layer.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        layer.register_forward_hook(lambda module, args, output: None)
    if state in ("on", "off again"):
        layer.gradient_checkpointing = True
        assert checkpointed(layer) == 1
    if state != "on":
        if state == "off again":
            layer.gradient_checkpointing = False
        assert checkpointed(layer) == 0
    return layer


def call(state: str, hooks: bool, calls: int) -> float:
    """Nanoseconds; the quickest of a few bursts."""
    layer, hidden = empty_layer(state, hooks), torch.zeros(1, requires_grad=True)

    def burst(count: int) -> int:
        begin = time.thread_time_ns()
        for _ in repeat(None, count):
            layer(hidden)
        return time.thread_time_ns() - begin

    with no_collection():
        burst(calls // 10)
        return min(burst(calls) for _ in range(BURSTS)) / calls


def build(mode: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=97,
    )
    model = LlamaForCausalLM(config).train()
    if (options := MODES[mode]) is not None:
        model.gradient_checkpointing_enable(options)
    return model


def shard(model: LlamaForCausalLM) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for one in model.model.layers:
        fully_shard(one, mesh=mesh)
    fully_shard(model, mesh=mesh)


@functools.cache
def training(mode: str, sharded: bool) -> Callable[[], None]:
    model = build(mode)
    if sharded:
        shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def timed(mode: str, steps: int, sharded: bool) -> float:
    """Milliseconds a step; the quickest of a few bursts."""
    step = training(mode, sharded)

    def burst() -> float:
        begin = time.process_time()
        for _ in range(steps):
            step()
        return time.process_time() - begin

    with no_collection():
        return min(burst() for _ in range(BURSTS)) / steps * 1e3


def rank_process(rank: int, meeting: str, channel: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=10)
    )
    while True:
        mode, steps = channel.recv()
        channel.send(timed(mode, steps, True))


@contextlib.contextmanager
def ranks() -> Iterator[Callable[[str, int], float]]:
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ.update(GLOO_SOCKET_IFNAME=loopback[0], TORCH_CPP_LOG_LEVEL="ERROR")
    # A fork shares what is imported here; nothing has started a thread so far. Elsewhere a fork is not safe.
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    pipes = [context.Pipe() for _ in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, theirs) in enumerate(pipes):
            arguments = (rank, f"{folder}/meeting", theirs)
            context.Process(target=rank_process, args=arguments, daemon=True).start()

        def ask(mode: str, steps: int) -> float:
            for ours, _ in pipes:
                ours.send((mode, steps))
            return float(max([ours.recv() for ours, _ in pipes]))

        yield ask


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with ranks() as sharded:
        serve(
            {
                "build": lambda: transformers.__version__,
                "layer": call,
                "step": lambda mode, steps: timed(mode, steps, False),
                "sharded step": sharded,
            }
        )


if __name__ == "__main__":
    main()
