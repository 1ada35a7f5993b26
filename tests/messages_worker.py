"""What PyTorch says of each mistake that docs/affected.md explains, as the last line of a traceback begins."""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def twice() -> None:
    loss = leaf().square().sum()
    loss.backward()
    loss.backward()


def changed() -> None:
    out = leaf().exp()
    out += 1
    out.sum().backward()


def changed_leaf() -> None:
    parameter = leaf()
    parameter += 1


def recomputed(otherwise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A block that computes something else the second time."""
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.exp, otherwise]
    checkpoint(lambda tensor: calls.pop(0)(tensor).sum(), leaf(), use_reentrant=False).backward()


def without_inputs() -> None:
    checkpoint(torch.square, torch.ones(3), use_reentrant=True).sum().backward()


def of_two_dtypes() -> None:
    half, whole = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16), torch.ones(1, 1, 2, 2)
    scaled_dot_product_attention(whole, half, whole)


MISTAKES: dict[str, Callable[[], object]] = {
    "flag": lambda: leaf().exp().requires_grad_(requires_grad=False),
    "second backward": twice,
    "in place": changed,
    "in place, leaf": changed_leaf,
    "metadata": lambda: recomputed(lambda tensor: tensor[:2].exp()),
    "number": lambda: recomputed(lambda tensor: tensor + 1),
    "no gradient": without_inputs,
    "dtype": of_two_dtypes,
}


def said(mistake: Callable[[], object]) -> list[str]:
    """The warning and the error, each on a line, without what depends on the case."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake()
        except Exception as error:
            whole = "".join(traceback.format_exception_only(error))
            lines = [*(f"{one.category.__name__}: {one.message}" for one in caught), whole.splitlines()[0]]
            return [line.partition(": [torch.")[0].partition(": float")[0] for line in lines]
    return []


Path(sys.argv[1]).write_text(json.dumps({name: said(mistake) for name, mistake in MISTAKES.items()}), encoding="utf-8")
