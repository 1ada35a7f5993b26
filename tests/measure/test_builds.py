"""What a worker of a build has around it."""

import os
from pathlib import Path

import pytest

from overlay.measure.builds import Build
from tests.variants import ROOT


@pytest.mark.parametrize("kind", ["stock", "patched", "latest", "here"])
def test_the_path_of_the_user_is_for_what_is_here_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    path = Build(kind, "1.0", "python", [Path("/laid"), Path("/over")]).variables(1)["PYTHONPATH"].split(os.pathsep)
    assert path == ["/laid", "/over", *(["/of/the/user"] if kind == "here" else []), str(ROOT)]


@pytest.mark.parametrize("name", ["PYTHONOPTIMIZE", "PYTHONDONTWRITEBYTECODE"])
def test_what_the_user_has_set_for_other_programs_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert name not in Build("here", "", "python", ()).variables(1)


def test_what_is_warned_of_and_how_many_threads_there_are_is_not_the_users_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    variables = Build("here", "", "python", ()).variables(2)
    assert (variables["PYTHONWARNINGS"], variables["OMP_NUM_THREADS"]) == ("ignore", "2")
    assert Build("here", "", "python", ()).variables(0)["OMP_NUM_THREADS"] == "99"
