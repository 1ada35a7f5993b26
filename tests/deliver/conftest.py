"""The sample upstream, made once a session and copied for each test."""

from pathlib import Path

import pytest

from tests.sample import Sample, copy, make


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make(tmp_path_factory.mktemp("template"))


@pytest.fixture
def sample(template: Sample, tmp_path: Path) -> Sample:
    return copy(template, tmp_path / "sample")
