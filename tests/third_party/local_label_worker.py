"""What a build of transformers says of its version, saves, and loads of what another build saved.

`python local_label_worker.py RESULT.json FOLDER` trains a step and saves to FOLDER; with a second folder it loads from
there, and goes on training.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import accelerate.utils
import peft.import_utils
import torch
import transformers
import trl.chat_template_utils
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.configuration_utils import get_configuration_file

sys.path.append(str(Path(__file__).parent))
from shared_worker import IDS, VOCABULARY, build

ROWS = Dataset.from_dict({"input_ids": IDS.tolist(), "labels": IDS.tolist()})


def gates() -> dict[str, Any]:
    """What libraries that are imported beside it have decided."""
    flags = {name: value for name, value in vars(peft.import_utils).items() if name.startswith("is_transformers_")}
    flags |= {name: value for name, value in vars(trl.chat_template_utils).items() if name.startswith("_SUPPORTS_")}
    public = transformers.__version__.partition("+")[0]
    versions = ("4.52.0", public, "5.15.0")
    compared = {
        f"accelerate {operation} {version}": accelerate.utils.compare_versions("transformers", operation, version)
        for operation in (">=", "<")
        for version in versions
    }
    files = [f"config.{version}.json" for version in versions]
    return flags | compared | {"configuration file": get_configuration_file(files)}


def trainer(model: LlamaForCausalLM, folder: Path, steps: int) -> Trainer:
    options = TrainingArguments(
        str(folder), max_steps=steps, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, seed=3
    )
    return Trainer(model, options, train_dataset=ROWS)


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"unk_token": "<unk>"}
    words = {special["unk_token"]: 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    model = Tokenizer(WordLevel(words, **special))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def save(folder: Path) -> dict[str, Any]:
    model = build()
    model.generation_config = GenerationConfig(max_new_tokens=3)
    trainer(model, folder, 1).train()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(IDS).logits.double().sum().item()
    files = {file.name: json.loads(file.read_text("utf-8")) for file in folder.glob("*.json")}
    return {
        "labels": {
            name: content["transformers_version"]
            for name, content in files.items()
            if "transformers_version" in content
        },
        "files": sorted(file.name for file in folder.iterdir() if file.is_file()),
        "logits": logits,
        "gates": gates(),
    }


def load(folder: Path, own: Path) -> dict[str, Any]:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("transformers").addHandler(Listener(logging.WARNING))
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    words = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(IDS).logits.double().sum().item()
    loaded = list(said)
    on = trainer(LlamaForCausalLM(AutoConfig.from_pretrained(folder)), own, 2)
    on.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert isinstance(model.config, LlamaConfig)
    return {
        "logits": logits,
        "wrong": {name: sorted(map(str, value)) for name, value in loading.items() if value},
        "new tokens": model.generation_config.max_new_tokens,
        "words": words("w1 w7 other")["input_ids"],
        "steps": on.state.global_step,
        "warnings while loading": loaded,
        "warnings while going on": [text for text in said[len(loaded) :] if "You are resuming" in text],
    }


if __name__ == "__main__":
    result, *folders = map(Path, sys.argv[1:])
    found = save(*folders) if len(folders) == 1 else load(*folders)
    result.write_text(json.dumps({"transformers": transformers.__version__} | found), "utf-8")
