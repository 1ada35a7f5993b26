"""Modes of small models, in this process: `python modes_worker.py RESULT.json`."""

import json
import random
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from overlay.measure import in_place, model
from overlay.measure.settings import SEGMENTATION, Settings
from overlay.measure.step import ModeError, Trial

SIZES = {"layers": 4, "hidden": 32, "heads": 2, "vocab": 64, "seq": 16, "batch": 2, "threads": 1}
CASES = {
    "gpt2": {},
    "mixtral": {"experts": 2},
    SEGMENTATION: {"image": 64},
    "t5": {},
    "vit": {"image": 32},
    "llama": {"autocast": "bfloat16", "accumulate": 2},
}
MODES = ("off", "reentrant", "non-reentrant", "group:2", "group:3", "every:2", "off")

OWN = ("all of it", "each block", "every other block", "parts")


def measured(name: str, options: dict[str, Any]) -> dict[str, Any]:
    trial = trial_of(name, options)
    found = {}
    for i, mode in enumerate(MODES):
        parity = trial.parity(mode, base=i == 0)
        saved = trial.saved(mode)
        found["off again" if i == len(MODES) - 1 else mode] = {
            "exact": parity["exact"],
            "gradient": parity["gradient"],
            "saved": list(saved["blocks"].values()),
            "checkpointed": list(saved["checkpointed"]),
            "hooks": sum(len(module._forward_hooks) for module in trial.model.modules()),
        }
    return {"blocks": list(trial.blocks), "tokens": trial.task.tokens, "modes": found}


def trial_of(name: str, options: dict[str, Any]) -> Trial:
    taken = {size: value for size, value in SIZES.items() if "image" not in options or size not in ("seq", "vocab")}
    settings = Settings(model=name, **taken | options)
    return Trial(model.build(settings), settings)


def errors() -> dict[str, str]:
    """What cannot be done, and what is said of it."""
    found = {}
    try:
        trial_of("llama", {}).enable("offload")
    except ModeError as error:
        found["offload"] = str(error)
    try:
        model.build(Settings(model="mixtrol"))
    except model.SizeError as error:
        found["model"] = str(error)
    return found


class Halves(nn.Module):
    """Two blocks, with a sum between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) + 1)


class Drops(nn.Module):
    """Two blocks, of which one can be left out, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == self.left_out else layer(x)
        return x


class Shift(nn.Module):
    """Saves nothing, so that a recompute that stops early leaves it out at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Block(nn.Module):
    """A block of one's own, which calls PyTorch's checkpoint by itself, around parts of it or all."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.around = around
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.shift, self.scale = Shift(), nn.Parameter(torch.ones(8))
        self.kind: dict[str, bool] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def compute(x: torch.Tensor) -> torch.Tensor:
            inner = self.part(self.down, nn.functional.gelu(self.part(self.up, self.norm(x))))
            return self.shift(x + self.scale * inner)

        return compute(x) if self.kind is None or self.around != "all of it" else checkpoint(compute, x, **self.kind)

    def part(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x) if self.kind is None or self.around != "parts" else checkpoint(module, x, **self.kind)


