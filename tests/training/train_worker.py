"""Train a tiny Llama with activation checkpointing, stop half way, and go on in another process.

    python train_worker.py RESULT.json FOLDER start TEXT   30 steps without checkpointing; 15 with each kind, then save
    python train_worker.py RESULT.json FOLDER resume       the other 15 of each kind, from what was saved
    python train_worker.py RESULT.json FOLDER load         only load what was saved, and look at it

The result has the losses and some logits as floats (JSON keeps every bit of them), and the keys of the state dict.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, HALF = 30, 15
BATCH, LENGTH = 4, 48
VOCABULARY = 320
KINDS = {"reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}


def make_tokenizer(folder: Path, text: str) -> None:
    """A small sentencepiece model of the text."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_prefix=str(folder / "pieces"),
        vocab_size=VOCABULARY,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "text.txt").write_text(text, "utf-8")


def batches(folder: Path) -> Tensor:
    """The batch of every step: [step, sequence, position]."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    ids = torch.tensor(processor.encode((folder / "text.txt").read_text("utf-8")))
    starts = torch.randint(0, len(ids) - LENGTH, (STEPS, BATCH), generator=torch.Generator().manual_seed(2))
    return ids[starts[..., None] + torch.arange(LENGTH)]


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,  # so that a recompute has to see the same random numbers
    )
    return LlamaForCausalLM(config)


def optimiser_of(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, data: Tensor) -> dict[str, Any]:
    """The loss of every step, and how often a part of a layer ran: twice a step where the layer is checkpointed."""
    losses, calls = [], []
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.train()
    for ids in data:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    handle.remove()
    return {"losses": losses, "calls": len(calls)}


def save(model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, folder: Path) -> None:
    model.save_pretrained(folder)
    state = {
        f"{i}.{name}": tensor
        for i, values in optimiser.state_dict()["state"].items()
        for name, tensor in values.items()
    }
    save_file(state | {"random": torch.get_rng_state()}, folder / "optimiser.safetensors")


def load(folder: Path) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimiser = optimiser_of(model)
    tensors = load_file(folder / "optimiser.safetensors")
    torch.set_rng_state(tensors.pop("random"))
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        i, _, name = key.partition(".")
        state.setdefault(int(i), {})[name] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return model, optimiser


def seen(model: LlamaForCausalLM, ids: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[:, -1]
    return {"keys": sorted(model.state_dict()), "logits": logits.flatten().tolist()}


def start(folder: Path, text: Path) -> dict[str, Any]:
    make_tokenizer(folder, text.read_text("utf-8"))
    data = batches(folder)
    model = build()
    result: dict[str, Any] = {"without": train(model, optimiser_of(model), data) | seen(model, data[0])}
    for kind, options in KINDS.items():
        model = build()
        optimiser = optimiser_of(model)
        model.gradient_checkpointing_enable(options)
        result[kind] = train(model, optimiser, data[:HALF])
        save(model, optimiser, folder / kind)
        result[kind] |= seen(model, data[0])
    return result


def resume(folder: Path) -> dict[str, Any]:
    data = batches(folder)
    result = {}
    for kind, options in KINDS.items():
        model, optimiser = load(folder / kind)
        model.gradient_checkpointing_enable(options)
        result[kind] = train(model, optimiser, data[HALF:]) | seen(model, data[0])
    return result


def look(folder: Path) -> dict[str, Any]:
    data = batches(folder)
    return {kind: seen(load(folder / kind)[0], data[0]) for kind in KINDS}


VERBS: dict[str, Callable[..., dict[str, Any]]] = {"start": start, "resume": resume, "load": look}


def main(result: str, folder: str, verb: str, *text: str) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found = VERBS[verb](Path(folder), *map(Path, text))
    Path(result).write_text(json.dumps(found | {"transformers": transformers.__version__}), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
