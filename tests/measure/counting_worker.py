"""What is counted of modules whose bytes are known: `python counting_worker.py RESULT.json`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overlay.measure import memory
from overlay.measure.blocks import find, listening
from overlay.measure.parity import Trained, compare

N = 250_000
"""Numbers of 4 bytes: a million bytes."""


class Sine(nn.Module):
    """Saves its input for the backward, and has a parameter of 4 bytes that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class Pair(nn.Module):
    """Two sines one after the other, under a checkpoint if `on`."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(Sine(), Sine())
        self._gradient_checkpointing_func = checkpoint
        self.on = on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on:
            return self._gradient_checkpointing_func(self.inner, x, use_reentrant=False)
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair(on) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def copies() -> None:
    one = torch.empty(N)
    two = one.clone()
    del one
    three = two.clone()
    del two
    four = three.clone()
    five = four.clone()
    del three, four, five


def curve_of(step: Callable[[], object]) -> dict:
    found = memory.curve(step, "cpu").plain()
    return {name: found[name] for name in ("peak", "left", "gradients_at_peak")} | {
        "highest point": max(found["bytes"]),
        "points": len(found["bytes"]),
        "phases": list(found["phases"]),
    }


def kept() -> None:
    global keep
    keep = torch.empty(N)


def many() -> None:
    """More events than a curve has points, and one peak among them."""
    for i in range(2000):
        one = torch.empty(N if i == 777 else 1)
        del one


def trained() -> dict:
    """Two parameters, and their gradients at the peak, which is in the phase `late`."""
    weights = [nn.Parameter(torch.ones(N)) for _ in range(2)]
    remove = memory.watch_gradients(weights)

    def step() -> None:
        with memory.phase("early"):
            for weight in weights:
                (weight * weight.detach()).sum().backward()
        with memory.phase("late"):
            torch.empty(8 * N)
        for weight in weights:
            weight.grad = None

    try:
        return curve_of(step)
    finally:
        remove()


def saved(on: bool) -> dict:
    model = Model(on)
    found = memory.Saved(model)
    called = []

    def told(name: str | None, checkpointed: bool) -> None:
        found.block = name
        if checkpointed:
            called.append(name)

    blocks = find(model)
    with listening(model, blocks, told), found.hooks():
        result = model(torch.ones(N, requires_grad=True))
    del result
    return {
        "blocks": found.by_block.get(None, 0),
        "by block": {name: size for name, size in found.by_block.items() if name},
        "called": called,
    }


def step_of(on: bool) -> dict:
    """Forward alone: its outputs stay until the end."""
    model = Model(on)
    x = torch.ones(N, requires_grad=True)

    def forward() -> None:
        memory_kept.append(model(x))

    memory_kept: list = []
    return curve_of(forward)


def linear(**changed: Any) -> Trained:
    gradients = {
        "large": torch.ones(100),
        "small": torch.full((1,), 1e-9),
        "none": None,
        **changed.pop("gradients", {}),
    }
    return Trained(**{"losses": [1.0, 0.5], "gradients": gradients, "metrics": {"loss": 2.0}} | changed)


def parity() -> dict:
    base = linear()
    cases = {
        "the same": linear(),
        "one number": linear(gradients={"large": torch.ones(100).index_fill(0, torch.tensor([3]), 2.0)}),
        "lost": linear(gradients={"large": None}),
        "gained": linear(gradients={"none": torch.ones(1)}),
        "not a number": linear(gradients={"large": torch.full((100,), float("nan"))}),
        "rounding of a gradient of nothing": linear(gradients={"small": torch.full((1,), 2e-9)}),
        "loss": linear(losses=[1.0, 0.51]),
        "metric": linear(metrics={"loss": 2.02}),
    }
    return {name: compare(found, base).plain() for name, found in cases.items()}


def main(result: Path) -> None:
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.ones(N))
    tied = nn.Linear(10, 10)
    found = {
        "copies": curve_of(copies),
        "kept": curve_of(kept),
        "many": curve_of(many),
        "gradients": trained(),
        "forward": {str(on): step_of(on) for on in (False, True)},
        "saved": {str(on): saved(on) for on in (False, True)},
        "storages": memory.storage_bytes([weight, weight.detach(), weight[1:], None]),
        "parameters": memory.storage_bytes([*tied.parameters(), tied.weight]),
        "parity": parity(),
    }
    result.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
