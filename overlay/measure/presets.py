"""Sizes of five models, for runs of a minute or two: `--preset cpu` on two cores, `--preset gpu` on one GPU."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from overlay.errors import OverlayError
from overlay.measure.settings import SEGMENTATION

_CPU: Mapping[str, Mapping[str, Any]] = {
    "llama": {"layers": 8, "hidden": 128, "heads": 4, "vocab": 1024, "seq": 256, "batch": 4},
    "bert": {"layers": 8, "hidden": 128, "heads": 4, "vocab": 1024, "seq": 256, "batch": 4},
    SEGMENTATION: {"layers": 6, "hidden": 128, "heads": 4, "image": 384, "batch": 1},
    "t5": {"layers": 4, "hidden": 128, "heads": 4, "vocab": 1024, "seq": 192, "batch": 4},
    "mixtral": {
        "layers": 6,
        "hidden": 128,
        "heads": 4,
        "intermediate": 256,
        "experts": 4,
        "vocab": 1024,
        "seq": 256,
        "batch": 4,
    },
}
_LARGE = {"device": "cuda", "dtype": "bfloat16", "threads": 0}
_GPU: Mapping[str, Mapping[str, Any]] = {
    # The one that fills it: narrow, so that a step with so much memory is short
    "llama": {"layers": 24, "hidden": 768, "vocab": 32000, "seq": 2048, "batch": 0, **_LARGE},
    "bert": {"layers": 24, "hidden": 768, "vocab": 30522, "seq": 512, "batch": 32, **_LARGE},
    SEGMENTATION: {"layers": 12, "hidden": 768, "image": 1024, "batch": 2, **_LARGE},
    "t5": {"layers": 12, "hidden": 512, "vocab": 32128, "seq": 512, "batch": 32, **_LARGE},
    "mixtral": {
        "layers": 8,
        "hidden": 512,
        "intermediate": 1792,
        "experts": 8,
        "vocab": 32000,
        "seq": 2048,
        "batch": 8,
        **_LARGE,
    },
}
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType({"cpu": _CPU, "gpu": _GPU})
MODELS = tuple(_CPU)


def sizes(preset: str, model: str) -> Mapping[str, Any]:
    """The settings of a model in a preset.

    Raises:
        OverlayError: it has no such model.
    """
    if model not in PRESETS[preset]:
        close = difflib.get_close_matches(model, MODELS, n=1)
        hint = f"did you mean {close[0]}?" if close else "give the sizes by their options"
        raise OverlayError(f"expected one of {', '.join(MODELS)} with --preset, found {model}: {hint}")
    return PRESETS[preset][model]
