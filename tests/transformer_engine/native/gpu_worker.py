"""Blocks of TransformerEngine's own normalisations under activation checkpointing, on a GPU.

`python gpu_worker.py cuda` answers on stdin and stdout (overlay/measure/turns.py); `cpu` makes it a dry run, with no
other normalisation than that of recompute_worker.py. What is answered is an outcome as there.
"""

import functools
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformer_engine
import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformer_engine.common import recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from overlay.measure.turns import serve
from tests.transformer_engine.native import recompute_worker
from tests.transformer_engine.native.recompute_worker import BATCH, NORMS, WIDTH, Block, Case, compared

DEVICE = sys.argv[1]
ON_GPU = DEVICE == "cuda"


class InFP8(te.ops.Sequential):
    """A pipeline in FP8, with a recipe that keeps nothing from one call to the next: MXFP8 where the device has it."""

    def forward(self, *given: Tensor) -> Any:
        scaling = recipe.MXFP8BlockScaling() if te.is_mxfp8_available() else recipe.Float8CurrentScaling()
        with te.autocast(enabled=True, recipe=scaling):
            return super().forward(*given)


NATIVE: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "RMSNorm": lambda dtype: te.ops.Sequential(te.ops.MakeExtraOutput(), te.ops.RMSNorm(WIDTH, dtype=dtype)),
    "LayerNorm": lambda dtype: te.ops.Sequential(te.ops.MakeExtraOutput(), te.ops.LayerNorm(WIDTH, dtype=dtype)),
    "RMSNorm, Linear": lambda dtype: te.ops.Sequential(
        te.ops.MakeExtraOutput(), te.ops.RMSNorm(WIDTH, dtype=dtype), te.ops.Linear(WIDTH, WIDTH, dtype=dtype)
    ),
    "RMSNorm, Linear, FP8": lambda dtype: InFP8(
        te.ops.MakeExtraOutput(), te.ops.RMSNorm(WIDTH, dtype=dtype), te.ops.Linear(WIDTH, WIDTH, dtype=dtype)
    ),
}


class Layer(nn.Module):
    """A block and its checkpoint as a module of one tensor, without dropout: random states cannot be saved while a
    graph is captured."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.block = Block("RMSNorm", torch.float32).eval()
            self.shift = nn.Parameter(torch.randn(WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.block(hidden, self.shift)
        options = {"use_reentrant": self.use_reentrant, "preserve_rng_state": False}
        return checkpoint(self.block, hidden, self.shift, **options)


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(BATCH, WIDTH, device=DEVICE) for _ in range(2)]


def trained(layer: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> recompute_worker.Trained:
    """Two steps."""
    found: list[Tensor | None] = []
    for batch in batches():
        for parameter in parameters:
            parameter.grad = None
        hidden = batch.clone().requires_grad_()
        output = layer(hidden)
        output.square().sum().backward()
        # Clones: a graph's results lie where its next replay puts its own
        found += [
            None if one is None else one.detach().clone()
            for one in (output, hidden.grad, *(p.grad for p in parameters))
        ]
    return recompute_worker.Trained(found, "", [])


def graphed(make: Callable[..., Any]) -> str:
    """A layer with a non-reentrant checkpoint, made a graphed callable, against one without either."""
    reference, layer = Layer(None), Layer(False)
    expected = trained(reference, list(reference.parameters()))
    called = make(layer, (batches()[0].clone().requires_grad_(),))
    return compared(trained(called, list(layer.parameters())), expected)


def captured_step() -> str:
    """Forward and backward of two layers with reentrant checkpoints, captured as one graph and replayed with another
    batch, as PyTorch's notes on CUDA have it."""
    found = []
    for use_reentrant in (None, True):
        layers = nn.Sequential(Layer(use_reentrant), Layer(use_reentrant))
        hidden = batches()[0].clone().requires_grad_()
        tensors = [hidden, *layers.parameters()]

        def step(layers: nn.Module = layers, hidden: Tensor = hidden) -> None:
            layers(hidden).square().sum().backward()

        replay = step
        if use_reentrant is not None:
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(beside)
            for tensor in tensors:
                tensor.grad = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            for tensor in tensors:
                tensor.grad.zero_()
            replay = graph.replay
        with torch.no_grad():
            hidden.copy_(batches()[1])
        replay()
        torch.cuda.synchronize()
        found.append(recompute_worker.Trained([tensor.grad for tensor in tensors], "", []))
    return compared(*found)


def captured_generation() -> str:
    """A pipeline captured under `no_grad` with a leaf as its static input, which then trains."""
    pipeline = NORMS["RMSNorm"](torch.float32)
    hidden = batches()[0].requires_grad_()
    with torch.no_grad():
        pipeline(hidden)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            normed, residual = pipeline(hidden)
        hidden.copy_(batches()[1])
    graph.replay()
    if not hidden.requires_grad:
        return "changed the static input"
    expected = pipeline(hidden)
    return "right" if all(map(torch.equal, (normed, residual), expected)) else "wrong"


def recomputed(norm: str, dtype: str, function: str, scope: str, steps: str) -> str:
    if norm.endswith("FP8") and not te.is_fp8_available():
        return "no FP8 here"
    return recompute_worker.outcome(Case(function, scope, steps, 3, norm, dtype=dtype, device=DEVICE))


def about() -> dict[str, str]:
    device = torch.cuda.get_device_name() if ON_GPU else "the CPU"
    return {"transformer_engine": transformer_engine.__version__, "torch": torch.__version__, "device": device}


def main() -> None:
    warnings.filterwarnings("ignore")
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    os.environ.update(GLOO_SOCKET_IFNAME=loopback[0], NCCL_SOCKET_IFNAME=loopback[0])
    if ON_GPU:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
        NORMS.update(NATIVE)
    else:
        recompute_worker.on_the_cpu()
    with recompute_worker.one_rank("nccl" if ON_GPU else "gloo"):
        serve(
            {
                "about": about,
                "recomputed": recomputed,
                "graphed by torch": functools.partial(graphed, torch.cuda.make_graphed_callables),
                "graphed by TransformerEngine": functools.partial(graphed, te.make_graphed_callables),
                "captured step": captured_step,
                "captured generation": captured_generation,
            }
        )


if __name__ == "__main__":
    main()
