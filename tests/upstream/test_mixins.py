"""Upstream's own tests of checkpointing, training, FSDP2 and tensor parallelism pass on the patched builds where they
pass on stock: upstream's mixins, unmodified, on small models of this project."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest

from tests.upstream import mixins
from tests.upstream.families import FAMILIES, Kind
from tests.upstream.outcomes import Difference, Outcomes
from tests.variants import PATCHED, PINNED, STOCK, Variant, installed

Runs = Mapping[Variant, Outcomes]


@pytest.fixture(scope="module")
def runs() -> Runs:
    variants = [*STOCK, *PATCHED]
    for variant in variants:
        installed(variant)  # builds and installs, which must not happen twice at once
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(variants, pool.map(mixins.run, variants), strict=True))


def test_there_are_families_of_every_kind() -> None:
    kinds = [family.kind for family in FAMILIES.values()]
    assert len(kinds) >= 24
    assert min(kinds.count(kind) for kind in get_args(Kind)) >= 3


@pytest.mark.parametrize("variant", STOCK, ids=str)
def test_stock_passes_every_test_that_is_run(runs: Runs, variant: Variant) -> None:
    outcomes = runs[variant]
    assert outcomes.version == variant.release
    assert set(outcomes.counts()) == {"passed"}, {name: outcomes.said.get(name) for name in outcomes.having("failed")}
    assert set(outcomes.tests) == expected(variant.release)


def expected(release: str) -> set[str]:
    """The tests and subtests: each class of models is a subtest of the three that count the calls of a forward."""
    found = set()
    for name, test in mixins.names(release):
        found.add(mixins.identifier(name, test))
        if test in mixins.CHECKPOINTING:
            found |= {f"{mixins.identifier(name, test)} [{model}]" for model in FAMILIES[name].models}
    return found


@pytest.mark.parametrize("release", PINNED)
def test_patched_passes_what_stock_passes(runs: Runs, release: str) -> None:
    stock, patched = (runs[Variant(kind, release)] for kind in ("stock", "patched"))
    assert patched.version.startswith(f"{release}{Variant('patched', release).label}")
    assert Difference.between(stock, patched) == Difference(lost=[], gained=[], failing=[], other=[]), patched.said


def test_a_layer_that_does_not_checkpoint_does_not_pass() -> None:
    outcomes = mixins.run(STOCK[0], only=["llama"], variables={"OVERLAY_WITHOUT_CHECKPOINT": "1"})
    assert outcomes.having("failed") == [
        f"{mixins.identifier('llama', test)} [{model}]"
        for test in mixins.CHECKPOINTING
        for model in FAMILIES["llama"].models
    ]
    assert all("not greater than 1" in said for said in outcomes.said.values())
