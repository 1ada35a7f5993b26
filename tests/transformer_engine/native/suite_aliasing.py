"""`docs/compatibility.md` says what a caller may do with a tensor that a pipeline passes through."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from overlay import environments
from tests.contracts.columns import PAGE, published
from tests.transformer_engine.native import stack
from tests.transformer_engine.releases import MENDED
from tests.variants import Variant, run_worker, wheel

WORKER = Path(__file__).with_name("aliasing_worker.py")
TABLE = "passed-through-table"
WITH, CHECKPOINT, WITHOUT, PLAIN = (
    "with gradients",
    "from a reentrant checkpoint",
    "without gradients",
    "without gradients, of a tensor that requires none",
)

Observed = Mapping[str, Any]


def alone(variant: Variant, release: str) -> Observed:
    """What a build does without its native library."""
    found: Observed = run_worker(
        WORKER,
        "alone",
        on=str(variant),
        interpreter=stack.interpreter(release),
        laid_over=[environments.variant(wheel(variant))],
        variables=stack.variables(release),
    )
    return found


def native(variant: Variant, release: str) -> Observed:
    assert variant.release == release
    found: Observed = stack.observed(WORKER, variant, "native")
    return found


@pytest.fixture(scope="module")
def columns(release: str) -> Mapping[str, Observed]:
    asked = {
        "stock": (native, stack.stock(release)),
        "patched": (native, stack.patched(release)),
        "patched alone": (alone, stack.patched(release)),
        "mended alone": (alone, Variant("stock", MENDED, stack.PROJECT)),
    }
    for _, variant in asked.values():
        wheel(variant)  # builds them, which must not happen twice at once
    with ThreadPoolExecutor(2) as pool:
        results = {name: pool.submit(ask, variant, release) for name, (ask, variant) in asked.items()}
        return {name: result.result() for name, result in results.items()}


def table(columns: Mapping[str, Observed]) -> str:
    heads = {f"stock {stack.RELEASE}": "stock", "with this project": "patched", MENDED: "mended alone"}
    lines = [" | ".join(["| what the caller does with `out`", *heads]) + " |", "|---" * (1 + len(heads)) + "|"]
    for part in ("actions", "recomputes"):
        for name in columns["patched"][part]:
            cells = [cell(columns[column][part][name]) for column in heads.values()]
            lines.append(" | ".join([f"| {name}", *cells]) + " |")
    return "\n".join(lines)


def cell(found: str | Mapping[str, str]) -> str:
    if isinstance(found, str):
        return found
    return found[WITH] if found[WITH] == found[WITHOUT] else f"{found[WITH]} / {found[WITHOUT]}"


def test_the_page_has_the_table(columns: Mapping[str, Observed]) -> None:
    made = table(columns)
    assert published(TABLE) == made, f"{PAGE.name} has to have between <!-- {TABLE} --> and <!-- /{TABLE} -->:\n{made}"


def test_everything_is_as_with_upstreams_own_fix(columns: Mapping[str, Observed]) -> None:
    assert columns["patched"] == columns["mended alone"]


def test_the_native_library_has_no_part_in_it(columns: Mapping[str, Observed]) -> None:
    assert columns["patched"] == columns["patched alone"]


@pytest.mark.parametrize("mode", [WITH, PLAIN])
def test_where_stock_does_not_raise_everything_is_as_on_stock(columns: Mapping[str, Observed], mode: str) -> None:
    stock, patched = (
        {name: found[mode] for name, found in columns[column]["actions"].items()} for column in ("stock", "patched")
    )
    assert patched == stock


def test_from_a_checkpoint_everything_is_as_with_gradients(columns: Mapping[str, Observed]) -> None:
    for name, found in columns["patched"]["actions"].items():
        assert found[CHECKPOINT] == found[WITH], name
