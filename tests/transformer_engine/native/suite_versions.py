"""The patched wheel beside the unpatched native packages: as upstream's checks see it, and as installers leave it.

The wheels of the native library hold a copy of all of TransformerEngine's Python code: which of the two is in place
depends on what was installed last.
"""

from pathlib import Path
from typing import Any

import pytest

from overlay.queue import lock
from tests.transformer_engine.native import stack
from tests.transformer_engine.native.installers import CHECKS, FUSER, Environment, Wheels
from tests.variants import ROOT, run_worker

WORKER = Path(__file__).with_name("import_worker.py")
NATIVE = ["transformer_engine_cu13", "transformer_engine_torch"]
MISMATCH = "AssertionError: Transformer Engine package version mismatch. Found"
STOCK_FUSER = "RuntimeError: Found a stock fuser.py"
RAISED = "you can only change requires_grad flags of leaf variables"


def pinned(release: str) -> lock.Release:
    return next(
        one for one in lock.read(ROOT / "upstream.lock").packages[stack.PROJECT].releases if one.version == release
    )


def label(release: str) -> str:
    """The version of the patched wheel."""
    return pinned(release).local_version


def is_patched(found: Any, release: str) -> bool:
    """Whether the patched code is in place and works."""
    return (
        "error" not in found
        and found["blobs"] == {file.path: file.after for file in pinned(release).files}
        and found["version"] == found["versions"][stack.PROJECT] == label(release)
        and found["operation"] == "handed on"
    )


def is_stock(found: Any, release: str) -> bool:
    return (
        "error" not in found
        and found["blobs"] == {file.path: file.before for file in pinned(release).files}
        and found["version"] == found["versions"][stack.PROJECT] == release
        and found["operation"].startswith(RAISED)
    )


def other(release: str) -> str:
    """A release whose wheel does not go with the native packages of this one."""
    return "2.14.0" if release != "2.14.0" else "2.13.0"


def test_the_patched_wheel_is_imported_beside_the_unpatched_native_packages(release: str) -> None:
    found = stack.run(WORKER, variant=stack.patched(release))
    assert is_patched(found, release), found
    assert {found["versions"][project] for project in NATIVE} == {release}
    # The environment's native library and the extension have files of the same names
    folder = stack.installed(stack.patched(release))
    assert len(found["files"]) > 50
    assert [file for file in found["files"].values() if not Path(file).is_relative_to(folder)] == []


def test_a_wheel_of_another_release_fails_with_upstreams_message(release: str) -> None:
    builds = stack.stock(other(release)), stack.patched(other(release))
    theirs, ours = (stack.run(WORKER, variant=build, native=release)["error"] for build in builds)
    assert theirs.startswith(f"{MISMATCH} transformer-engine v{other(release)} and transformer-engine-cu13 v{release}")
    assert ours == theirs.replace(f"v{other(release)}", f"v{label(other(release))}")


def test_an_extension_of_another_release_fails_with_upstreams_message(release: str, tmp_path: Path) -> None:
    info = tmp_path / f"transformer_engine_torch-{other(release)}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: {other(release)}\n"
    )
    theirs, ours = (
        run_worker(
            WORKER,
            on=str(build),
            interpreter=stack.interpreter(release),
            laid_over=[tmp_path, stack.installed(build)],
            variables=stack.variables(release),
        )["error"]
        for build in (stack.stock(release), stack.patched(release))
    )
    assert theirs.startswith(f"{MISMATCH} transformer_engine_torch v{other(release)}, transformer-engine v{release},")
    assert ours == theirs.replace(f"transformer-engine v{release}", f"transformer-engine v{label(release)}")


def mismatch(found: Any, release: str) -> bool:
    """Whether the import ended with upstream's own check, which takes the label for another version."""
    said = f"{MISMATCH} transformer-engine v{label(release)} and transformer-engine-cu13 v{release}."
    return bool(found.get("error") == said)


def blobs(release: str, fuser: str, checks: str) -> dict[str, str]:
    """The ids of the two patched files, each as it is in the `stock` or in the `patched` wheel."""
    ids = {file.path: {"stock": file.before, "patched": file.after} for file in pinned(release).files}
    return {FUSER: ids[FUSER][fuser], CHECKS: ids[CHECKS][checks]}


