"""A virtual environment with a stock package and the overlay in it."""

from pathlib import Path

import pytest

from tests.runtime import sites


@pytest.fixture
def site(tmp_path: Path) -> sites.Site:
    """Stock, and the overlay with its `.pth` file."""
    made = sites.make(tmp_path / "venv")
    made.install({sites.COVERED: sites.STOCK})
    made.install_overlay()
    return made


@pytest.fixture
def quiet(tmp_path: Path) -> sites.Site:
    """Stock, and the overlay without a `.pth` file: it has to be asked for."""
    made = sites.make(tmp_path / "venv")
    made.install({sites.COVERED: sites.STOCK})
    made.install_overlay(pth=False)
    return made
