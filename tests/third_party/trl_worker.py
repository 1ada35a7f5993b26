"""Two steps of TRL's trainers on a tiny Llama.

`python trl_worker.py RESULT.json` writes what was observed. Gradients are true where both steps end with the weights
that they end with without checkpointing, bit for bit.
"""

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

sys.path.append(str(Path(__file__).parent))
from shared_worker import REFERENCE, VOCABULARY, Observed, Setup, build, count, counted, main, same

STEPS = 2
WORDS = [f"w{i}" for i in range(VOCABULARY - 3)]
TEXTS = [" ".join(WORDS[7 * i % 40 + j] for j in range(10 + i)) for i in range(4 * STEPS)]
PAIRS = [
    {"prompt": " ".join(text.split()[:4]), "chosen": f" {text}", "rejected": " " + " ".join(reversed(text.split()))}
    for text in TEXTS
]


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = {word: i for i, word in enumerate([*special.values(), *WORDS])}
    model = Tokenizer(WordLevel(words, unk_token=special["unk_token"]))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def options(setup: Setup, folder: str) -> dict[str, Any]:
    checkpointing = setup.reentrant is not None
    return {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": setup.options() if checkpointing else None,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }


def sft(setup: Setup, folder: str, lora: bool) -> Any:
    return SFTTrainer(
        build(),
        args=SFTConfig(**options(setup, folder)),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, init_lora_weights=False) if lora else None,
    )


def dpo(setup: Setup, folder: str, lora: bool, **model: Any) -> Any:
    return DPOTrainer(
        build(**model),
        ref_model=None if lora else build(**model),
        args=DPOConfig(**options(setup, folder)),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, init_lora_weights=False) if lora else None,
    )


def trained(trainer: Any) -> dict[str, Tensor]:
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert trainer.state.global_step == STEPS
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert all(not torch.equal(value, before[name]) for name, value in after.items())
    return after


def two_steps(make: Callable[[Setup, str, bool], Any], lora: bool) -> Callable[[Setup], Observed]:
    @functools.cache
    def expected() -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            return trained(make(REFERENCE, folder, lora))

    def run(setup: Setup) -> Observed:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make(setup, folder, lora)
            count(trainer.model, setup)
            weights = trained(trainer)
        return counted(setup) | {"gradients": same(weights, expected())}

    return run


SCENARIOS = {
    f"{name}{', LoRA' if lora else ''}": two_steps(make, lora)
    for name, make in {"SFTTrainer": sft, "DPOTrainer": dpo}.items()
    for lora in (False, True)
}

if __name__ == "__main__":
    disable_progress_bars()
    main(SCENARIOS)
