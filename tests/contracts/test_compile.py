"""Layers with checkpointing compile as on stock: once, whole, with the same gradients; with hooks on them too."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.columns import TABLES, Columns, pair, published, table
from tests.variants import LATEST, PATCHED_LATEST, PINNED, VARIANTS, Variant, installed, run

WORKER = Path(__file__).with_name("compile_worker.py")
PAGE_TABLE = "compile-table"
BESIDE = (
    "accelerate==1.15.0",
    "ml_dtypes==0.6.0",
    "onnx==1.23.2",
    "onnx_ir==1.1.0",
    "onnxscript==0.7.2",
    "protobuf==7.36.2",
    "psutil==7.2.2",
)
"""What only the worker here needs: accelerate's regional compilation, and what `torch.onnx.export` asks for."""

Observed = dict[str, Any]


def trained(graphs: list[int], computed: list[int] | int, right: list[bool] | None = None) -> Observed:
    """Graphs after each step, and how often two layers' computation ran in a step: 4 where it was checkpointed once."""
    if isinstance(computed, int):
        computed = [computed] * len(graphs)
    return {"graphs": graphs, "computed": computed, "right": right or [True] * len(graphs)}


def switched(graphs: list[int]) -> Observed:
    """A step, one in eval mode, outputs in eval mode and in training mode, a step, outputs in eval mode, a step."""
    return trained(graphs, [4, 2, 4, 4])


def later(after: int) -> Observed:
    """A step, two with something else in the place of `forward`, and one without it again."""
    return trained([1, after, after, after], 4)


EAGER = trained([0, 0], 4)
ONCE = trained([1, 1], 4)
THREE_LAYERS = trained([1, 1, 1], 6)
SHARDED = {"computed": [8, 8], "right": [True, True]}
ONNX = {"operators": ["Add", "Gemm", "Mul", "Sin"], "right": [True]}

WHOLE: dict[str, Observed] = {
    "model, reentrant": THREE_LAYERS,
    "model, reentrant, hooks": THREE_LAYERS,
    "model, reentrant, nested, hooks": trained([1, 1], 8),
    "model, reentrant, nested, hooks, graph breaks": trained([0, 0], 10),
    "model, non-reentrant": THREE_LAYERS,
    "model, non-reentrant, hooks": THREE_LAYERS,
    "model, non-reentrant, nested, hooks": trained([1, 1], 8),
    "model, non-reentrant, nested, hooks, graph breaks": trained([0, 0], 8),
    "model, non-reentrant, hooks put in later": trained([1, 1, 1, 1], 4),
    "model, non-reentrant, hooks, graph breaks": EAGER,
    "model, non-reentrant, hooks, forward replaced later": later(2),
    "model, non-reentrant, hooks, forward that calls the old put in later": trained([1, 2, 2], 4),
    "model, non-reentrant, hooks, class's forward replaced later": trained([1, 2, 2], 4),
    "model, non-reentrant, hooks, switched": switched([1, 2, 3, 4, 4, 4, 4]),
    "model, own checkpoint function, hooks": ONCE,
    "model, own checkpoint function, not traced, hooks": EAGER,
    "model, hooks, layer's forward replaced": ONCE,
    "model, hooks, class's forward replaced": ONCE,
    "model, hooks, two threads": trained([1, 1, 1], 4),
    "model, after an error": {
        "computed": [4, 4],
        "right": [True, True],
        "errors": ["Unsupported", "TorchRuntimeError"],
    },
    "Llama, hooks": {"graphs": [1, 1], "right": [True, True]},
}

