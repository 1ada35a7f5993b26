"""What the workers here share: a tiny Llama, its calls counted, and the file with what was observed.

Calls are those of the layers' MLPs: two a layer and forward where the layer is checkpointed, one where it is not.
Gradients are true where they are, bit for bit, those of the same set-up without checkpointing.
"""

import functools
import json
import logging
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 2
VOCABULARY = 97
IDS = torch.arange(32).reshape(2, 16) + 3

Observed = dict[str, Any]
COUNTS: Counter[str] = Counter()


@dataclass(frozen=True)
class Setup:
    """How a model is checkpointed, and whether its layers have hooks; without a kind it is the reference."""

    reentrant: bool | None
    hooks: bool = False

    def __str__(self) -> str:
        return ("reentrant" if self.reentrant else "non-reentrant") + (", hooks" if self.hooks else "")

    def options(self) -> dict[str, bool]:
        return {"use_reentrant": bool(self.reentrant)}

    def function(self) -> Callable[..., Any]:
        return functools.partial(checkpoint, **self.options())

    def enable(self, model: Any) -> None:
        if self.reentrant is not None:
            model.gradient_checkpointing_enable(self.options())


REFERENCE = Setup(None)
SETUPS = [Setup(reentrant, hooks) for hooks in (False, True) for reentrant in (True, False)]


def build(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | options)).train()


def layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def count(model: nn.Module, setup: Setup) -> None:
    """Count the calls of the MLPs and of the layers' hooks from now on."""

    def counter(kind: str) -> Callable[..., None]:
        def run(*args: object) -> None:
            COUNTS[kind] += 1

        return run

    for layer in layers(model):
        layer.mlp.register_forward_pre_hook(counter("calls"))
        if setup.hooks:
            layer.register_forward_pre_hook(counter("pre"))
            layer.register_forward_hook(counter("post"))
            layer.register_full_backward_hook(counter("backward"))
    COUNTS.clear()


def counted(setup: Setup) -> Observed:
    """What was counted, and is then counted from zero."""
    observed: Observed = {"calls": COUNTS["calls"]}
    if setup.hooks:
        observed["hooks"] = [COUNTS[kind] for kind in ("pre", "post", "backward")]
    COUNTS.clear()
    return observed


def step(model: nn.Module, **inputs: Any) -> Tensor:
    """A forward and a backward; returns the loss."""
    torch.manual_seed(7)
    loss = model(**{"input_ids": IDS, "labels": IDS, "use_cache": False} | inputs).loss
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether tensors agree bit for bit, and are there at all."""
    return (
        one.keys() == other.keys()
        and any(value.any() for value in one.values())
        and all(torch.equal(value, other[name]) for name, value in one.items())
    )


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute set for the time being, as a library sets it once and for all."""
    before = getattr(owner, name)
    there = name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if there else delattr(owner, name)


def main(scenarios: dict[str, Callable[[Setup], Observed | None]]) -> None:
    """Run each scenario in each set-up that it is for, and write what was observed; an exception is observed, too."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Observed]] = {}
    for name, run in scenarios.items():
        rows[name] = {}
        for setup in SETUPS:
            COUNTS.clear()
            try:
                observed = run(setup)
            except Exception as error:
                sys.stderr.write(f"---- {name}, {setup}\n")
                traceback.print_exc()
                observed = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            if observed is not None:
                rows[name][str(setup)] = observed
    Path(sys.argv[1]).write_text(json.dumps({"transformers": transformers.__version__, "rows": rows}), "utf-8")