class Own(nn.Module):
    """A model of one's own; its blocks are handed to PyTorch's checkpoint in a closure."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(around) for _ in range(4))
        self.around = around

    def gradient_checkpointing_enable(self, kind: "dict[str, bool] | None") -> None:
        for layer in self.layers:
            layer.kind = kind

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing_enable(None)

    def forward(self, ids: torch.Tensor) -> types.SimpleNamespace:
        x = self.words(ids)
        for i, layer in enumerate(self.layers):
            outside = self.around == "each block" or (self.around == "every other block" and i % 2 == 0)
            if layer.kind is not None and outside:
                x = checkpoint(lambda x, layer=layer: layer(x), x, **layer.kind)
            else:
                x = layer(x)
        return types.SimpleNamespace(loss=(x @ self.words.weight.T).logsumexp(-1).mean())


def own(around: str) -> dict[str, Any]:
    """What is found of checkpoints that transformers has no part in."""
    settings = Settings("own", batch=1, seq=4, threads=1)
    task = model.Task(Own(around), lambda _: {"ids": torch.arange(4)[None]}, 4, False, {})
    trial = Trial(task, settings)
    found = {}
    for mode in ("off", "reentrant", "non-reentrant"):
        saved = trial.saved(mode)
        found[mode] = {name: saved[name] for name in ("checkpointed", "parts", "outside")}
        found[mode]["blocks"] = list(saved["blocks"].values())
    return found


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.relu(self.inner(x))  # its own tensor: no fault
        self.relu(x)
        return own


def grouped() -> str:
    from overlay.measure import segments

    halves = Halves()
    try:
        segments.group([list(halves.layers)], 2, lambda: halves(torch.ones(1, 4)))
    except segments.NoSegmentError as error:
        return str(error)
    return "grouped"


def dropped() -> list[str]:
    """What is said where a block is left out after the blocks have been grouped: each, and none."""
    from overlay.measure import segments

    drops, found = Drops(), []
    segments.group([list(drops.layers)], 2, lambda: drops(torch.ones(1, 4)))
    for drops.left_out in (0, 1, -1):
        try:
            drops(torch.ones(1, 4))
            drops(torch.ones(1, 4))
            found.append("")
        except segments.NoSegmentError as error:
            found.append(str(error))
    return found


def first_forward() -> bool:
    """Whether a model that exchanges its modules in its first forward, and draws numbers for that, trains the same."""
    trial = trial_of("big_bird", {"layers": 2})
    trial.parity("off", base=True)
    return bool(trial.parity("non-reentrant", base=False)["exact"])


def repeatable() -> list[bool]:
    """As on CUDA: whether operators are deterministic for parity, where that does not fit, and after."""
    trial = trial_of("llama", {"layers": 2})
    trial._repeatable = True
    train, found = trial._train, []

    def trained(mode: str) -> Any:
        found.append(torch.are_deterministic_algorithms_enabled())
        if len(found) == 2 and found[-1]:
            raise torch.OutOfMemoryError("for the deterministic ones")
        return train(mode)

    vars(trial)["_train"] = trained
    for i, mode in enumerate(("off", "reentrant", "non-reentrant")):
        trial.parity(mode, base=i == 0)
    return [*found, torch.are_deterministic_algorithms_enabled()]


def micro_batches() -> float:
    """The relative difference of the gradients of twice the same micro-batch from those of one."""
    one, two = trial_of("llama", {"layers": 1}), trial_of("llama", {"layers": 1, "accumulate": 2})
    two.batches = one.batches * 2
    found = []
    for trial in (one, two):
        trial.gradients()
        found.append(torch.cat([part.grad.flatten() for part in trial.model.parameters() if part.grad is not None]))
    return float((found[0] - found[1]).norm() / found[0].norm())


def drawn() -> bool:
    """Whether a model that draws numbers by Python and by numpy trains the same twice."""
    trial = trial_of("llama", {"layers": 1})
    trial.model.model.embed_tokens.register_forward_hook(
        lambda _module, _args, output: output * random.random() * numpy.random.rand()  # noqa: S311
    )
    trial.parity("off", base=True)
    return bool(trial.parity("off", base=False)["exact"])


def left() -> int:
    """How many gradients a step that failed leaves to the next mode."""
    trial = trial_of("llama", {"layers": 1})
    trial.gradients()
    trial.enable("reentrant")
    return sum(part.grad is not None for part in trial.model.parameters())


def held() -> dict[str, int]:
    """Bytes that autograd holds of two linear modules on one input, which is saved by both, and their weights."""
    from overlay.measure import memory

    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    both = nn.ModuleList([one, other])
    x = torch.ones(8, 4)
    saved = memory.Saved(both)
    with saved.hooks():
        kept = one(x) * other(x)
    return {"counted": sum(saved.by_block.values()), "expected": x.nbytes + 2 * kept.nbytes}


def one_storage() -> list[int]:
    """Bytes of gradients at the peak, and those expected, of two parameters whose gradients lie in one storage, as
    FSDP2 has them."""
    from overlay.measure import memory

    both = torch.zeros(8)
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for i, parameter in enumerate(parameters):
        part = both[4 * i : 4 * i + 4]
        parameter.register_post_accumulate_grad_hook(lambda one, part=part: setattr(one, "grad", part))
    remove = memory.watch_gradients(parameters)

    def step() -> None:
        torch.cat(parameters).sum().backward()
        torch.empty(1 << 20)

    found = memory.curve(step, "cpu")
    remove()
    return [found.gradients_at_peak, both.nbytes]


def of_parts() -> dict[str, Any]:
    """A model of text and images, which is given text."""
    trial = trial_of("gemma3", {"layers": 2})
    saved = trial.saved("non-reentrant")
    trial.enable("group:2")
    return {
        "parameters": sum(one.numel() for one in trial.model.parameters()),
        "blocks": len(trial.blocks),
        "called": saved["called"],
        "saved": len(saved["blocks"]),
        "checkpointed": len(saved["checkpointed"]),
    }


def few_experts() -> list[bool]:
    """Whether mixtures run with fewer experts than a token goes to by default, and than there are groups of them."""
    found = []
    for name in ("qwen3_moe", "deepseek_v3"):
        trial = trial_of(name, {"layers": 4, "experts": 4})
        found.append(trial.loss(0).isfinite().item())
    return found


def refused() -> dict[str, str]:
    """Sizes that would have no effect."""
    found = {}
    for name, sizes in (
        ("llama", {"experts": 2}),
        ("vit", {"vocab": 64}),
        ("vit", {"seq": 8}),
        ("llama", {"image": 8}),
    ):
        try:
            model.build(Settings(name, **sizes))
        except model.SizeError as error:
            found[f"{name} {next(iter(sizes))}"] = str(error)
    return found


class WritesElsewhere(nn.Module):
    """Where an operator is told by name what it writes into, and where that is in a list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.mul(x, 2, out=x)
        torch._foreach_add_([torch.ones(1, 4), x], 1.0)
        torch._foreach_add_([torch.ones(1, 4)], [x])  # read, not written
        return x * 1


def written(block: nn.Module) -> list[list[str]]:
    with torch.no_grad():
        found = in_place.changes(block, {"block": block}, lambda: block(torch.ones(1, 4)))
    return [[one.module, one.kind, one.statement] for one in found]


def main(result: Path) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {
        "models": {name: measured(name, options) for name, options in CASES.items()},
        "errors": errors(),
        "grouped": grouped(),
        "dropped": dropped(),
        "first forward": first_forward(),
        "of parts": of_parts(),
        "micro-batches": micro_batches(),
        "drawn": drawn(),
        "left": left(),
        "held": held(),
        "one storage": one_storage(),
        "repeatable": repeatable(),
        "refused": refused(),
        "few experts": few_experts(),
        "written": written(Writes()),
        "written elsewhere": written(WritesElsewhere()),
        "own": {around: own(around) for around in OWN},
    }
    result.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