EACH_LAYER: dict[str, Observed] = {
    "layer.compile(), reentrant": trained([2, 2, 2], 6),
    "layer.compile(), reentrant, hooks": THREE_LAYERS,
    "layer.compile(), reentrant, nested, hooks": trained([1, 1], 8),
    "layer.compile(), reentrant, nested, hooks, graph breaks": trained([0, 0], 10),
    "layer.compile(), reentrant, hooks put in later": trained([2, 3, 3, 3], 4),
    "layer.compile(), reentrant, hooks, graph breaks": EAGER,
    "layer.compile(), reentrant, hooks, forward replaced later": later(2),
    "layer.compile(), reentrant, hooks, forward that calls the old put in later": trained([1, 2, 2], 4),
    "layer.compile(), reentrant, hooks, class's forward replaced later": trained([1, 2, 2], 4),
    "layer.compile(), reentrant, hooks, switched": switched([1, 2, 3, 3, 3, 3, 3]),
    "layer.compile(), non-reentrant": THREE_LAYERS,
    "layer.compile(), non-reentrant, hooks": THREE_LAYERS,
    "layer.compile(), non-reentrant, nested, hooks": trained([1, 1], 8),
    "layer.compile(), non-reentrant, nested, hooks, graph breaks": trained([0, 0], 8),
    "layer.compile(), non-reentrant, hooks put in later": trained([1, 2, 2, 2], 4),
    "layer.compile(), non-reentrant, hooks, graph breaks": EAGER,
    "layer.compile(), non-reentrant, hooks, forward replaced later": later(2),
    "layer.compile(), non-reentrant, hooks, forward that calls the old put in later": trained([1, 2, 2], 4),
    "layer.compile(), non-reentrant, hooks, class's forward replaced later": trained([1, 2, 2], 4),
    "layer.compile(), non-reentrant, hooks, switched": switched([1, 2, 3, 3, 3, 3, 3]),
    "layer.compile(), own checkpoint function, hooks": ONCE,
    "layer.compile(), own checkpoint function, not traced, hooks": EAGER,
    "layer.compile(), hooks, layer's forward replaced": ONCE,
    "layer.compile(), hooks, class's forward replaced": ONCE,
    "layer.compile(), hooks, two threads": trained([1, 1, 1], 4),
    "layer.compile(), ten layers, hooks": trained([1, 1], 20),
    "layer.compile(), after an error": {
        "computed": [4, 4],
        "right": [True, True],
        "errors": ["Unsupported", "RuntimeError"],
    },
}

REGIONAL: dict[str, Observed] = {
    "torch.compile(layer), reentrant": trained([2, 2, 2], 6),
    "torch.compile(layer), reentrant, hooks": trained([2, 2, 2], 6),
    "torch.compile(layer), reentrant, nested, hooks": trained([2, 2], 8),
    "torch.compile(layer), reentrant, nested, hooks, graph breaks": trained([1, 1], 10),
    "torch.compile(layer), non-reentrant": trained([2, 2, 2], 6),
    "torch.compile(layer), non-reentrant, hooks": trained([2, 2, 2], 6),
    "torch.compile(layer), non-reentrant, nested, hooks": trained([2, 2], 8),
    "torch.compile(layer), non-reentrant, nested, hooks, graph breaks": trained([1, 1], 8),
    "torch.compile(layer), non-reentrant, hooks put in later": trained([2, 2, 2, 2], 4),
    "torch.compile(layer), non-reentrant, hooks, graph breaks": trained([1, 1], 4),
    "torch.compile(layer), non-reentrant, hooks, forward replaced later": trained([2, 3, 3, 3], 4),
    "torch.compile(layer), non-reentrant, hooks, forward that calls the old put in later": trained([2, 3, 3], 4),
    "torch.compile(layer), non-reentrant, hooks, class's forward replaced later": trained([2, 3, 3], 4),
    "torch.compile(layer), own checkpoint function, hooks": trained([2, 2], 4),
    "torch.compile(layer), hooks, class's forward replaced": trained([2, 2], 4),
}
"""By `accelerate.utils.compile_regions`, which compiles what comes before the layers as well: one graph more."""

EXPORTED: dict[str, Observed] = {
    "torch.export, strict": {"operators": 164, "checkpoints": 0, "right": [True]},
    "torch.export": {"operators": 167, "checkpoints": 0, "right": [True]},
    "torch.onnx.export": ONNX,
    "torch.onnx.export, through torch.jit.trace": ONNX,
}
"""In eval mode, after a step with hooks and checkpointing."""

