"""Checkpointed models on a GPU, with whatever transformers is on the path.

`python gpu_worker.py cuda` answers on stdin and stdout (see turns.py); `cpu` instead of `cuda` is a dry run with
smaller models, gloo for nccl, and without what CUDA alone has. Layers have hooks throughout: FSDP2's, or two that do
nothing. Errors of gradients are relative, against the same model with neither checkpoints, shards, compiler nor CUDA
graphs.
"""

import functools
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo.testing
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from overlay.measure.turns import serve

DEVICE = sys.argv[1]
ON_GPU = DEVICE == "cuda"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 97}
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "vocab_size": 4096}
"""About 60 million parameters in 8 layers: with 4096 tokens a step, 2 GB without checkpointing."""


def options(mode: str) -> dict[str, bool] | None:
    # Without the state of the random numbers, which cannot be read while CUDA captures a graph
    return None if mode == "none" else {"use_reentrant": mode == "reentrant", "preserve_rng_state": False}


def build(mode: str, size: dict[str, int], layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=size["num_attention_heads"], **size)
    model = LlamaForCausalLM(config).to(DEVICE, dtype).train()
    if mode != "none":
        model.gradient_checkpointing_enable(options(mode))
    return model


def listen(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: None)
        layer.register_forward_hook(lambda module, args, output: None)


def shard(model: LlamaForCausalLM) -> None:
    mesh = init_device_mesh(DEVICE, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tokens(i: int, batch: int, length: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(DEVICE)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = (parameter.grad for parameter in model.parameters())
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


def relative_error(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    difference = norm = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None
        difference += float((theirs - (0 if ours is None else ours)).double().norm() ** 2)
        norm += float(theirs.double().norm() ** 2)
    return math.sqrt(difference / norm)


Compared = dict[str, float]


def compare(found: list[Tensor | None], expected: list[Tensor | None], graphs: int = 1) -> Compared:
    return {"error": relative_error(found, expected), "graphs": graphs}


def sharded_gradients(mode: str, forwards: int) -> Compared:
    """In float64, so that an error above 1e-6 is more than rounding."""
    found = []
    for kind in ("none", mode):
        model = build(kind, SMALL, 3, torch.float64)
        if kind is mode:
            shard(model)
        torch.stack([loss(model, tokens(i, 2, 16, 97)) for i in range(forwards)]).sum().backward()
        found.append(gradients(model))
    return compare(found[1], found[0])


@functools.cache
def large(mode: str, sharded: bool) -> Callable[[], None]:
    """A training step in bfloat16; the model is kept, because setting it up takes longer than the step."""
    size, layers, batch, length = (LARGE, 8, 4, 1024) if ON_GPU else (SMALL, 2, 2, 32)
    model = build(mode, size, layers, torch.bfloat16)
    if sharded:
        shard(model)
    else:
        listen(model.model.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = tokens(0, batch, length, size["vocab_size"])

    def step() -> None:
        optimizer.zero_grad()
        loss(model, ids).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


def synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def step_time(mode: str, sharded: bool, steps: int) -> float:
    """Milliseconds, by the clock."""
    step = large(mode, sharded)
    step()
    synchronise()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise()
    return (time.perf_counter() - begin) / steps * 1e3


def peak_memory(mode: str, sharded: bool) -> float:
    """MiB that a step has allocated at most, beyond what is there between steps."""
    step = large(mode, sharded)
    step()
    synchronise()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronise()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def compiled(mode: str) -> Compared:
    """Of two steps of a model that is compiled whole by inductor: the worse error, and how many graphs there are."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    reference, model = (build(kind, SMALL, 2, torch.float32) for kind in ("none", mode))
    listen(model.model.layers)
    called = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    errors = []
    for i in range(2):
        for kind in (reference, called):
            kind.zero_grad()
            loss(kind, tokens(i, 2, 16, 97)).backward()
        errors.append(relative_error(gradients(model), gradients(reference)))
    return {"error": max(errors), "graphs": counter.frame_count}


class Block(GradientCheckpointingLayer):
    """A layer that takes one tensor, which is all that a graphed callable may be given."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(**SMALL)
        self.norm, self.mlp = LlamaRMSNorm(config.hidden_size), LlamaMLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden))


def block(mode: str) -> Block:
    torch.manual_seed(0)
    made = Block().to(DEVICE).train()
    if mode != "none":
        made.gradient_checkpointing = True
        made._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, **options(mode))
    return made


def graphed_layer(mode: str) -> Compared:
    """A checkpointed layer through `make_graphed_callables`, which refuses hooks: they come afterwards."""
    found = []
    hidden = [torch.randn(8, 64, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2)]
    for kind in ("none", mode):
        layer = block(kind)
        if kind is mode:
            layer = torch.cuda.make_graphed_callables(layer, (hidden[0].clone().requires_grad_(),))
            layer.zero_grad()
        listen([layer])
        results: list[Tensor | None] = []
        for one in hidden:
            layer.zero_grad()
            given = one.clone().requires_grad_()
            layer(given).square().sum().backward()
            # A graph's gradients lie where the next replay puts its own
            results += [one if one is None else one.clone() for one in (*gradients(layer), given.grad)]
        found.append(results)
    return compare(found[1], found[0])


def captured_step(mode: str) -> Compared:
    """Forward and backward of a stack of Llama layers, captured as one CUDA graph and replayed with another batch."""
    found = []
    batches = [torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2)]
    for kind in ("none", mode):
        model = build(kind, SMALL, 3, torch.float32).model
        listen(model.layers)
        hidden = batches[0].clone().requires_grad_()
        positions = model.rotary_emb(hidden, position_ids=torch.arange(16, device=DEVICE)[None])

        def step(model: nn.Module = model, hidden: Tensor = hidden, positions: Any = positions) -> None:
            output = hidden
            for layer in model.layers:
                output = layer(output, position_embeddings=positions)
            output.square().mean().backward()

        trained = [hidden, *model.layers.parameters()]

        if kind is mode:
            run = capture(step, trained)
            for tensor in trained:
                tensor.grad.zero_()
        else:
            run = step
        with torch.no_grad():
            hidden.copy_(batches[1])
        run()
        synchronise()
        found.append([tensor.grad for tensor in trained])
    return compare(found[1], found[0])


def capture(step: Callable[[], None], trained: Iterable[Tensor]) -> Callable[[], None]:
    """As PyTorch's notes on CUDA capture a whole step: after a few on a stream beside, and with no gradients there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    for tensor in trained:
        tensor.grad = None
    graph = torch.cuda.CUDAGraph()
    # Only of this thread: NCCL has one that looks at its events
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def about() -> dict[str, str]:
    name = torch.cuda.get_device_name() if ON_GPU else "the CPU"
    return {"transformers": transformers.__version__, "torch": torch.__version__, "device": name}


def main() -> None:
    torch.set_num_threads(1)
    if ON_GPU:
        torch.cuda.set_device(0)
    transformers.logging.set_verbosity_error()
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ.update(GLOO_SOCKET_IFNAME=loopback[0], NCCL_SOCKET_IFNAME=loopback[0])
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if ON_GPU else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        serve(
            {
                "about": about,
                "sharded gradients": sharded_gradients,
                "peak memory": peak_memory,
                "step": step_time,
                "compiled": compiled,
                "graphed layer": graphed_layer,
                "captured step": captured_step,
            }
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
