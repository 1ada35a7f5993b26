"""What got better or worse between two cards, beyond noise."""

from dataclasses import replace

import pytest

from overlay.measure import card
from overlay.measure.compare import compare
from tests.measure.cards import made, mode, parity

BEFORE = made(mode("off"), mode("reentrant", peak=60, slowdown=1.3))


def words(after: card.Card) -> dict[str, str]:
    """What changed."""
    return {change.what: change.word for change in compare(BEFORE, after).changes if change.word != "same"}


def test_the_same_twice() -> None:
    found = compare(BEFORE, BEFORE)
    assert not found.worse
    assert found.differences == []
    assert found.text() == f"all {len(found.changes)} figures are the same within noise"
    assert len(found.changes) == 8


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (mode("reentrant", peak=60, slowdown=1.34), {}),
        (mode("reentrant", peak=60, slowdown=1.4), {"slowdown": "worse"}),
        (mode("reentrant", peak=60, slowdown=1.2), {"slowdown": "better"}),
        (mode("reentrant", peak=61, slowdown=1.3), {"peak memory": "worse"}),
        (mode("reentrant", peak=50, slowdown=1.3), {"peak memory": "better"}),
        (
            mode("reentrant", peak=60, slowdown=1.3, saved=card.Saved(blocks={"layers.0": 1}, outside=0)),
            {"saved for the backward": "better"},
        ),
        (
            mode("reentrant", peak=60, slowdown=1.3, parity=parity(gradient=1e-3)),
            {"largest difference from off": "worse"},
        ),
        (
            mode(
                "reentrant",
                peak=60,
                slowdown=1.3,
                granularity=card.Granularity(found=2, checkpointed=1, twice=0, findings=[]),
            ),
            {"blocks checkpointed": "worse"},
        ),
        (card.Mode(mode="reentrant", outcome="failed"), {"it": "worse"}),
    ],
)
def test_what_changed(after: card.Mode, expected: dict[str, str]) -> None:
    assert words(made(mode("off"), after)) == expected
    assert compare(BEFORE, made(mode("off"), after)).worse == ("worse" in expected.values())


def test_a_slower_machine_is_seen_without_checkpointing() -> None:
    assert words(made(mode("off", slowdown=1.5), mode("reentrant", peak=60, slowdown=1.3))) == {
        "samples per second": "worse"
    }


def test_noise_within_a_card_is_noise_between_two() -> None:
    noisy = mode("reentrant", peak=60, slowdown=1.5)
    assert noisy.time is not None
    time = noisy.time.model_copy(update={"low": 1.2, "high": 1.9})
    assert words(made(mode("off"), noisy.model_copy(update={"time": time}))) == {}


def test_other_settings_are_told() -> None:
    machine = BEFORE.machine.model_copy(update={"torch": "2.14.1"})
    after = BEFORE.model_copy(update={"settings": replace(BEFORE.settings, batch=8), "machine": machine})
    assert compare(BEFORE, after).differences == ["batch: 4 and 8", "torch: 2.13.0 and 2.14.1"]


def test_a_larger_model_is_no_worse_one() -> None:
    larger = made(mode("off", peak=200), mode("reentrant", peak=120, slowdown=1.5))
    larger = larger.model_copy(update={"settings": replace(BEFORE.settings, layers=8)})
    assert words(larger) == {"peak memory": "other", "slowdown": "worse"}


def test_what_is_here_may_be_another_build_of_the_same_version() -> None:
    unknown, stock, overlaid = (
        made(
            *BEFORE.ours.modes,
            judged="here",
            builds=[card.Build(kind="here", release="", version="5.14.1", modes=BEFORE.ours.modes, state=state)],
        )
        for state in ("", "stock", "overlaid")
    )
    assert compare(unknown, stock).differences == []  # an older card says nothing
    assert compare(stock, overlaid).differences == ["here: transformers 5.14.1 (stock) and 5.14.1 (overlaid)"]
    assert compare(stock, stock).differences == []