ACROSS_RANKS = {
    f"FSDP2, two forwards: {how}, {kind}": SHARDED
    for how in ("model", "layer.compile()", "layer.compile(), then sharded")
    for kind in ("reentrant", "non-reentrant")
}

EXPECTED = WHOLE | EACH_LAYER | REGIONAL | EXPORTED | ACROSS_RANKS

LOST = {"computed": [8, 8], "right": [False, False]}
UNSUPPORTED = {"error": "Unsupported: Unsupported method call"}
ON_STOCK: dict[str, Observed] = {
    **{name: LOST for name in ACROSS_RANKS if name.endswith(", reentrant")},
    # A reentrant checkpoint around the compiled layer runs it without gradients first: one graph more
    "layer.compile(), reentrant, hooks": trained([2, 2, 2], 6),
    "layer.compile(), reentrant, nested, hooks": trained([2, 2], 10),
    "layer.compile(), reentrant, nested, hooks, graph breaks": trained([4, 4], 10),
    "layer.compile(), reentrant, hooks put in later": trained([2, 2, 2, 2], 4),
    "layer.compile(), reentrant, hooks, graph breaks": trained([4, 4], 4),
    "layer.compile(), reentrant, hooks, forward replaced later": trained([2, 4, 4, 4], 4),
    "layer.compile(), reentrant, hooks, forward that calls the old put in later": trained([2, 4, 4], 4),
    "layer.compile(), reentrant, hooks, class's forward replaced later": trained([2, 4, 4], 4),
    "layer.compile(), reentrant, hooks, switched": switched([2, 2, 3, 3, 3, 3, 3]),
    # The checkpoint is outside of what is compiled, where a graph break in the layer does not reach it
    "layer.compile(), non-reentrant, nested, hooks": trained([1, 1], 10),
    "layer.compile(), non-reentrant, nested, hooks, graph breaks": trained([2, 2], 8),
    "layer.compile(), non-reentrant, hooks, graph breaks": trained([2, 2], 4),
    "layer.compile(), own checkpoint function, not traced, hooks": ONCE,
    # ... and so the compiled part is the same with hooks, with checkpointing and without
    "layer.compile(), non-reentrant, hooks put in later": trained([1, 1, 1, 1], 4),
    "layer.compile(), non-reentrant, hooks, switched": switched([1, 1, 2, 2, 2, 2, 2]),
    # A partial of `super().__call__` has no `__self__` that torch.compile can trace
    "model, own checkpoint function, hooks": UNSUPPORTED,
    "torch.compile(layer), own checkpoint function, hooks": UNSUPPORTED,
}
"""Where stock differs: it loses gradients, or compiles another part of the layer."""

NO_SELF = {"error": "Unsupported: Observed exception"}
NO_SELF_UNTRACED = {"error": "AttributeError: 'function' object has no attribute '__self__'"}
ON_LATEST: dict[str, Observed] = {
    "layer.compile(), reentrant": THREE_LAYERS,
    "layer.compile(), reentrant, hooks put in later": trained([1, 1, 1, 1], 4),
    "layer.compile(), reentrant, hooks, switched": switched([1, 2, 3, 4, 4, 4, 4]),
    "layer.compile(), non-reentrant, hooks put in later": trained([1, 1, 1, 1], 4),
    "layer.compile(), non-reentrant, hooks, switched": switched([1, 2, 3, 4, 4, 4, 4]),
    "torch.export, strict": {"operators": 181, "checkpoints": 0, "right": [True]},
    "torch.export": {"operators": 184, "checkpoints": 0, "right": [True]},
    # A `forward` that does not call the old one is not checkpointed
    **{
        f"{how}, hooks, {where} replaced later": trained(graphs, computed)
        for where, after, computed in (("forward", 3, [4, 2, 2, 4]), ("class's forward", 2, [4, 2, 2]))
        for how, graphs in (
            ("model, non-reentrant", [1, *[2] * after]),
            ("layer.compile(), reentrant", [1, *[2] * after]),
            ("layer.compile(), non-reentrant", [1, *[2] * after]),
            ("torch.compile(layer), non-reentrant", [2, *[3] * after]),
        )
    },
    "model, hooks, class's forward replaced": trained([1, 1], 2),
    "layer.compile(), hooks, class's forward replaced": trained([1, 1], 2),
    "torch.compile(layer), hooks, class's forward replaced": trained([2, 2], 2),
    # A checkpoint function cannot look at the layer
    "model, own checkpoint function, hooks": NO_SELF,
    "layer.compile(), own checkpoint function, hooks": NO_SELF,
    "torch.compile(layer), own checkpoint function, hooks": NO_SELF,
    "model, own checkpoint function, not traced, hooks": NO_SELF_UNTRACED,
    "layer.compile(), own checkpoint function, not traced, hooks": NO_SELF_UNTRACED,
}
"""Where upstream's own fix differs from the patched builds."""

