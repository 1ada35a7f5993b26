"""What is to be measured, as one value that a worker takes over as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Literal

MODES = ("off", "reentrant", "non-reentrant")
"""What `--modes` takes: no checkpointing, and the two kinds of PyTorch's."""

_OTHERS = {"group": "segments of {} blocks", "every": "every {} layers", "offload": "offload"}

SEGMENTATION = "vit-segmentation"
"""The one MODEL that is no `model_type` of transformers: its ViT with a convolutional decoder (segmentation.py)."""

SMALL: Mapping[str, int] = MappingProxyType({"layers": 4, "hidden": 128, "vocab": 1024})
"""Sizes of a `model_type` where none are given."""

Parallel = Literal["", "ddp", "fsdp"]


@dataclass(frozen=True)
class Settings:
    """One model, one batch, and how it is trained.

    A size that is None is left to the configuration, or follows from the others.

    Attributes:
        model: a `model_type` of transformers, the path of a CONFIG.json, or `FILE.py:FUNCTION` (see model.py).
        layers, hidden, heads, intermediate, vocab: of the configuration; the 3rd and 4th follow from the 2nd.
        experts: in each layer, of a mixture of experts.
        seq: tokens a sample.
        batch: samples in a micro-batch of one rank.
        image: height and width of a sample in pixels, where the model takes images.
        dtype: of the parameters: `float32`, `bfloat16` or `float16`.
        autocast: the dtype of `torch.autocast`, or empty.
        accumulate: micro-batches a step.
        parallel, ranks: how the model is distributed, and over how many processes.
        threads: of each process on the CPU; 0 leaves it to PyTorch.
    """

    model: str
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    experts: int | None = None
    seq: int = 256
    batch: int = 4
    image: int = 224
    dtype: str = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    compile: bool = False
    parallel: Parallel = ""
    ranks: int = 1
    autocast: str = ""
    accumulate: int = 1
    optimizer: str = "adamw"
    seed: int = 0
    threads: int = 0

    def json(self) -> str:
        """For `Settings.parse`."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """The settings that `json` wrote."""
        return cls(**json.loads(text))

    def difference(self, other: "Settings") -> dict[str, tuple[object, object]]:
        """The names of what is not the same, with both values."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def name_of(mode: str) -> str:
    """What a mode is called in a table: `group:2` is segments of 2 blocks (see `step.Trial`)."""
    kind, _, number = mode.partition(":")
    return _OTHERS.get(kind, mode).format(number)
