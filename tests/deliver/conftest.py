"""The sample upstream, made once a session and copied for each test."""

from pathlib import Path

import pytest

from tests.sample import Sample, copy, make


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.getbasetemp() / "template"
    return Sample(folder) if folder.exists() else make(folder)


@pytest.fixture
def sample(template: Sample, tmp_path: Path) -> Sample:
    return copy(template, tmp_path / "sample")
