"""Ranks have gloo run its collectives on one thread a group: with two, torch frees memory twice now and then."""

import os
from pathlib import Path
from typing import Any

import pytest

from overlay import environments
from overlay.measure import rows
from tests.variants import ROOT

WORKER = Path(__file__).with_name("gloo_worker.py")
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("how", "variables", "ranks", "timeout"),
    [("train", {}, 2, 60), ("train", LAUNCHED, 1, 60), ("together", {}, 2, 7200)],
    ids=["verify", "verify-launched", "bench"],
)
def test_each_group_has_one_thread(how: str, variables: dict[str, str], ranks: int, timeout: int) -> None:
    assert run(how, variables) == [{"one": 1, "two": 2, "timeout": timeout}] * ranks


def test_the_interface_is_still_chosen_by_its_variable() -> None:
    with pytest.raises(rows.WorkerError, match="nowhere"):
        run("train", LAUNCHED | {"GLOO_SOCKET_IFNAME": "nowhere"})


def run(how: str, variables: dict[str, str]) -> Any:
    command = [str(environments.python("train-2.13")), "-P", str(WORKER)]
    (found,) = rows.read(command, {**os.environ, **variables, "PYTHONPATH": str(ROOT)}, how, 600)
    return found
