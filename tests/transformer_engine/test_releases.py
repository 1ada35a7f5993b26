"""Every release of TransformerEngine with the fault is delivered, and its native packages are pinned for tests."""

import pytest

from tests.transformer_engine.releases import DELIVERED, MENDED, PACKAGE


def test_every_release_from_2_10_to_the_fix_is_delivered() -> None:
    assert {"2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.14.1", "2.15.0"} == set(DELIVERED)
    assert MENDED not in DELIVERED


def test_2_13_0_is_the_active_one_in_the_constraints() -> None:
    assert DELIVERED[0] == "2.13.0"


@pytest.mark.parametrize("release", [*DELIVERED, MENDED])
def test_the_native_packages_are_pinned(release: str) -> None:
    core = PACKAGE.companion("transformer_engine_cu13", release)
    assert {wheel.file.rpartition("_2_28_")[2] for wheel in core.wheels} == {"x86_64.whl", "aarch64.whl"}
    assert PACKAGE.companion("transformer_engine_torch", release).sdist is not None
