"""Which rank a process is, as its launcher's variables say: what they do not say right is an error, and no rank that is
silent."""

import pytest

from overlay.errors import OverlayError
from overlay.measure import launch
from overlay.measure.launch import Place

VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"RANK": "3"}, None),
        ({"WORLD_SIZE": "3"}, None),
        (VARIABLES, Place(1, 4, 1)),
        (VARIABLES | {"LOCAL_RANK": "0"}, Place(1, 4, 0)),
        (VARIABLES | {"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0)),
    ],
    ids=["none", "a rank left over", "a size left over", "launched", "of the second host", "alone"],
)
def test_a_place(variables: dict[str, str], expected: Place | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.found() == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("RANK", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "4"),
        ("LOCAL_RANK", "-1"),
        ("LOCAL_RANK", ""),
    ],
)
def test_no_place(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other, usual in (VARIABLES | {name: value}).items():
        monkeypatch.setenv(other, usual)
    with pytest.raises(OverlayError, match="expected a RANK and a LOCAL_RANK from 0 to below WORLD_SIZE, found '"):
        launch.found()


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in VARIABLES.keys() - {name}:
        monkeypatch.setenv(other, VARIABLES[other])
    with pytest.raises(OverlayError, match=f"found no {name}: run this under torchrun"):
        launch.found()
