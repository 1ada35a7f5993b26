"""The patched TransformerEngine wheel is taken for its public version where upstream compares versions at import."""

from pathlib import Path

import pytest

from tests.variants import Variant, installed, run

WORKER = Path(__file__).with_name("versions_worker.py")
STOCK = Variant("stock", "2.13.0", "transformer_engine")
PATCHED = Variant("patched", "2.13.0", "transformer_engine")
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


def test_the_patched_wheel_goes_with_the_native_packages_of_its_release(tmp_path: Path) -> None:
    assert check(tmp_path, PATCHED, PATCHED, "2.13.0", "2.13.0") == ("passed", NO_LIBRARY)


@pytest.mark.parametrize(("core", "framework"), [("2.14.0", "2.13.0"), ("2.13.0", "2.14.0"), ("2.14.0", "2.14.0")])
def test_packages_that_do_not_belong_together_fail_with_upstreams_message(
    tmp_path: Path, core: str, framework: str
) -> None:
    ours = check(tmp_path, PATCHED, PATCHED, core, framework)
    theirs = check(tmp_path, PATCHED, STOCK, core, framework)
    assert ours[0] == (theirs[0] if core != "2.13.0" else "passed")
    assert ours[1] == theirs[1]
    assert ours[1].startswith(MISMATCH)
    assert "v2.14.0" in ours[1]


def test_stock_refuses_a_local_version(tmp_path: Path) -> None:
    assert check(tmp_path, STOCK, STOCK, "2.13.0", "2.13.0") == ("passed", NO_LIBRARY)
    for said in check(tmp_path, PATCHED, STOCK, "2.13.0", "2.13.0"):
        assert said.startswith(MISMATCH)
        assert "+overlay." in said
