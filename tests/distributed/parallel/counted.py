"""An operator that counts its calls, in compiled graphs too."""

import torch
from torch import Tensor

COMPUTED: list[None] = []
"""One entry a call."""


@torch.library.custom_op("overlay_test::counted", mutates_args=())
def counted(value: Tensor) -> Tensor:
    COMPUTED.append(None)
    return value.clone()


@counted.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


counted.register_autograd(lambda context, gradient: gradient)
