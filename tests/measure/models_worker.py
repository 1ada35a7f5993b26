"""Models of one's own for `overlay bench FILE.py:FUNCTION`, each with something wrong."""

import functools
import inspect
import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class ChangesInput(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states.mul_(1.5)  # the line that is to be named
        return super().forward(hidden_states, **kwargs)


class Counts(LlamaDecoderLayer):
    """Nothing raises: its buffer moves twice a step. The code is one that reading the source does not see through."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        add = "add_"
        getattr(self.scale, add)(1)  # the line that is to be named
        return super().forward(hidden_states * self.scale, **kwargs)


class ChangesResult(LlamaDecoderLayer):
    """Raises without a checkpoint as well: sigmoid's backward needs its result."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        gate = torch.sigmoid(hidden_states).mul_(2)  # the line that is to be named
        return super().forward(hidden_states * gate, **kwargs)


class Large(LlamaDecoderLayer):
    """Without a checkpoint it asks for more memory than there is."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if not self.gradient_checkpointing and self.training:
            torch.empty(1 << 60)
        return super().forward(hidden_states, **kwargs)


class Killed(LlamaDecoderLayer):
    """Its process ends without a word in reentrant mode."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        options = getattr(getattr(self, "_gradient_checkpointing_func", None), "keywords", {})
        if self.gradient_checkpointing and options.get("use_reentrant"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(hidden_states, **kwargs)


class Breaks(LlamaDecoderLayer):
    """In reentrant mode the GPU of this process is of no use any more, as after an assertion in a kernel."""

    broken = False

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        options = getattr(getattr(self, "_gradient_checkpointing_func", None), "keywords", {})
        if Breaks.broken or (self.gradient_checkpointing and options.get("use_reentrant")):
            Breaks.broken = True
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().forward(hidden_states, **kwargs)


class Twice(LlamaDecoderLayer):
    """A checkpoint of its own, inside of that of transformers."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        inner = functools.partial(super().forward, **kwargs)
        return checkpoint(inner, hidden_states, use_reentrant=True)


def _made(settings: Any, kind: type) -> Any:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.model.layers = nn.ModuleList(kind(config, i) for i in range(2))

    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (settings.batch, settings.seq), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return model, batch


def changes_input(settings: Any) -> Any:
    return _made(settings, ChangesInput)


def changes_result(settings: Any) -> Any:
    return _made(settings, ChangesResult)


def counts(settings: Any) -> Any:
    return _made(settings, Counts)


def large(settings: Any) -> Any:
    return _made(settings, Large)


def killed(settings: Any) -> Any:
    return _made(settings, Killed)


def breaks(settings: Any) -> Any:
    return _made(settings, Breaks)


def twice(settings: Any) -> Any:
    return _made(settings, Twice)


def nothing(_settings: Any) -> None:
    """No model."""


def leaves(_settings: Any) -> Any:
    raise SystemExit(3)


def replaced(settings: Any) -> Any:
    """As accelerate does: a forward on the instance, which does not call the one that upstream wraps."""
    model, batch = _made(settings, LlamaDecoderLayer)
    for layer in model.model.layers:
        original = inspect.unwrap(type(layer).forward)
        layer.forward = functools.partial(original, layer)
    return model, batch
