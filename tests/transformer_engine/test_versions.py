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
    return Variant("stock", release, "transformer_engine"), Variant("patched", release, "transformer_engine", "wheel")


def others(release: str) -> list[str]:
    """Versions of native packages that do not belong to a release, however near: of another build, too."""
    near = ["2.13.0", "2.14.0", "2.14.1", f"{release}.post1", f"{release}+built.here"]
    return [version for version in near if version != release]


@pytest.mark.parametrize("release", DELIVERED)
def test_the_patched_wheel_goes_with_the_native_packages_of_its_release(tmp_path: Path, release: str) -> None:
    _, patched = builds(release)
    assert check(tmp_path, patched, patched, release, release) == ("passed", NO_LIBRARY)


@pytest.mark.parametrize(("release", "other"), [(release, other) for release in DELIVERED for other in others(release)])
@pytest.mark.parametrize(("core_fits", "framework_fits"), [(False, True), (True, False), (False, False)])
def test_packages_that_do_not_belong_together_fail_with_upstreams_message(
    tmp_path: Path, release: str, other: str, core_fits: bool, framework_fits: bool
) -> None:
    stock, patched = builds(release)
    core, framework = (release if fits else other for fits in (core_fits, framework_fits))
    ours = check(tmp_path, patched, patched, core, framework)
    theirs = check(tmp_path, patched, stock, core, framework)
    assert ours[0] == ("passed" if core_fits else theirs[0])
    assert ours[1] == theirs[1]
    assert ours[1].startswith(MISMATCH)
    assert f"v{other}" in ours[1]


@pytest.mark.parametrize("label", ["+overlay.2", "+built.here", "+built.here.overlay.g0123abc"])
def test_a_label_of_somebody_elses_has_to_be_the_same(tmp_path: Path, label: str) -> None:
    """As `apply --from-git` writes it, after one that the checkout has."""
    _, patched = builds(DELIVERED[0])
    native = DELIVERED[0] + label.partition("overlay.")[0].rstrip("+.")
    metadata = tmp_path / "metadata"
    info = metadata / f"transformer_engine-{DELIVERED[0]}{label}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {DELIVERED[0]}{label}\n", "utf-8"
    )
    (info / "WHEEL").write_text("Root-Is-Purelib: true\n", "utf-8")
    (info / "RECORD").write_text(f"{info.name}/WHEEL,,\n", "utf-8")
    assert check(metadata, patched, patched, native, native) == ("passed", NO_LIBRARY)


@pytest.mark.parametrize("release", DELIVERED)
def test_stock_refuses_a_local_version(tmp_path: Path, release: str) -> None:
    stock, patched = builds(release)
    assert check(tmp_path, stock, stock, release, release) == ("passed", NO_LIBRARY)
    for said in check(tmp_path, patched, stock, release, release):
        assert said.startswith(MISMATCH)
        assert "+overlay." in said
