"""Judges: whether a release has a fault, shown by running a few lines of its own code.

A class or function is taken out of the release's file (`extract`) and run among stand-ins for what it imports
(`stand_ins`), in a process of its own (`worker`) that `verdicts` starts. What runs is upstream's code. The rules are
in `layers`, `models` and `fusers`; `RULES` names them. Standard library only: no torch is needed, nor is any imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["live", "not live", "not judged"]

Files = Mapping[str, bytes]
"""The content of a release's files, by path in its wheel."""


@dataclass(frozen=True)
class Verdict:
    """What a judge says of a fault, and why: what was seen, or what kept it from judging."""

    state: State
    why: str


class CannotJudgeError(Exception):
    """The code is not of a form that the judge knows; the text says what was expected."""


@dataclass(frozen=True)
class Rule:
    """Where the judge of a fault is, `module.function` in this package, and the files that it looks at."""

    place: str
    paths: tuple[str, ...]


LAYERS = "transformers/modeling_layers.py"
GENERIC = "transformers/utils/generic.py"
MODELS = "transformers/modeling_utils.py"
FUSER = "transformer_engine/pytorch/ops/fuser.py"

RULES: Mapping[str, Mapping[str, Rule]] = {
    "transformers": {
        "fsdp2-gradients": Rule("layers.fsdp2_gradients", (LAYERS,)),
        "fsdp2-nested": Rule("layers.fsdp2_nested", (LAYERS,)),
        "training-cache": Rule("layers.training_cache", (LAYERS, GENERIC)),
        "peft-zero3": Rule("models.peft_zero3", (MODELS,)),
        "forward-replaced": Rule("layers.forward_replaced", (LAYERS,)),
    },
    "transformer_engine": {
        "requires-grad": Rule("fusers.requires_grad", (FUSER,)),
    },
}
"""The judges, by project and by the code of the fault in the trailers of the patches."""
