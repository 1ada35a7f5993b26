"""What a step under FSDP2 communicates and holds is what `overlay.measure.collectives` says, and docs/scaling.md."""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from overlay.measure.collectives import Checkpointing, Collectives, Sharded, Unit, collectives, whole_gradients
from tests.variants import PATCHED, ROOT, STOCK, installed, run

WORKER = Path(__file__).with_name("scaling_worker.py")
PAGE = ROOT / "docs" / "scaling.md"
RANKS = (1, 2, 4, 8)
FORWARDS = (1, 2, 3, 4)
KINDS: tuple[Checkpointing, ...] = get_args(Checkpointing)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard_after_forward=True": {"reshard_after_forward": True},
    "reshard_after_forward=False": {"reshard_after_forward": False},
    "bf16, reduced in fp32": {"gathered_bytes": 2},
    "bf16": {"gathered_bytes": 2, "reduced_bytes": 2},
    "all but the norms frozen": {},
}
"""What the worker calls an option, in words of the formulas."""

Measured = Mapping[int, Mapping[str, Any]]
"""What the worker wrote, by the number of ranks."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    """Of a patched build, and of a stock one on two ranks."""
    wanted = {"patched": (PATCHED[0], RANKS), "stock": (STOCK[0], (2,))}
    for variant, _ in wanted.values():
        installed(variant)  # builds and installs, which must not happen twice at once
    with ThreadPoolExecutor() as pool:
        results = {
            name: pool.submit(run, WORKER, PAGE, *ranks, variant=variant) for name, (variant, ranks) in wanted.items()
        }
        return {name: {found["ranks"]: found for found in result.result()} for name, result in results.items()}


@pytest.fixture(scope="module")
def patched(measured: dict[str, Measured]) -> Measured:
    return measured["patched"]


def unit(shapes: Mapping[str, list[list[int]]]) -> Unit:
    return Unit(tuple(map(tuple, shapes["trained"])), tuple(map(tuple, shapes["frozen"])))


def model(measured: Measured, options: str, ranks: int) -> Sharded:
    shapes = measured[2]["units"][options]
    return Sharded(tuple(map(unit, shapes["layers"])), unit(shapes["root"]), ranks, **OPTIONS[options])


def counted(measured: Measured, options: str, ranks: int, kind: str, forwards: int) -> Collectives:
    """What the profiler counted, in words of the formulas."""
    (found,) = (
        row["collectives"]
        for row in measured[ranks]["rows"]
        if (row["options"], row["checkpointing"], row["forwards"]) == (options, kind, forwards)
    )
    return as_collectives(ranks, found)


def as_collectives(ranks: int, found: Mapping[str, int]) -> Collectives:
    names = ("all-gather", "reduce-scatter", "all-gather bytes", "reduce-scatter bytes")
    return Collectives(ranks, *(found[name] for name in names))


@pytest.mark.parametrize("forwards", FORWARDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_collectives_and_bytes(patched: Measured, ranks: int, kind: Checkpointing, forwards: int) -> None:
    formula = collectives(model(patched, "default", ranks), kind, forwards)
    assert counted(patched, "default", ranks, kind, forwards) == formula
    assert (formula.sent > 0) == (ranks > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_fully_shard(patched: Measured, options: str, kind: Checkpointing) -> None:
    formula = collectives(model(patched, options, 2), kind, 2)
    assert counted(patched, options, 2, kind, 2) == formula


@pytest.mark.parametrize("options", [options for options in OPTIONS if "frozen" not in options])
def test_options_on_stock(measured: dict[str, Measured], options: str) -> None:
    stock = measured["stock"]
    formula = collectives(model(stock, options, 2), "reentrant", 2, hooks="inside")
    assert counted(stock, options, 2, "reentrant", 2) == formula


@pytest.mark.parametrize("forwards", FORWARDS)
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_on_stock(measured: dict[str, Measured], kind: Checkpointing, forwards: int) -> None:
    stock = measured["stock"]
    formula = collectives(model(stock, "default", 2), kind, forwards, hooks="inside")
    assert counted(stock, "default", 2, kind, forwards) == formula


def weights(measured: Measured) -> Sharded:
    """The wide model without its vectors, which the worker cannot tell from other tensors."""

    def without_vectors(shapes: Mapping[str, list[list[int]]]) -> Unit:
        return Unit(tuple(tuple(shape) for shape in shapes["trained"] if len(shape) > 1))

    shapes = measured[2]["wide"]
    return Sharded(tuple(map(without_vectors, shapes["layers"])), without_vectors(shapes["root"]), 2)


@pytest.mark.parametrize("forwards", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_gradients(patched: Measured, kind: Checkpointing, forwards: int) -> None:
    """One layer's at a time, or the model's."""
    wide = weights(patched)
    held = patched[2]["held"][kind][str(forwards)]
    layer = wide.layers[0].reduced(1) * wide.gathered_bytes
    assert -wide.root.reduced(1) * 4 <= held - whole_gradients(wide, kind, forwards) < layer
    assert (held > len(wide.layers) * layer) == (kind != "reentrant" and forwards > 1)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_gradients_are_in_the_type_of_the_parameters(patched: Measured, kind: Checkpointing) -> None:
    wide = weights(patched)
    formula = whole_gradients(replace(wide, gathered_bytes=2), kind, 2)
    assert 0 <= patched[2]["held in bf16"][kind] - formula < wide.layers[0].reduced(1) * 2


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_for_an_optimizer_in_the_backward_run_once_a_reduction(patched: Measured, kind: Checkpointing) -> None:
    calls = {1: [1], 2: [2], 3: [3]} if kind == "reentrant" else {1: [1], 2: [1], 3: [1]}
    assert patched[2]["hook calls"][kind] == {str(forwards): times for forwards, times in calls.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", ["patched", "stock"])
def test_backward_forward_by_forward(measured: dict[str, Measured], build: str, kind: Checkpointing) -> None:
    """The page's program: right gradients, a layer's at a time, and what two steps of one forward communicate."""
    of_build = measured[build]
    found = of_build[2]["one by one"][kind]
    assert found["error"] < 1e-5
    assert found["held"] <= whole_gradients(weights(of_build), kind, 1)
    once = collectives(model(of_build, "default", 2), kind, 1)
    twice = replace(once, **{name: 2 * value for name, value in vars(once).items() if name != "ranks"})
    assert as_collectives(2, found["collectives"]) == twice


def test_reducing_once_in_reentrant_mode_holds_what_non_reentrant_does(patched: Measured) -> None:
    """It can be done by asking autograd, and costs what it is meant to save; counting forwards loses gradients."""
    asking, counting = (patched[2]["reducing once"][design] for design in ("asking", "counting"))
    assert as_collectives(2, asking["collectives"]) == counted(patched, "default", 2, "non-reentrant", 2)
    held = whole_gradients(weights(patched), "non-reentrant", 2)
    assert all(found >= held for found in asking["held"].values()), "in bf16 too they are kept in fp32"
    assert all(error < 1e-5 for error in asking["errors"].values())
    assert [name for name, error in counting["errors"].items() if error > 0.1] == ["2 of 3 forwards"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", ["patched", "stock"])
def test_the_next_step_has_the_new_weights(measured: dict[str, Measured], build: str, kind: Checkpointing) -> None:
    """On stock, layers whose gradients are lost stay gathered, and the next forward computes with the old weights."""
    found = measured[build][2]["next step"][kind]
    assert (found["first"] == found["second"]) == ((build, kind) != ("stock", "reentrant"))


def llama(hidden: int, intermediate: int, layers: int, key_value: int, vocabulary: int, **more: Any) -> Sharded:
    """A Llama, its embeddings apart from its head; `key_value` is the width of the keys and of the values."""
    attention = ((hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden))
    block = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    layer = Unit((*attention, *block, (hidden,), (hidden,)))
    root = Unit(((vocabulary, hidden), (vocabulary, hidden), (hidden,)))
    return Sharded((layer,) * layers, root, gathered_bytes=2, **more)


SIZES = {
    "Llama 2 7B, 8 ranks": llama(4096, 11008, 32, 4096, 32000, ranks=8),
    "Llama 3.1 70B, 64 ranks": llama(8192, 28672, 80, 1024, 128256, ranks=64),
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]])


def cell(found: Collectives) -> str:
    return f"{found.all_gathers} / {found.reduce_scatters} / {found.sent:,}"


def collectives_table(patched: Measured) -> str:
    rows = (
        [
            f"{'no' if kind == 'none' else kind} checkpointing, {forwards} forward{'s' * (forwards > 1)}",
            *(cell(counted(patched, "default", ranks, kind, forwards)) for ranks in RANKS),
        ]
        for kind in KINDS
        for forwards in FORWARDS
    )
    return table(["", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS)], rows)


def options_table(patched: Measured) -> str:
    rows = ([options, *(cell(counted(patched, options, 2, kind, 2)) for kind in KINDS)] for options in OPTIONS)
    return table(["", "no checkpointing", *KINDS[1:]], rows)


def gradients_table(patched: Measured) -> str:
    layer = weights(patched).layers[0].reduced(1) * 4

    def layers(held: int) -> str:
        return f"{held / layer:.1f}"

    rows = [
        [
            f"{'no' if kind == 'none' else kind} checkpointing",
            *(layers(patched[2]["held"][kind][str(count)]) for count in (1, 2, 3)),
            layers(patched[2]["one by one"][kind]["held"]),
        ]
        for kind in KINDS
    ]
    return table(["", "1 forward", "2 forwards", "3 forwards", "2 forwards, backward one by one"], rows)


def sizes_table() -> str:
    rows = []
    for name, sharded in SIZES.items():
        for forwards in (1, 2):
            found = [(collectives(sharded, kind, forwards).sent, kind) for kind in KINDS[1:]]
            rows.append(
                [
                    f"{name}, {forwards} forward{'s' * (forwards > 1)}",
                    *(f"{sent / 1e9:,.1f}" for sent, _ in found),
                    *(f"{whole_gradients(sharded, kind, forwards) / 1e9:,.1f}" for _, kind in found),
                ]
            )
    return table(["", *(f"{what}, {kind}" for what in ("sent", "gradients") for kind in KINDS[1:])], rows)


@pytest.mark.parametrize(
    "name", ["scaling-collectives-table", "scaling-options-table", "scaling-gradients-table", "scaling-sizes-table"]
)
def test_the_page_has_what_was_measured(patched: Measured, name: str) -> None:
    made = {
        "scaling-collectives-table": lambda: collectives_table(patched),
        "scaling-options-table": lambda: options_table(patched),
        "scaling-gradients-table": lambda: gradients_table(patched),
        "scaling-sizes-table": sizes_table,
    }[name]()
    text = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", PAGE.read_text("utf-8"), re.DOTALL)
    assert text, f"{PAGE.name} has no <!-- {name} -->"
    assert text[1] == made, f"put between <!-- {name} --> and <!-- /{name} -->:\n{made}"


def test_the_program_of_the_page_computes_what_its_table_has() -> None:
    _, program = re.findall(r"^```py\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert names["model"] == SIZES["Llama 3.1 70B, 64 ranks"]
    sent = {kind: collectives(names["model"], kind, 2).sent for kind in KINDS}
    assert names["more"] == sent["reentrant"] - sent["non-reentrant"]
