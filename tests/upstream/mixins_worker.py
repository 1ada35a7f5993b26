"""Upstream's mixins, as they are, on the families of `families.py`: a class of tests for each family.

pytest collects a copy of it, in a folder with upstream's `tests/` and a copy of `families.py`.
"""

import copy
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
import transformers
from families import BATCH, FAMILIES, FRAMES, IMAGE, IMAGE_TOKEN, MELS, PATCH, SAMPLES, VOCABULARY, Family
from transformers.modeling_layers import GradientCheckpointingLayer

STAND_INS = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
"""Mixins that an sdist lacks and `test_modeling_common.py` imports. They are empty, so no test comes from them."""

for module, mixin in STAND_INS.items():
    stand_in = types.ModuleType(f"tests.{module}")
    setattr(stand_in, mixin, type(mixin, (), {}))
    sys.modules[stand_in.__name__] = stand_in

from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor  # noqa: E402
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin  # noqa: E402
from tests.test_training_mixin import TrainingTesterMixin  # noqa: E402

MIXINS: dict[str, type] = {"training": TrainingTesterMixin, "tensor parallel": TensorParallelTesterMixin}
try:
    from tests.test_fsdp_mixin import FSDPTesterMixin
except ModuleNotFoundError:  # 5.14.1 has none
    pass
else:
    MIXINS["fsdp"] = FSDPTesterMixin

if "OVERLAY_WITHOUT_CHECKPOINT" in os.environ:  # to see that the tests can fail
    GradientCheckpointingLayer.__call__ = torch.nn.Module.__call__

FIRST_TOKEN = 3
"""Below are the special tokens."""


class Tester:
    """What the mixins ask of a model tester."""

    is_training = True
    batch_size = BATCH
    num_choices = 2

    def __init__(self, family: Family) -> None:
        self.family = family
        self.seq_length = family.length
        self.image_size = family.settings.get("image_size", IMAGE)
        self.patch_size = family.settings.get("patch_size", PATCH)
        causal = [name for name in family.models if name.endswith("ForCausalLM")]
        self.causal_lm_class = getattr(transformers, causal[0]) if causal else None

    def get_config(self) -> Any:
        return getattr(transformers, self.family.config)(**copy.deepcopy(dict(self.family.settings)))

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        inputs = INPUTS[self.family.inputs](self)
        if self.family.labels:
            kind = torch.float if self.family.inputs == "image and text" else torch.long
            inputs["labels"] = torch.ones(self.family.labels, dtype=kind)
        return self.get_config(), inputs

    def text(self) -> dict[str, torch.Tensor]:
        ids = ids_tensor([BATCH, self.seq_length], IMAGE_TOKEN).clamp(min=FIRST_TOKEN)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def target(self) -> dict[str, torch.Tensor]:
        ids = ids_tensor([BATCH, self.seq_length], VOCABULARY).clamp(min=FIRST_TOKEN)
        return {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}

    def image(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": floats_tensor([BATCH, 3, self.image_size, self.image_size])}

    def image_and_text(self) -> dict[str, torch.Tensor]:
        inputs = self.text() | self.image()
        inputs["input_ids"][:, : self.family.settings.get("image_seq_length", 0)] = IMAGE_TOKEN
        return inputs


INPUTS: dict[str, Callable[[Tester], dict[str, torch.Tensor]]] = {
    "text": Tester.text,
    "text to text": lambda tester: tester.text() | tester.target(),
    "document": lambda tester: tester.text() | {"bbox": torch.zeros(BATCH, tester.seq_length, 4, dtype=torch.long)},
    "image": Tester.image,
    "image and text": Tester.image_and_text,
    "video": lambda tester: {"pixel_values": floats_tensor([BATCH, FRAMES, 3, IMAGE, IMAGE])},
    "speech": lambda tester: {"input_values": floats_tensor([BATCH, SAMPLES])},
    "speech to text": lambda tester: {"input_features": floats_tensor([BATCH, MELS, 60])} | tester.target(),
    "spectrogram": lambda tester: {"input_values": floats_tensor([BATCH, 24, MELS])},
}


def suite(name: str, family: Family) -> type:
    """The tests of a family."""

    def set_up(self: Any) -> None:
        self.model_tester = Tester(family)

    bases = (ModelTesterMixin, *(MIXINS[mixin] for mixin in family.mixins if mixin in MIXINS), unittest.TestCase)
    return type(
        name,
        bases,
        {
            "__module__": __name__,
            "setUp": set_up,
            "model_tester": None,
            "all_model_classes": tuple(getattr(transformers, model) for model in family.models),
            "test_all_params_have_gradient": family.every_gradient,
            "is_encoder_decoder": "to text" in family.inputs,
        },
    )


globals().update({name: suite(name, family) for name, family in FAMILIES.items()})
