"""The overlay wheel: what is in it, that every front end makes the same bytes, and that it installs and goes again."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from installer.sources import WheelFile

import hatch_build
from overlay import __version__, manifest
from overlay.deliver import overlay_wheel, sbom
from overlay.queue import git, lock
from tests import variants
from tests.deliver.test_release_wheels import copied_root
from tests.sample import PRODUCTS, Sample, archive, overlay_wheel_in, record, snapshot, upstream

PINS = lock.read(variants.ROOT / "upstream.lock")
FAULT = "Fault: lost: gradients, without an error\n"


def listed(sample: Sample) -> dict[str, Any]:
    """The manifest that the last run wrote."""
    found: dict[str, Any] = json.loads((sample.patched / "manifest.json").read_bytes())
    return found


def wheel_of(sample: Sample) -> bytes:
    return (sample.out / overlay_wheel_in(sample.out)).read_bytes()


def ran(*command: object, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MODELING_OVERLAY"))}
    return subprocess.run(
        list(map(str, command)), env={**kept, **(variables or {})}, capture_output=True, encoding="utf-8", check=False
    )


def pip_wheel(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """`pip wheel`, with the hatchling of this environment."""
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    return ran(sys.executable, "-m", "pip", "wheel", *options, root)


def test_what_is_in_it(sample: Sample) -> None:
    sample.apply().succeeds()
    name = overlay_wheel_in(sample.out)
    info = f"{name.removesuffix('-py3-none-any.whl')}.dist-info"
    with zipfile.ZipFile(sample.out / name) as wheel:
        WheelFile(wheel).validate_record(validate_contents=True)
        patched = {
            f"overlay/patched/{name}" for name, (kind, _) in (snapshot(sample.patched) or {}).items() if kind == "file"
        } - {f"overlay/patched/{hatch_build.SBOM}"}
        assert set(wheel.namelist()) == {
            "overlay/__init__.py",
            "modeling_overlay.pth",
            "_modeling_overlay/__init__.py",
            *patched,
            *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
            *(f"{info}/licenses/{name}" for name in ("LICENSE", "NOTICE")),
            f"{info}/sboms/{hatch_build.SBOM}",
        }
        for name in patched:
            assert wheel.read(name) == (sample.root / name).read_bytes()
        assert wheel.read("modeling_overlay.pth") == b"import _modeling_overlay\n"
        assert b"Root-Is-Purelib: true\nTag: py3-none-any\n" in wheel.read(f"{info}/WHEEL")
        assert wheel.read(f"{info}/METADATA") == (sample.out / f"{overlay_wheel_in(sample.out)}.metadata").read_bytes()
        assert wheel.read("overlay/patched/demo/LICENSE") == b"Do what you like.\n"
        assert {entry.compress_type for entry in wheel.infolist()} == {zipfile.ZIP_STORED}, (
            "zlib is not always the same"
        )


def test_the_manifest_has_every_pinned_release(sample: Sample) -> None:
    sample.apply().succeeds()
    found = listed(sample)
    assert (found["format"], found["complete"], found["right"]) == (manifest.FORMAT, True, {})
    assert [(one["project"], one["version"], one["series"]) for one in found["releases"]] == [
        ("demo", "1.0", "demo-1.0-1.1"),
        ("demo", "2.0", "demo-2.0"),
        ("plain", "3.0", "plain-3.0"),
        ("demo", "1.1", "demo-1.0-1.1"),
    ]
    pins = lock.read(sample.lock)
    for one in found["releases"]:
        release = pins.find(f"{one['project']}=={one['version']}")[2]
        expected = {
            file.path: (file.before, file.after) for file in release.files if not file.path.endswith("/__init__.py")
        }
        assert {file["path"]: (file["before"], file["after"]) for file in one["files"]} == expected
        for file in one["files"]:
            assert git.blob_id((sample.patched / file["image"]).read_bytes()) == file["after"]
            assert git.blob_id(upstream(one["project"], one["version"])[file["path"]]) == file["before"]


def test_a_post_image_of_several_releases_is_stored_once(sample: Sample) -> None:
    sample.apply().succeeds()
    images = {
        one["version"]: {file["path"]: file["image"] for file in one["files"]} for one in listed(sample)["releases"]
    }
    assert images["1.1"] == {
        "demo/core.py": "demo/1.1/demo/core.py",  # not the same as in 1.0
        "demo/layers/block.py": "demo/1.0/demo/layers/block.py",
    }
    assert sorted(path.name for path in (sample.patched / "demo" / "1.1").rglob("*.py")) == ["core.py"]


def test_a_licence_that_is_not_the_same_is_kept_beside_its_release(sample: Sample) -> None:
    """It lies where setuptools put it before PEP 639."""
    with zipfile.ZipFile(sample.wheel("demo-1.1")) as stock:
        members = {name: stock.read(name) for name in stock.namelist()}
    name = "demo-1.1.dist-info"
    members[f"{name}/LICENSE"] = b"Do what I like.\n"
    for gone in ("licenses/LICENSE", "RECORD"):
        del members[f"{name}/{gone}"]
    sample.offer(archive(members | {f"{name}/RECORD": record(members, name)}), "demo-1.1")
    sample.apply().succeeds()
    assert (sample.patched / "demo" / "LICENSE").read_bytes() == b"Do what you like.\n"
    assert (sample.patched / "demo" / "1.1" / "LICENSE").read_bytes() == b"Do what I like.\n"
    assert not (sample.patched / "demo" / "2.0" / "LICENSE").exists()


def test_faults_are_those_of_the_patches_that_the_overlay_takes(sample: Sample) -> None:
    sample.rewrite(1, "Bug: https", f"{FAULT}Bug: https")
    sample.rewrite(3, "Bug: https", "Fault: untested: nobody sees it\nBug: https")
    sample.overlay("lock", "update").succeeds()
    sample.apply().succeeds()
    faults = {f"{one['project']} {one['version']}": one["faults"] for one in listed(sample)["releases"]}
    lost = [{"code": "lost", "text": "gradients, without an error"}]
    assert faults == {"demo 1.0": lost, "demo 1.1": lost, "demo 2.0": [], "plain 3.0": []}


def test_what_upstream_has_mended_is_named(sample: Sample) -> None:
    for version, blob in (("3.1", "1" * 40), ("3.2", "2" * 40)):
        files = f'files = [{{path = "plain/core.py", blob = "{blob}"}}]'
        row = f'\n[[packages.plain.fixed]]\nversion = "{version}"\n{files}\n'
        sample.lock.write_text(sample.lock.read_text() + row)
    sample.apply().succeeds()
    assert listed(sample)["right"] == {"plain/core.py": {"1" * 40: "3.1", "2" * 40: "3.2"}}


def test_patches_that_leave_the_overlay_out(sample: Sample) -> None:
    sample.rewrite(1, "Delivery: wheel, overlay, pull-request", f"{FAULT}Delivery: wheel", series="plain-3.0")
    sample.rewrite(2, "Delivery: wheel, overlay", "Delivery: wheel", series="plain-3.0")
    sample.overlay("lock", "update").succeeds()
    sample.apply().succeeds()
    (plain,) = (one for one in listed(sample)["releases"] if one["project"] == "plain")
    assert (plain["files"], plain["faults"]) == ([], [])
    assert not (sample.patched / "plain").exists()
    assert "plain-3.0+overlay.2-py3-none-any.whl" in (snapshot(sample.out) or {}), "its wheel has them"


def test_two_series_that_make_different_things_of_one_file(sample: Sample) -> None:
    patches = sample.root / "patches"
    shutil.copytree(patches / "demo-1.0-1.1", patches / "demo-1.1")
    sample.rewrite(2, "+    return value * 7", "+    return value * 8", series="demo-1.1")
    sample.edit('use = "test"\nseries = "demo-1.0-1.1"', 'use = "test"\nseries = "demo-1.1"')
    sample.overlay("lock", "update", "demo==1.1").succeeds()
    before = git.blob_id(upstream("demo", "1.0")["demo/layers/block.py"])
    sample.apply().fails(
        f"demo/layers/block.py: expected one post-image of the blob {before}, found", "in demo 1.0 and", "in demo 1.1"
    )
    assert not sample.out.exists()
    assert not sample.patched.exists()


def test_a_test_release_that_is_not_as_the_lock_says(sample: Sample) -> None:
    release = lock.read(sample.lock).find("demo==1.1")[2]
    after = next(file.after for file in release.files if file.path == "demo/core.py")
    sample.edit(after, "0" * 40)
    sample.apply().fails("demo 1.1: demo/core.py: expected the blob 0000000000", "run overlay lock update")
    assert not sample.out.exists()


def test_none_is_built_of_named_releases(sample: Sample) -> None:
    sample.apply().succeeds()
    done = sample.apply("demo==1.0").succeeds()
    assert "overlay: no overlay wheel is built: it has all pinned releases, " in done.stderr
    assert sorted(sample.out.glob("*overlay*.whl")) == [sample.out / PRODUCTS[0]]
    assert "modeling-overlay" not in (sample.out / "constraints.txt").read_text()
    found = listed(sample)
    assert (found["complete"], [one["version"] for one in found["releases"]]) == (False, ["1.0"])


def test_a_wheel_of_another_version_is_ours_and_an_sdist_is_not(sample: Sample) -> None:
    sample.out.mkdir(parents=True)
    for name in ("modeling_overlay-0.0.1-py3-none-any.whl", "modeling_overlay-0.0.1.tar.gz"):
        (sample.out / name).write_text("of python -m build")
    sample.apply().succeeds()
    assert {file.name for file in sample.out.glob("modeling_overlay*")} == {
        overlay_wheel_in(sample.out),
        f"{overlay_wheel_in(sample.out)}.metadata",
        "modeling_overlay-0.0.1.tar.gz",
    }


def test_a_build_reads_what_is_copied_for_it() -> None:
    assert hatch_build.SOURCES == overlay_wheel.SOURCES
    assert hatch_build.SBOM == sbom.FILE


def test_post_images_that_were_changed_or_are_of_another_lock(sample: Sample, tmp_path: Path) -> None:
    sample.apply().succeeds()
    image = sample.patched / "demo/1.0/demo/core.py"
    kept = image.read_bytes()
    image.write_bytes(kept + b"# changed\n")
    done = pip_wheel(sample.root, tmp_path)
    assert f"{image}: expected git blob " in done.stdout + done.stderr
    image.write_bytes(kept)
    text = sample.lock.read_text("utf-8")
    sample.lock.write_text(text.replace(git.blob_id(kept), "0" * 40), encoding="utf-8")
    done = pip_wheel(sample.root, tmp_path)
    assert f"{image}: expected git blob {'0' * 40}" in done.stdout + done.stderr


def test_the_version_says_what_is_in_it(sample: Sample) -> None:
    """So that pip and uv exchange a wheel whose content has changed."""
    sample.apply().succeeds()
    first = overlay_wheel_in(sample.out)
    readme = sample.root / "README.md"
    readme.write_text("# Another text, which is in the metadata\n", encoding="utf-8")
    sample.apply().succeeds()
    second = overlay_wheel_in(sample.out)
    (sample.root / "overlay" / "new.py").touch()
    sample.apply().succeeds()
    assert len({first, second, overlay_wheel_in(sample.out)}) == 3
    (sample.root / "overlay" / "new.py").unlink()
    readme.write_text("# The sample\n", encoding="utf-8")
    sample.apply().succeeds()
    assert overlay_wheel_in(sample.out) == first


def test_files_that_need_no_patch_are_right() -> None:
    """`generic.py` of 5.24.0, whose series leaves it as it is: those of other releases change theirs."""
    path = "transformers/utils/generic.py"
    with zipfile.ZipFile(variants.wheel(variants.LATEST)) as stock:
        blob = git.blob_id(stock.read(path))
    with zipfile.ZipFile(variants.overlay_wheel()) as wheel:
        found = json.loads(wheel.read("overlay/patched/manifest.json"))
    covered = {(one["version"], file["path"]) for one in found["releases"] for file in one["files"]}
    assert ("5.22.2", path) in covered
    assert (variants.LATEST.release, path) not in covered
    assert blob in found["right"][path]


def test_no_whole_checkout(sample: Sample) -> None:
    (sample.root / "pyproject.toml").unlink()
    sample.apply().fails(f"expected pyproject.toml in {sample.root}, found no such file", "a whole checkout")
    assert not sample.out.exists()
    sample.apply("demo==1.0").succeeds()


def test_what_else_lies_in_the_checkout_stays_out(sample: Sample) -> None:
    sample.apply().succeeds()
    before = wheel_of(sample)
    (sample.root / "overlay" / ".cache").mkdir()
    (sample.root / "overlay" / "__pycache__").mkdir()
    for name in (".cache/x.py", "__pycache__/x.pyc", ".x.py.swp"):
        (sample.root / "overlay" / name).write_text("x")
    (sample.patched / "stale.py").write_text("x")
    sample.variables.update({"HATCH_BUILD_NO_HOOKS": "1", "HATCH_BUILD_CLEAN": "1", "SOURCE_DATE_EPOCH": "soon"})
    sample.apply().succeeds()
    assert wheel_of(sample) == before


def test_other_front_ends_make_the_same_bytes(sample: Sample, tmp_path: Path) -> None:
    """`python -m build` goes by an sdist."""
    sample.apply().succeeds()
    done = pip_wheel(sample.root, tmp_path / "pip")
    assert done.returncode == 0, done.stderr
    done = ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "build", sample.root)
    assert done.returncode == 0, done.stderr
    for folder in ("pip", "build"):
        assert (tmp_path / folder / overlay_wheel_in(sample.out)).read_bytes() == wheel_of(sample), folder


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            "with the SBOM taken away",
            "expected {patched}/modeling-overlay.cdx.json, found none: run scripts/apply.sh first",
        ),
        ("before apply", "expected the patched files in {patched}, found none: run scripts/apply.sh first"),
        (
            "after apply of one release",
            "expected the patched files of every pinned release in {patched}, found those of demo 1.0 alone: run "
            "scripts/apply.sh first, without naming releases",
        ),
        (
            "with a file taken away",
            "expected the patched file {patched}/demo/1.0/demo/core.py, found none: run scripts/apply.sh first",
        ),
    ],
)
def test_a_build_without_all_of_them_fails_with_one_line(sample: Sample, tmp_path: Path, state: str, said: str) -> None:
    if state == "after apply of one release":
        sample.apply("demo==1.0").succeeds()
    if state == "with a file taken away":
        sample.apply().succeeds()
        (sample.patched / "demo" / "1.0" / "demo" / "core.py").unlink()
    if state == "with the SBOM taken away":
        sample.apply().succeeds()
        (sample.patched / sbom.FILE).unlink()
    done = pip_wheel(sample.root, tmp_path / "wheels")
    assert done.returncode == 1
    assert "[1 lines of output]" in done.stderr
    assert f"modeling-overlay: {said.format(patched=sample.patched)}\n" in done.stderr
    assert not list((tmp_path / "wheels").glob("*"))


class Environment:
    """A new virtual environment without pip, and an installer to fill it with."""

    def __init__(self, folder: Path, installer: str) -> None:
        self.folder = folder
        self.installer = installer
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (self.packages,) = folder.glob("lib/python3.*/site-packages")

    def manage(self, *arguments: object) -> str:
        """Runs the installer; what it said."""
        python = self.folder / "bin" / "python"
        command = ["pip", "--python", python] if self.installer == "pip" else ["uv", "pip"]
        behind = [] if self.installer == "pip" else ["--python", python]
        done = ran(sys.executable, "-m", *command, *arguments, *behind)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def installed(self) -> set[Path]:
        """Every file and folder that an installer may have put there."""
        return {path for folder in (self.packages, self.folder / "bin") for path in folder.rglob("*")}

    def python(self, code: str, **variables: str) -> str:
        """What a program prints, in a new interpreter of the environment."""
        done = ran(self.folder / "bin" / "python", "-P", "-c", code, variables=variables)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()


@pytest.fixture(params=["pip", "uv"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment", request.param)


def test_it_is_installed_takes_effect_and_leaves_nothing(environment: Environment) -> None:
    products = variants.products()
    (environment.packages / "neighbour.py").touch()
    before = environment.installed()
    constraints = products / "constraints.txt"
    environment.manage("install", "--no-index", "--find-links", products, "-c", constraints, "modeling-overlay")
    assert "overlay" in environment.manage("list")
    environment.manage("check")
    first = "import sys; print(type(sys.meta_path[0]).__module__)"
    assert environment.python(first) == "_modeling_overlay"
    assert environment.python(first, MODELING_OVERLAY="0") != "_modeling_overlay"
    assert environment.python("import overlay.manifest as m; print(len(m.read().releases))") == str(
        sum(release.series is not None for package in PINS.packages.values() for release in package.releases)
    )
    assert (
        environment.python("import compileall, overlay; print(compileall.compile_dir(overlay.__path__[0], quiet=1))")
        == "True"
    )
    assert list(environment.packages.glob("overlay/patched/transformers/5.14.1/transformers/__pycache__/*.pyc"))
    assert ran(environment.folder / "bin" / "overlay", "--version").stdout == f"modeling-overlay {__version__}\n"
    environment.manage("uninstall", *(["--yes"] if environment.installer == "pip" else []), "modeling-overlay")
    assert environment.installed() == before
    assert environment.python(first) != "_modeling_overlay"


def test_installer_takes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "installer", "--no-compile-bytecode", "--validate-record", "all", "--destdir"]
    subprocess.run([*command, str(tmp_path), str(variants.overlay_wheel())], check=True)
    assert len(list(tmp_path.rglob("modeling_overlay.pth"))) == 1


def test_the_post_images_are_those_of_the_patched_wheels() -> None:
    """A post-image is made once: so the tests of a release need not be run on both."""
    with zipfile.ZipFile(variants.overlay_wheel()) as wheel:
        found = json.loads(wheel.read("overlay/patched/manifest.json"))
        for one in found["releases"]:
            release = PINS.find(f"{one['project']}=={one['version']}")[2]
            if release.built is not None:
                with zipfile.ZipFile(variants.products() / release.built.file) as patched:
                    for file in one["files"]:
                        assert wheel.read(f"overlay/patched/{file['image']}") == patched.read(file["path"])
            for file in one["files"]:
                assert manifest.NOTICE in wheel.read(f"overlay/patched/{file['image']}")
    named = [fault["code"] for one in found["releases"] for fault in one["faults"]]
    assert all(one["faults"] for one in found["releases"]), named
    assert found["complete"]


def test_an_editable_installation_needs_no_patched_files(tmp_path: Path) -> None:
    """As in a fresh clone, by pip alone: it has no `.pth` file of ours, and activates nothing."""
    root = copied_root(tmp_path)
    environment = Environment(tmp_path / "environment", "pip")
    environment.manage("install", "--quiet", "--no-deps", "--editable", root)
    assert environment.python("import overlay; print(overlay.__file__)") == str(root / "overlay" / "__init__.py")
    assert not (environment.packages / "modeling_overlay.pth").exists()
    assert environment.python("import sys; print('_modeling_overlay' in sys.modules)") == "False"
