"""Greedy generation in training mode, with activation checkpointing on, against eval mode: no gradients, no checkpoint.

`python generation_worker.py RESULT.json` writes, for each family of models: the index of the first token that differs
from eval mode (none: null), without hooks on the layers and with them; whether a checkpoint was entered, and who
warned of a cache; and how many tokens are told apart, so that agreement says something. Dropout is zero.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

TOKENS = 8
VOCABULARY = 99
IMAGE_TOKEN = 98
IMAGE, PATCH = 16, 4

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "num_key_value_heads": 2}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
EXPERTS = TEXT | {"num_experts_per_tok": 2}
SMALL_STATE = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", TEXT),
    "gemma2": ("Gemma2ForCausalLM", TEXT | {"head_dim": 8, "sliding_window": 4}),
    "bart": ("BartForConditionalGeneration", BART),
    "t5": ("T5ForConditionalGeneration", T5),
    "mixtral": ("MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    "bamba": ("BambaForCausalLM", TEXT | SMALL_STATE | {"attn_layer_indices": [1]}),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SIZES
            | {"image_size": IMAGE, "patch_size": PATCH, "num_channels": 3, "model_type": "clip_vision_model"},
            "image_token_id": IMAGE_TOKEN,
            "image_seq_length": (IMAGE // PATCH) ** 2,
            "vision_feature_layer": -1,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        EXPERTS
        | {
            "num_local_experts": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 4,
            "head_dim": 8,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        TEXT | {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    ),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}


WARNINGS = {"a layer": "Caching is incompatible", "the model": "`use_cache=True` is incompatible"}


def build(name: str) -> nn.Module:
    cls, settings = FAMILIES[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, cls)
    model = model_class(model_class.config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # else the tokens are all the same
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


def inputs(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (2, 20))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "llava":
        ids[:, 2:18] = IMAGE_TOKEN
        given["pixel_values"] = torch.randn(2, 3, IMAGE, IMAGE)
    return given


def generate(model: nn.Module, given: dict[str, torch.Tensor]) -> list[list[int]]:
    ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    return ids[:, -TOKENS:].tolist()


def first_difference(tokens: list[list[int]], expected: list[list[int]]) -> int | None:
    columns = zip(zip(*tokens, strict=True), zip(*expected, strict=True), strict=True)
    return next((index for index, (one, other) in enumerate(columns) if one != other), None)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    handler = Messages()
    transformers.utils.logging.warning_once.cache_clear()
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_default_handler()
    transformers.logging.add_handler(handler)
    try:
        yield handler.texts
    finally:
        transformers.logging.remove_handler(handler)
        transformers.logging.enable_default_handler()
        transformers.logging.set_verbosity_error()


def observe(name: str) -> dict[str, Any]:
    model, given = build(name), inputs(name)
    expected = generate(model.eval(), given)
    in_training = generate(model.train(), given)
    checkpoints: list[Any] = []

    def function(call: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoints.append(call)
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    observed: dict[str, Any] = {
        "told apart": len({token for row in expected for token in row}),
        "without checkpointing": first_difference(in_training, expected),
    }
    with messages() as texts:
        for hooks in ("without hooks", "hooks"):
            if hooks == "hooks":
                for layer in layers:
                    layer.register_forward_pre_hook(lambda module, args: None)
                    layer.register_forward_hook(lambda module, args, output: None)
            observed[hooks] = first_difference(generate(model, given), expected)
    return {
        **observed,
        "checkpoints": len(checkpoints) > 0,
        "warns": sorted({who for text in texts for who, words in WARNINGS.items() if text.startswith(words)}),
    }


def main(result: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    result.write_text(json.dumps({name: observe(name) for name in FAMILIES}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
