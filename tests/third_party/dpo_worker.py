"""TRL's DPO loss on a Llama that is fully sharded (FSDP2) on two gloo ranks, against the same model neither sharded
nor checkpointed.

`python dpo_worker.py RESULT.json` writes for each case the relative error of the gradients. The trainer's own loss is
taken. With LoRA, the reference's forward runs through the same layers as the policy's, which has not had its backward.
accelerate 1.15 shards on accelerators only; so the model is sharded here.
"""

import functools
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import disable_progress_bars
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).parent))
from shared_worker import REFERENCE, Setup, layers
from trl_worker import dpo

from overlay.measure import group

RANKS = 2
CASES = {
    "1 loss, LoRA": (True, 1),
    "2 losses, LoRA": (True, 2),
    "1 loss, a reference model": (False, 1),
    "2 losses, a reference model": (False, 2),
}
"""Whether LoRA is trained, and how many losses there are before the backward."""


def loss(trainer: Any, ranks: range, count: int) -> Tensor:
    """The mean over the batches of `ranks` of the sum of `count` losses, each on a batch of its own."""
    data = trainer.train_dataset

    def one(rank: int, i: int) -> Tensor:
        first = 2 * (RANKS * i + rank)
        inputs = trainer.data_collator([data[first], data[first + 1]])
        return trainer.compute_loss(trainer.model, inputs)

    return torch.stack([one(rank, i) for i in range(count) for rank in ranks]).sum() / len(ranks)


def trainer_for(setup: Setup, lora: bool, folder: str) -> Any:
    trainer = dpo(setup, folder, lora, attention_dropout=0.0)
    trainer.model.double().train()
    if trainer.ref_model is not None:
        trainer.ref_model.double()
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.mul_(0.9)
    return trainer


def relative_error(model: nn.Module, reference: nn.Module) -> float:
    difference = norm = 0.0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if not theirs.requires_grad:
            continue
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        difference += float((theirs.grad if gradient is None else theirs.grad - gradient).norm() ** 2)
        norm += float(theirs.grad.norm() ** 2)
    return math.sqrt(difference / norm)


def measure(setup: Setup, lora: bool, count: int, rank: int, folder: str) -> float:
    reference = trainer_for(REFERENCE, lora, folder)
    loss(reference, range(RANKS), count).backward()
    trainer = trainer_for(setup, lora, folder)
    setup.enable(trainer.model)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in layers(trainer.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer.model, mesh=mesh)
    loss(trainer, range(rank, rank + 1), count).backward()
    return relative_error(trainer.model, reference.model)


def work(rank: int, world: int, put: Callable[[Any], None], folder: str) -> None:
    warnings.simplefilter("ignore")
    for reentrant in (True, False):
        for name, (lora, count) in CASES.items():
            try:
                result: float | str = measure(Setup(reentrant), lora, count, rank, folder)
            except Exception as error:
                result = type(error).__name__
                sys.stderr.write(f"{name}: {error}\n")
                group.agreed(error)
            put({"case": name, "reentrant": reentrant, "error": result})


def main(result: Path) -> None:
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        rows = group.train([RANKS], functools.partial(work, folder=folder))
    result.write_text(json.dumps({"transformers": transformers.__version__, "rows": rows}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
