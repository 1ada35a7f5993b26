"""Layers whose call is not that of `nn.Module`, because somebody has put another one there.

`python foreign_call_worker.py RESULT.json` writes what was observed with methods of `nn.Module` replaced, before
`transformers.modeling_layers` is imported and after that. Each runs in a process of its own.
"""

import functools
import itertools
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import transformers.modeling_utils  # all but the module that is to come later
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

Observed = dict[str, Any]

REPLACED: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "__call__": ("__call__",),
    "_call_impl": ("_call_impl",),
    "__call__ and _wrapped_call_impl": ("__call__", "_wrapped_call_impl"),
}
ORDERS = ("before", "after")
MODES = {"reentrant": True, "non-reentrant": False}
SHARDED = {"mlp": (True, False), "layer": (False, True), "mlp and layer": (True, True)}
REFUSED = "is sharded by itself (`fully_shard`)"

ENTERED: list[nn.Module] = []
"""The modules that the replacement was called for."""


def replace(names: tuple[str, ...]) -> None:
    """Put one function in the place of methods of `nn.Module`; it calls the first of them."""
    old = getattr(nn.Module, names[0]) if names else None

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ENTERED.append(self)
        return old(self, *args, **kwargs)

    for name in names:
        setattr(nn.Module, name, call)


def layer_class() -> type[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.mlp = nn.Linear(4, 4)
            self.computed = 0

        def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
            self.computed += 1
            return hidden + self.mlp(self.linear(hidden).tanh()) * scale

    return Layer


def batch(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@contextmanager
def warnings() -> Iterator[list[str]]:
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    transformers.utils.logging.warning_once.cache_clear()
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_default_handler()
    transformers.logging.add_handler(handler)
    try:
        yield texts
    finally:
        transformers.logging.remove_handler(handler)


def called(cls: type[nn.Module], reentrant: bool, hooks: bool) -> Observed:
    """What two layers of a class did in their second forward and backward, and the warnings of both."""
    torch.manual_seed(0)
    layers = [cls(), cls()]
    in_hooks: list[str] = []
    checkpoints: list[bool] = []

    def function(call: Any, *args: Any) -> Any:
        checkpoints.append(call.func.__self__ in layers)
        return checkpoint(call, *args, use_reentrant=reentrant)

    for layer in layers:
        layer._gradient_checkpointing_func = function
        if hooks:
            layer.register_forward_pre_hook(lambda *_: in_hooks.append("pre"))
            layer.register_forward_hook(lambda *_: in_hooks.append("post"))

    def gradients(enabled: bool) -> list[Tensor]:
        given = batch()
        hidden = given
        for layer in layers:
            layer.zero_grad()
            layer.gradient_checkpointing = enabled
            hidden = layer(hidden, scale=0.5)
        hidden.square().sum().backward()
        return [given.grad, *(parameter.grad for layer in layers for parameter in layer.parameters())]

    expected = gradients(False)
    with warnings() as texts:
        gradients(True)
        for layer in layers:
            layer.computed = 0
        for counted in (in_hooks, checkpoints, ENTERED):
            counted.clear()
        found = gradients(True)
    return {
        "right": all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)),
        "checkpoints": checkpoints,
        "computed": [layer.computed for layer in layers],
        "replacement": [sum(one is layer for one in ENTERED) for layer in layers],
        "hooks": [in_hooks.count("pre"), in_hooks.count("post")],
        "warnings": texts,
    }


def sharded(cls: type[nn.Module], reentrant: bool, mlp: bool, layers: bool) -> Observed:
    """The relative error of the gradients of two forwards with one backward, or "refused"."""
    torch.manual_seed(0)
    reference = cls().double()
    torch.manual_seed(0)
    layer = cls().double()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=reentrant)
    mesh = init_device_mesh("cpu", (1,))
    if mlp:
        fully_shard(layer.mlp, mesh=mesh)
    if layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(nn.Sequential(layer), mesh=mesh)
    parameters = list(model.parameters())  # where FSDP2 loses gradients, a model has others later
    with warnings() as texts:
        for one in (reference, model):
            try:
                sum(one(batch(i).double()).square().sum() for i in range(2)).backward()
            except RuntimeError as error:
                if REFUSED not in str(error):
                    raise
                return {"error": "refused", "warnings": texts}
    difference = norm = 0.0
    for ours, theirs in zip(parameters, reference.parameters(), strict=True):
        gradient = torch.zeros_like(theirs.grad) if ours.grad is None else ours.grad.full_tensor()
        difference += float((gradient - theirs.grad).norm() ** 2)
        norm += float(theirs.grad.norm() ** 2)
    return {"error": math.sqrt(difference / norm), "warnings": texts}


def observe(names: tuple[str, ...], order: str) -> Observed:
    assert "transformers.modeling_layers" not in sys.modules
    if order == "before":
        replace(names)
    cls = layer_class()
    if order == "after":
        replace(names)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    observed = {
        f"{mode}{', hooks' if hooks else ''}": called(cls, reentrant, hooks)
        for (mode, reentrant), hooks in itertools.product(MODES.items(), (False, True))
    }
    observed |= {
        f"{mode}, {what} sharded": sharded(cls, reentrant, *which)
        for (mode, reentrant), (what, which) in itertools.product(MODES.items(), SHARDED.items())
    }
    torch.distributed.destroy_process_group()
    return observed


def put(queue: Any, names: tuple[str, ...], order: str) -> None:
    torch.set_num_threads(1)
    queue.put(observe(names, order))


def in_process(task: Callable[..., None], *arguments: Any) -> Any:
    # Nothing has started a thread so far. Elsewhere a fork is not safe.
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=task, args=(queue, *arguments))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{arguments} ended with {process.exitcode}")
    return queue.get()


def main(result: Path) -> None:
    observed = {
        f"{name}, {order}": in_process(put, names, order) for name, names in REPLACED.items() for order in ORDERS
    }
    result.write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
