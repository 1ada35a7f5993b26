"""The patched TransformerEngine wheel is taken for its public version where upstream compares versions at import."""

from pathlib import Path

import pytest

from tests.transformer_engine.releases import DELIVERED
from tests.variants import Variant, installed, run

WORKER = Path(__file__).with_name("versions_worker.py")
NO_LIBRARY = "FileNotFoundError: Could not find shared object file for Transformer Engine torch lib."
"""What the framework's check ends with where the versions agree and the native library is not there."""

MISMATCH = "AssertionError: Transformer Engine package version mismatch."


def check(folder: Path, metadata: Variant, code: Variant, core: str, framework: str) -> tuple[str, str]:
    """What the code of one build says with the metadata of another, beside native packages of these versions."""
    for project, version in (("transformer_engine_cu13", core), ("transformer_engine_torch", framework)):
        info = folder / f"{project}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n", "utf-8")
    found = run(WORKER, installed(code) / "transformer_engine" / "common" / "__init__.py", folder, variant=metadata)
    return found["package"], found["framework"]


def builds(release: str) -> tuple[Variant, Variant]:
    return Variant("stock", release, "transformer_engine"), Variant("patched", release, "transformer_engine")


def other(release: str) -> str:
    """A release whose native packages do not belong to this one."""
    return "2.14.0" if release == "2.13.0" else "2.13.0"


@pytest.mark.parametrize("release", DELIVERED)
def test_the_patched_wheel_goes_with_the_native_packages_of_its_release(tmp_path: Path, release: str) -> None:
    _, patched = builds(release)
    assert check(tmp_path, patched, patched, release, release) == ("passed", NO_LIBRARY)


@pytest.mark.parametrize("release", DELIVERED)
@pytest.mark.parametrize(("core_fits", "framework_fits"), [(False, True), (True, False), (False, False)])
def test_packages_that_do_not_belong_together_fail_with_upstreams_message(
    tmp_path: Path, release: str, core_fits: bool, framework_fits: bool
) -> None:
    stock, patched = builds(release)
    core, framework = (release if fits else other(release) for fits in (core_fits, framework_fits))
    ours = check(tmp_path, patched, patched, core, framework)
    theirs = check(tmp_path, patched, stock, core, framework)
    assert ours[0] == ("passed" if core_fits else theirs[0])
    assert ours[1] == theirs[1]
    assert ours[1].startswith(MISMATCH)
    assert f"v{other(release)}" in ours[1]


@pytest.mark.parametrize("release", DELIVERED)
def test_stock_refuses_a_local_version(tmp_path: Path, release: str) -> None:
    stock, patched = builds(release)
    assert check(tmp_path, stock, stock, release, release) == ("passed", NO_LIBRARY)
    for said in check(tmp_path, patched, stock, release, release):
        assert said.startswith(MISMATCH)
        assert "+overlay." in said
