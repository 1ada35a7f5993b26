"""What a worker observed with each build of transformers: the columns that the tests here lay side by side."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.variants import LATEST, PATCHED, PATCHED_LATEST, PINNED, ROOT, STOCK, Variant, installed, run

Observed = Mapping[str, Any]
Columns = Mapping[Variant, Observed]
Pair = tuple[Observed, Observed]

PAIRS = {release: (stock, patched) for release, stock, patched in zip(PINNED, STOCK, PATCHED, strict=True)}

PAGE = ROOT / "docs" / "compatibility.md"
HEADS = {
    "stock": STOCK,
    "with this project": PATCHED,
    LATEST.release: [LATEST],
    f"{LATEST.release} with this project": [PATCHED_LATEST],
}
"""The columns of the tables of compatibility: the pinned releases stand together."""

TABLES = pytest.StashKey[dict[str, str]]()
"""The tables that were measured, by name, for `--markdown` to print."""


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


def table(rows: Mapping[str, Mapping[Variant, str]], subject: str = "what third-party code does") -> str:
    """Rows of compatibility in Markdown: one row a scenario, one column a kind of build, a few words in each cell.

    Args:
        rows: the name of a row -> what each variant of `HEADS` does.
        subject: the head of the first column.
    """
    lines = [" | ".join([f"| {subject}", *HEADS]) + " |", "|---" * (1 + len(HEADS)) + "|"]
    for name, cells in rows.items():
        lines.append(" | ".join([f"| {name}", *(_cell(cells, variants) for variants in HEADS.values())]) + " |")
    return "\n".join(lines)


def _cell(cells: Mapping[Variant, str], variants: Sequence[Variant]) -> str:
    if len({cells[variant] for variant in variants}) == 1:
        return cells[variants[0]]
    return "; ".join(f"{variant.release}: {cells[variant]}" for variant in variants)


def published(name: str) -> str:
    """The table that `docs/compatibility.md` has between `<!-- NAME -->` and `<!-- /NAME -->`."""
    _, start, rest = PAGE.read_text("utf-8").partition(f"<!-- {name} -->")
    text, end, _ = rest.partition(f"<!-- /{name} -->")
    assert start, f"{PAGE.name} has no <!-- {name} -->"
    assert end, f"{PAGE.name} has no <!-- /{name} -->"
    return text.strip()