ON_PATCHED_LATEST = {name: ON_LATEST[name] for name in EXPORTED if name in ON_LATEST}
"""5.24.0 has another mask."""


@pytest.fixture(scope="module")
def columns(pytestconfig: pytest.Config) -> Columns:
    for variant in VARIANTS:
        installed(variant)  # builds and installs, which must not happen twice at once

    def observe(variant: Variant) -> Observed:
        observed: Observed = run(WORKER, variant=variant, beside=BESIDE, timeout=1200)
        return observed

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        columns = dict(zip(VARIANTS, pool.map(observe, VARIANTS), strict=True))
    pytestconfig.stash.setdefault(TABLES, {})[PAGE_TABLE] = table(rows(columns), "what is compiled")
    return columns


def rows(columns: Columns) -> dict[str, dict[Variant, str]]:
    """What docs/compatibility.md says of the cases in which a patched build differs from stock."""
    return {case: {variant: words(column[case]) for variant, column in columns.items()} for case in ON_STOCK}


def words(observed: Observed) -> str:
    if "error" in observed:
        return str(observed["error"].partition(":")[0])
    if not all(observed["right"]):
        return "wrong gradients, silently"
    graphs = observed.get("graphs")
    if graphs is None:
        return "right gradients"
    if not graphs[-1]:
        return "right, eager"
    return f"{graphs[0]} graph{'s' if graphs[0] > 1 else ''}" + (
        f", then {graphs[-1]}" if graphs[-1] > graphs[0] else ""
    )


def test_the_page_has_this_table(columns: Columns) -> None:
    assert published(PAGE_TABLE) == table(rows(columns), "what is compiled"), (
        f"put between <!-- {PAGE_TABLE} --> and <!-- /{PAGE_TABLE} -->: scripts/test.sh {__file__} --markdown"
    )


def test_no_case_is_left_out(columns: Columns) -> None:
    for column in columns.values():
        assert set(column) == set(EXPECTED)


@pytest.mark.parametrize("release", PINNED)
@pytest.mark.parametrize("case", EXPECTED)
def test_patched(columns: Columns, release: str, case: str) -> None:
    _, patched = pair(columns, release)
    assert patched[case] == EXPECTED[case]


@pytest.mark.parametrize("release", PINNED)
@pytest.mark.parametrize("case", EXPECTED)
def test_stock(columns: Columns, release: str, case: str) -> None:
    stock, _ = pair(columns, release)
    assert stock[case] == ON_STOCK.get(case, EXPECTED[case])


@pytest.mark.parametrize("case", EXPECTED)
def test_upstreams_own_fix(columns: Columns, case: str) -> None:
    assert columns[LATEST][case] == ON_LATEST.get(case, EXPECTED[case])


@pytest.mark.parametrize("case", EXPECTED)
def test_patched_on_upstreams_own_fix(columns: Columns, case: str) -> None:
    assert columns[PATCHED_LATEST][case] == ON_PATCHED_LATEST.get(case, EXPECTED[case])
