"""FSDP2 with activation checkpointing gives the gradients of the plain model: the fault that the patch is for.

`scripts/test.sh fsdp2 --torch 2.11` runs it on another torch; `--markdown` prints the table for README.md.
"""

from typing import cast

import pytest

from overlay.measure.experiments import fsdp2
from tests.distributed.table import END, MEASURED, START, Measured, Row, Table
from tests.variants import LATEST, PATCHED, PATCHED_LATEST, ROOT, STOCK, VARIANTS, Variant, experiment

LOSS = 0.03

LOST_ON_STOCK = {
    "2 forwards",
    "3 forwards",
    "1 forward, a layer shared within it",
    "2 forwards, one in eval mode between",
    "2 forwards, sharded before enabling",
    "1 without sync, then 2 forwards",
}
"""The cases in which a stock release loses gradients in reentrant mode, silently, and a patched one does not."""

REFUSED = {
    "2 forwards, layer and layer.mlp sharded": "`mlp` of FSDPLlamaDecoderLayer",
    "2 forwards, layer.mlp and layer.self_attn sharded": "`self_attn` of LlamaDecoderLayer",
    "2 forwards, layer and its experts sharded": "`mlp.experts` of FSDPMixtralDecoderLayer",
}
"""The cases in which FSDP2 loses gradients in reentrant mode with every release, and what a patched one names."""

RIGHT_ON_STOCK = {
    "1 forward",
    "2 forwards, fully_shard(checkpoint_wrapper(layer))",
    "1 forward, layer and layer.mlp sharded",
    "1 forward, layer.mlp and layer.self_attn sharded",
    "2 forwards, each with its backward, layer.mlp sharded",
}
CASES = {*LOST_ON_STOCK, *REFUSED, *RIGHT_ON_STOCK}
ON_PATCHED = [*PATCHED, PATCHED_LATEST]


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Table:
    table = pytestconfig.stash[MEASURED]
    for variant in VARIANTS:
        about, rows = experiment(fsdp2.EXPERIMENT, variant, ranks=(1, 2), torch=pytestconfig.getoption("--torch"))
        table.columns[str(variant)] = cast(Measured, {**about, "rows": rows})
    return table


def measured(table: Table, variant: Variant) -> Measured:
    return table.columns[str(variant)]


def lost(measured: Measured) -> list[Row]:
    """The rows with more than rounding, or with an exception."""
    return [row for row in measured["rows"] if isinstance(row["error"], str) or not row["error"] <= fsdp2.ROUNDING]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_build_that_was_meant_is_measured_in_every_case(table: Table, variant: Variant) -> None:
    label = variant.label
    assert measured(table, variant)["transformers"].startswith(variant.release + label)
    rows = {(row["case"], row["reentrant"], row["ranks"]) for row in measured(table, variant)["rows"]}
    assert rows == {(case, mode, ranks) for case in CASES for mode in (True, False) for ranks in (1, 2)}


@pytest.mark.parametrize("variant", ON_PATCHED, ids=str)
def test_no_gradient_is_lost_and_what_would_be_is_refused(table: Table, variant: Variant) -> None:
    rows = lost(measured(table, variant))
    assert {(row["case"], row["ranks"]) for row in rows} == {(case, ranks) for case in REFUSED for ranks in (1, 2)}
    for row in rows:
        assert row["reentrant"]
        assert row["error"] == "refused"
        assert row["said"].startswith(REFUSED[row["case"]])
        assert '{"use_reentrant": False}' in row["said"]


@pytest.mark.parametrize(
    ("variant", "cases"),
    [
        *(pytest.param(one, {*LOST_ON_STOCK, *REFUSED}, id=str(one)) for one in STOCK),
        pytest.param(LATEST, {*REFUSED}, id=str(LATEST)),
    ],
)
def test_upstream_loses_gradients_where_the_report_says_so(table: Table, variant: Variant, cases: set[str]) -> None:
    rows = lost(measured(table, variant))
    assert {(row["case"], row["ranks"]) for row in rows} == {(case, ranks) for case in cases for ranks in (1, 2)}
    assert all(row["reentrant"] and isinstance(row["error"], float) and row["error"] > LOSS for row in rows)


def test_the_readme_has_this_table(table: Table) -> None:
    _, _, rest = (ROOT / "README.md").read_text("utf-8").partition(START)
    assert rest.partition(END)[0].strip() == table.markdown(), (
        f"put between {START} and {END}: scripts/test.sh fsdp2 --markdown"
    )