@pytest.fixture(scope="module")
def wheels(release: str, tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return Wheels(tmp_path_factory.mktemp("wheels"), release)


@pytest.fixture
def bare(tmp_path: Path, wheels: Wheels) -> Environment:
    """With nothing to import beside TransformerEngine: enough for its version checks, which come first."""
    return Environment(tmp_path / "environment", wheels, wheels.described)


@pytest.fixture
def environment(tmp_path: Path, wheels: Wheels) -> Environment:
    """Where users start: with stock TransformerEngine and all that it needs."""
    made = Environment(tmp_path / "environment", wheels, wheels.linked)
    made.install_stock()
    return made


def test_pip_in_the_place_of_stock_and_back(environment: Environment, release: str) -> None:
    environment.install("pip", stack.PROJECT)
    found = environment.run(WORKER)
    assert is_patched(found, release), found
    assert environment.complaints() == []
    environment.install("pip", f"{stack.PROJECT}==={release}", constraints=False)
    found = environment.run(WORKER)
    assert is_stock(found, release), found
    assert environment.complaints() == []


def test_uv_in_the_place_of_stock_and_back(bare: Environment, release: str) -> None:
    bare.install_stock()
    bare.install("uv", stack.PROJECT)
    assert bare.blobs() == blobs(release, "patched", "patched")
    assert bare.complaints() == []
    bare.install("uv", f"{stack.PROJECT}==={release}", constraints=False)
    assert bare.blobs() == blobs(release, "stock", "stock")
    assert bare.complaints() == []


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_native_packages_that_are_installed_again_fail_until_the_patched_wheel_is_too(
    bare: Environment, release: str, installer: str
) -> None:
    again = {"pip": "--force-reinstall", "uv": "--reinstall"}[installer]
    bare.install_stock()
    bare.install(installer, stack.PROJECT)
    bare.install(installer, again, "--no-deps", "transformer_engine_cu13")
    assert bare.blobs() == blobs(release, "stock", "stock")
    assert mismatch(bare.run(WORKER), release)
    bare.install(installer, again, "--no-deps", stack.PROJECT)
    assert bare.blobs() == blobs(release, "patched", "patched")
    assert bare.complaints() == []


ORDERS = [[stack.PROJECT, *NATIVE], [*NATIVE, stack.PROJECT]]


@pytest.mark.parametrize("requirements", [[f"{stack.PROJECT}[pytorch]"], *ORDERS], ids=" ".join)
def test_pip_with_everything_at_once_leaves_stock_code_which_fails(
    bare: Environment, release: str, requirements: list[str]
) -> None:
    """What requires nothing is installed first: the patched wheel, before the native library."""
    bare.install("pip", *requirements)
    assert bare.blobs() == blobs(release, "stock", "stock")
    assert mismatch(bare.run(WORKER), release)
    assert bare.complaints() == []


@pytest.mark.parametrize("requirements", ORDERS, ids=" ".join)
def test_pip_with_everything_at_once_and_no_dependencies(
    bare: Environment, release: str, requirements: list[str]
) -> None:
    """By name, from the last to the first."""
    bare.install("pip", "--no-deps", *requirements)
    assert bare.blobs() == blobs(release, "patched", "patched")


def test_one_stock_file_beside_a_patched_one_fails(bare: Environment, release: str) -> None:
    """uv installs several wheels at the same time: of each file that is in two of them, either may stay."""
    bare.install_stock()
    stock = {file: bare.packages.joinpath(file).read_bytes() for file in (FUSER, CHECKS)}
    bare.install("pip", stack.PROJECT)
    patched = bare.packages.joinpath(FUSER).read_bytes()
    bare.packages.joinpath(FUSER).write_bytes(stock[FUSER])
    assert bare.blobs() == blobs(release, "stock", "patched")
    assert bare.run(WORKER)["error"].startswith(STOCK_FUSER)
    bare.packages.joinpath(FUSER).write_bytes(patched)
    bare.packages.joinpath(CHECKS).write_bytes(stock[CHECKS])
    assert bare.blobs() == blobs(release, "patched", "stock")
    assert mismatch(bare.run(WORKER), release)


@pytest.mark.parametrize("requirements", ORDERS, ids=" ".join)
def test_uv_with_everything_at_once_leaves_no_stock_code_in_use(
    bare: Environment, release: str, requirements: list[str]
) -> None:
    bare.install("uv", "--no-deps", *requirements)
    if bare.blobs() != blobs(release, "patched", "patched"):
        found = bare.run(WORKER)
        assert mismatch(found, release) or found["error"].startswith(STOCK_FUSER), found
