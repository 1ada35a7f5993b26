"""A ViT encoder with a convolutional decoder for segmentation at the resolution of the image.

The decoder is that of SETR-PUP (Zheng et al. 2021, "Rethinking Semantic Segmentation from a Sequence-to-Sequence
Perspective", progressive upsampling): stages that each convolve and double the resolution. At high resolution its
stages hold more than the encoder does, so that each is a layer that transformers can checkpoint.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SemanticSegmenterOutput

from overlay.measure.model import Batch, Task, sizes_of
from overlay.measure.settings import Settings

CLASSES = 8
GROUPS = 8
"""Of the normalisation: that of batches would move its statistics twice a step under a checkpoint."""


class Stage(GradientCheckpointingLayer):
    """Convolution, normalisation, activation, and twice the resolution."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(into, out, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, out)
        self.activation = nn.GELU()

    def forward(self, features: Tensor) -> Tensor:
        """From (batch, into, height, width) to (batch, out, 2 height, 2 width)."""
        hidden = self.activation(self.norm(self.convolution(features)))
        return nn.functional.interpolate(hidden, scale_factor=2, mode="bilinear")


class ViTForSegmentation(PreTrainedModel):
    """Pixels to classes of pixels."""

    supports_gradient_checkpointing = True
    main_input_name = "pixel_values"
    _no_split_modules = ("ViTLayer", "Stage")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vit = ViTModel(config, add_pooling_layer=False)
        width = max(GROUPS, config.hidden_size // 2 // GROUPS * GROUPS)
        widths = [config.hidden_size, *[width] * (config.patch_size.bit_length() - 1)]
        self.decoder = nn.ModuleList(Stage(into, out) for into, out in pairwise(widths))
        self.classifier = nn.Conv2d(widths[-1], CLASSES, 1)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> SemanticSegmenterOutput:
        """`labels`: (batch, height, width)."""
        hidden = self.vit(pixel_values).last_hidden_state[:, 1:]
        side = pixel_values.shape[-1] // self.config.patch_size
        features = hidden.transpose(1, 2).reshape(hidden.shape[0], -1, side, side)
        for stage in self.decoder:
            features = stage(features)
        logits = self.classifier(features)
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SemanticSegmenterOutput(loss=loss, logits=logits)


def task(config: Any, settings: Settings) -> Task:
    """The model, and images whose pixels are of a class by their brightness.

    Raises:
        SizeError: the image is no multiple of the patches.
    """
    from overlay.measure.model import SizeError

    patch = int(config.patch_size)
    if settings.image % patch or patch & (patch - 1):
        raise SizeError(
            f"expected an image that is a multiple of the patch's {patch} pixels, found --image {settings.image}: "
            f"--image {settings.image // patch * patch or patch} is"
        )
    config.use_cache = False
    model = ViTForSegmentation(config)

    def batch(generator: torch.Generator) -> Batch:
        side = settings.image
        coarse = torch.randn((settings.batch, 3, side // patch, side // patch), generator=generator)
        pixels = nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")
        classes = ((pixels.mean(1) + 1) / 2 * CLASSES).long().clamp(0, CLASSES - 1)
        return {"pixel_values": pixels.to(getattr(torch, settings.dtype)), "labels": classes}

    return Task(
        model, batch, (settings.image // patch) ** 2, False, sizes_of(model, config) | {"image": settings.image}
    )
