"""Ranks have gloo run its collectives on one thread a group: with two, torch frees memory twice now and then."""

from pathlib import Path

import pytest

from overlay import environments
from tests.variants import ROOT, run_worker

WORKER = Path(__file__).with_name("gloo_worker.py")
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("how", "variables", "ranks", "timeout"),
    [("train", {}, 2, 60), ("train", LAUNCHED, 1, 60), ("together", {}, 2, 7200)],
    ids=["verify", "verify-launched", "bench"],
)
def test_each_group_has_one_thread(how: str, variables: dict[str, str], ranks: int, timeout: int) -> None:
    python = environments.python("train-2.13")
    found = run_worker(WORKER, how, on="torch", interpreter=python, laid_over=[ROOT], variables=variables)
    assert found == [{"one": 1, "two": 2, "timeout": timeout}] * ranks
