"""What a worker observed with each build of transformers: the columns that the tests here lay side by side."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.variants import PATCHED, PINNED, STOCK, Variant, installed, run

Observed = Mapping[str, Any]
Columns = Mapping[Variant, Observed]
Pair = tuple[Observed, Observed]

PAIRS = {release: (stock, patched) for release, stock, patched in zip(PINNED, STOCK, PATCHED, strict=True)}


def measure(worker: Path, variants: Sequence[Variant], only: Mapping[Variant, str] | None = None) -> Columns:
    """Run a worker once with each variant, as many at a time as there are processors.

    Args:
        only: what a worker is to be told with a variant, beside the file for its result.
    """
    arguments = {variant: [told] for variant, told in (only or {}).items()}
    for variant in variants:
        installed(variant)  # builds and installs, which must not happen twice at once
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        results = [pool.submit(run, worker, *arguments.get(variant, []), variant=variant) for variant in variants]
        return {variant: result.result() for variant, result in zip(variants, results, strict=True)}


def pair(columns: Columns, release: str) -> Pair:
    """What was observed with the stock and with the patched build of a release."""
    stock, patched = PAIRS[release]
    return columns[stock], columns[patched]


def scenarios(names: Sequence[str], broken: Mapping[str, str] | None = None) -> list[Any]:
    """Test parameters: each scenario, those that are known to be broken as strict expected failures."""
    broken = broken or {}
    assert set(broken) <= set(names), "a scenario that is said to be broken does not exist"
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=broken[name])) if name in broken else name
        for name in names
    ]
