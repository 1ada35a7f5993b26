"""What `overlay.check` finds in models of fusible operations, without the native library.

`python rule_worker.py RESULT.json` writes the findings about the fuser, by model, and what a step does.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where the overlay wheel is not installed
import overlay
from overlay.measure.te_stand_ins import IDENTITY, load_operations


def operations() -> nn.Module:
    from transformer_engine.pytorch.ops.sequential import Sequential

    return nn.Sequential(nn.Linear(8, 8), Sequential(IDENTITY()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "not checkpointed": operations,
    "non-reentrant": lambda: checkpoint_wrapper(operations(), CheckpointImpl.NO_REENTRANT),
    "reentrant": lambda: nn.Sequential(nn.Linear(8, 8), checkpoint_wrapper(operations()[1], CheckpointImpl.REENTRANT)),
    "no operations": lambda: nn.Sequential(
        nn.Linear(8, 8), checkpoint_wrapper(nn.Linear(8, 8), CheckpointImpl.REENTRANT)
    ),
}


def found(model: nn.Module | None = None) -> list[list[str]]:
    return [[one.severity, one.where] for one in overlay.check(model) if one.code == "fuser-recompute"]


def step(model: nn.Module) -> str:
    try:
        model(torch.randn(4, 8)).sum().backward()
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return "trains"


def main(result: Path) -> None:
    load_operations()
    environment = found()
    models = {name: make() for name, make in MODELS.items()}
    rows = {
        name: {"findings": [one for one in found(model) if one not in environment], "step": step(model)}
        for name, model in models.items()
    }
    result.write_text(json.dumps({"environment": environment, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
