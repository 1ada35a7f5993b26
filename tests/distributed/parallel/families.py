"""Small models with dropout, and what they are trained on: the same in every process, with every build."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

VOCABULARY = 96

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1))


def frozen_llama() -> LlamaForCausalLM:
    """A Llama that trains its head, its last layer and a part of the middle one."""
    model = llama()
    for module in (model.model.embed_tokens, model.model.layers[0], model.model.layers[1].self_attn):
        module.requires_grad_(False)
    return model


def doge() -> DogeForCausalLM:
    """Its layers own parameters themselves, not in a submodule."""
    config = DogeConfig(**SIZES, hidden_dropout=0.1)
    config._attn_implementation = "eager"  # SDPA takes another kernel without gradients, as in a reentrant forward
    return DogeForCausalLM(config)


def phi() -> PhiForCausalLM:
    """Its dropout lies outside of what tensor parallelism splits, so that an undivided model drops the same."""
    return PhiForCausalLM(PhiConfig(**SIZES, resid_pdrop=0.1, embd_pdrop=0.1))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama": llama,
    "Llama, frozen in part": frozen_llama,
    "Doge": doge,
    "Phi": phi,
}


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def loss(module: torch.nn.Module, rank: int, i: int) -> Tensor:
    """The loss of the micro-batch `i` of a rank, with the dropout that belongs to it."""
    seed = 100 * rank + i
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    return module(input_ids=ids, labels=ids, use_cache=False).loss
