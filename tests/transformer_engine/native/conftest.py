"""The release that the suite runs on."""

import pytest

from tests.transformer_engine.native import stack


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("overlay").addoption(
        "--release", choices=stack.releases(), default=stack.RELEASE, help=f"of TransformerEngine ({stack.RELEASE})"
    )


@pytest.fixture(scope="session")
def release(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--release"))
