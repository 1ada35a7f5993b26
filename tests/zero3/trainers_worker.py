"""Trainers with LoRA under DeepSpeed's ZeRO-3, by `TrainingArguments(deepspeed=...)`, on two gloo ranks on the CPU.

`python trainers_worker.py RESULT.json` writes the losses of some steps of each trainer, and its warnings. TRL's
SFTTrainer forces `use_reentrant=True` by itself, ORPOTrainer does not.
"""

import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).parents[1] / "third_party"))
os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
import deepspeed.ops
import torch
import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from shared_worker import build
from transformers import Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_worker import PAIRS, TEXTS, tokenizer

from overlay.measure import group

STEPS = 3
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}
SAID: list[str] = []
"""Warnings of transformers and of TRL since the trainer was made."""


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


class Watch(TrainerCallback):
    """Whether gradients were enabled, of each forward of the first layer's projection: reentrant first runs without."""

    def __init__(self) -> None:
        self.enabled: list[bool] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **options: Any) -> None:
        module = next(m for name, m in model.named_modules() if name.endswith("layers.0.mlp"))
        module.register_forward_pre_hook(lambda module, inputs: self.enabled.append(torch.is_grad_enabled()))


def options(folder: str, checkpointing: dict[str, bool] | None) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": checkpointing,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        "deepspeed": ZERO3,
    }


def sft(folder: str, checkpointing: dict[str, bool] | None) -> Trainer:
    return SFTTrainer(
        build(attention_dropout=0.0),
        args=SFTConfig(**options(folder, checkpointing)),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, init_lora_weights=False),
    )


def orpo(folder: str, checkpointing: dict[str, bool] | None) -> Trainer:
    return ORPOTrainer(
        build(attention_dropout=0.0),
        args=ORPOConfig(**options(folder, checkpointing), max_length=32),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, init_lora_weights=False),
    )


SCENARIOS: dict[str, tuple[Callable[..., Trainer], dict[str, bool] | None]] = {
    "SFTTrainer": (sft, None),
    "ORPOTrainer": (orpo, None),
    "ORPOTrainer, asked for": (orpo, {"use_reentrant": False}),
}


def work(rank: int, world: int, put: Callable[[Any], None]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    transformers.logging.set_verbosity_warning()
    for name in ("transformers", "trl"):
        logging.getLogger(name).handlers[:] = [Handler()]
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    for name in sys.argv[2:]:
        make, checkpointing = SCENARIOS[name]
        SAID.clear()
        transformers.utils.logging.warning_once.cache_clear()
        try:
            with tempfile.TemporaryDirectory() as folder:
                trainer, watch = make(folder, checkpointing), Watch()
                trainer.add_callback(watch)
                trainer.train()
            losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            kinds = {(False, True) * STEPS: "reentrant", (True, True) * STEPS: "non-reentrant"}
            kind = kinds.get(tuple(watch.enabled), f"gradients enabled: {watch.enabled}")
            observed: dict[str, Any] = {"kind": kind, "losses": losses, "gradients": {}}
        except Exception as error:
            sys.stderr.write(f"---- {name}, rank {rank}\n")
            traceback.print_exc()
            observed = {"error": f"{type(error).__name__}: {error}"}
        put((name, observed | {"said": [text for text in SAID if "DeepSpeed" in text]}))


def main(result: Path) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for a minute or more
    warnings.simplefilter("ignore")
    disable_progress_bars()
    transformers.logging.set_verbosity_error()
    rows = dict(group.train([2], work))
    result.write_text(json.dumps({"transformers": transformers.__version__, "rows": rows}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
