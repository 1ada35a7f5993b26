"""`overlay.status()` and `overlay doctor`: the state of a package in a process, and that each mend mends it."""

import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import termios
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import overlay
from overlay import doctor, manifest, mends, versions
from overlay.packages import FileState, PackageStatus, State
from overlay.queue import lock, source
from tests import variants
from tests.runtime import sites
from tests.runtime.sites import Site

LAYERS, GENERIC = "transformers/modeling_layers.py", "transformers/utils/generic.py"
FUSER = "transformer_engine/pytorch/ops/fuser.py"
RELEASES = {
    "transformers": {"5.0.0": [LAYERS, GENERIC], "5.14.1": [LAYERS, GENERIC], "5.24.0": [LAYERS]},
    "transformer_engine": {"2.12.0": [FUSER], "2.13.0": [FUSER]},
}
RIGHT = {GENERIC: "5.24.0", FUSER: "2.16.0"}


def stock(path: str, version: str) -> bytes:
    return f"WHERE = {path!r}\n\n\ndef told():\n    return 'stock {version}'\n".encode()


def patched(path: str, version: str) -> bytes:
    return manifest.NOTICE + b"told.\n" + stock(path, version).replace(b"stock", b"patched")


def right(path: str) -> bytes:
    return stock(path, "fixed")


def release(project: str, version: str) -> dict[str, bytes]:
    """The files of a stock release."""
    return {path: stock(path, version) for path in RELEASES[project][version]}


T5141 = release("transformers", "5.14.1")
T5240 = release("transformers", "5.24.0") | {GENERIC: right(GENERIC)}


def listing(folder: Path) -> None:
    """Post-images of the releases, and the manifest over them."""
    releases = []
    for project, named in RELEASES.items():
        for version, paths in named.items():
            files = []
            for path in paths:
                image = folder / project / version / path
                image.parent.mkdir(parents=True, exist_ok=True)
                image.write_bytes(patched(path, version))
                before, after = (manifest.blob_id(made(path, version)) for made in (stock, patched))
                files.append({"path": path, "before": before, "after": after, "image": f"{project}/{version}/{path}"})
            faults = [{"code": f"{project}-fault", "text": f"{project} {version} says stock"}]
            releases.append({"project": project, "version": version, "series": "s", "faults": faults, "files": files})
    known = {path: {manifest.blob_id(right(path)): version} for path, version in RIGHT.items()}
    content = {"format": manifest.FORMAT, "complete": True, "releases": releases, "right": known}
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def install_overlay(site: Site, where: Path | None = None, *, pth: bool = True) -> Path:
    place = site.install_overlay(where, pth=pth)
    shutil.rmtree(place / "overlay" / "patched")
    listing(place / "overlay" / "patched")
    return place


def put(site: Site, files: Mapping[str, bytes], version: str | None = None, where: Path | None = None) -> Path:
    """Installs the files of a package, with metadata if a version is given."""
    place = site.install(files, where)
    if version is not None:
        label(place, next(iter(files)).partition("/")[0], version)
    return place


def label(place: Path, project: str, version: str, **files: str) -> None:
    folder = place / f"{project}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n", **files}
    for name, text in content.items():
        (folder / name).write_text(text, encoding="utf-8")


def wheel(folder: Path, project: str, version: str, files: Mapping[str, bytes]) -> Path:
    """A wheel that pip installs."""
    info = f"{project}-{version}.dist-info"
    content = {
        **{f"{parent}/__init__.py": b"" for path in files for parent in Path(path).parents[:-1]},
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={digest}", len(data)])
    rows.writerow([f"{info}/RECORD", "", ""])
    folder.mkdir(exist_ok=True)
    file = folder / f"{project}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", record.getvalue())
    return file


@pytest.fixture
def venv(tmp_path: Path) -> Site:
    """An environment with the overlay, `.pth` file and all, and nothing else."""
    made = sites.make(tmp_path / "venv")
    install_overlay(made)
    return made


@pytest.fixture
def asked(tmp_path: Path) -> Site:
    """One with the overlay on PYTHONPATH, where it has to be asked for."""
    made = sites.make(tmp_path / "venv")
    place = tmp_path / "target"
    place.mkdir()
    install_overlay(made, place)
    made.variables["PYTHONPATH"] = str(place)
    return made


Report = dict[str, Any]


def report(site: Site, *options: str) -> Report:
    """What `overlay doctor --json` says; the exit code has to fit."""
    done = site.command("-m", "overlay", "doctor", "--json", options=options)
    assert done.said == ""
    found: Report = json.loads(done.out)
    assert done.code == int(found["live"])
    return found


def one(found: Report | list[Any], project: str = "transformers") -> Report:
    packages = found["packages"] if isinstance(found, dict) else found
    (package,) = [item for item in packages if item["project"] == project]
    assert isinstance(package, dict)
    return package


def states(package: Report) -> dict[str, str]:
    return {file["path"]: file["state"] for file in package["files"]}


STATUS = "import dataclasses, json, overlay; print(json.dumps([dataclasses.asdict(p) for p in overlay.status()]))"


def status(site: Site, before: str = "", project: str = "transformers") -> Report:
    """What `overlay.status()` says of a package in a process that has run `before`."""
    done = site.run(f"{before}\n{STATUS}")
    assert done.code == 0, done.said
    return one(json.loads(done.out), project)


IMPORTED = "import transformers.modeling_layers, transformers.utils.generic"


# ---- each state


def test_nothing_is_installed(venv: Site) -> None:
    found = report(venv)
    assert [(package["project"], package["state"]) for package in found["packages"]] == [
        ("transformers", "not installed"),
        ("transformer_engine", "not installed"),
    ]
    done = venv.command("-m", "overlay", "doctor")
    assert done.code == 0
    assert "if you train with another, run that one: PYTHON -m overlay doctor" in " ".join(done.out.split())


def test_overlaid(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    package = one(report(venv))
    assert package == {
        "project": "transformers",
        "version": "5.14.1",
        "location": str(venv.packages / "transformers"),
        "state": "overlaid",
        "files": [
            {"path": path, "blob": manifest.blob_id(content), "state": "overlaid"} for path, content in T5141.items()
        ],
        "faults": [],
        "mend": None,
        "notes": [],
    }
    after = status(venv, IMPORTED)
    assert after["state"] == "overlaid"
    assert [file["blob"] for file in after["files"]] == [manifest.blob_id(patched(path, "5.14.1")) for path in T5141]


def test_looking_changes_nothing(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    code = "import sys; before = list(sys.meta_path); import overlay; overlay.status(); "
    venv.run(code + "print(before == sys.meta_path, {'transformers', 'torch'} & set(sys.modules))").says("True set()")


def test_stock(asked: Site) -> None:
    put(asked, T5141, "5.14.1")
    found = report(asked)
    package = one(found)
    assert (package["state"], package["mend"]) == ("stock", mends.CALL)
    assert package["faults"] == [{"code": "transformers-fault", "text": "transformers 5.14.1 says stock"}]
    assert not found["overlay"]["active"]
    assert "which is no site-packages folder" in found["overlay"]["how"]


@pytest.mark.parametrize("place", ["venv", "asked"])
def test_patched_wheel(place: str, request: pytest.FixtureRequest) -> None:
    site = request.getfixturevalue(place)
    put(site, {path: patched(path, "5.14.1") for path in T5141}, "5.14.1+overlay.2")
    package = one(report(site))
    assert (package["state"], package["version"], package["notes"]) == ("patched wheel", "5.14.1+overlay.2", [])


def test_another_revision_of_a_patched_wheel(venv: Site) -> None:
    put(venv, {path: patched(path, "5.14.1") + b"\n" for path in T5141}, "5.14.1+overlay.1")
    package = one(report(venv))
    assert (package["state"], package["faults"]) == ("patched wheel", [])
    assert package["notes"] == ["patched by another revision than this overlay has"]


@pytest.mark.parametrize("place", ["venv", "asked"])
def test_fixed_upstream(place: str, request: pytest.FixtureRequest) -> None:
    site = request.getfixturevalue(place)
    put(site, {FUSER: right(FUSER)}, "2.16.0")
    assert one(report(site), "transformer_engine")["state"] == "fixed upstream"


def test_a_file_that_is_right_beside_one_that_is_not(asked: Site) -> None:
    put(asked, T5240, "5.24.0")
    assert one(report(asked))["state"] == "stock"
    package = status(asked, mends.CALL)
    assert (package["state"], states(package)) == ("overlaid", {LAYERS: "overlaid", GENERIC: "fixed upstream"})


def test_off(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    venv.variables["MODELING_OVERLAY"] = "0"
    for package in (one(report(venv)), status(venv, IMPORTED)):
        assert (package["state"], package["mend"]) == ("off", "unset MODELING_OVERLAY")
        assert package["faults"]


def test_off_and_not_installed(asked: Site) -> None:
    put(asked, T5141, "5.14.1")
    asked.variables["MODELING_OVERLAY"] = "0"
    found = report(asked)
    assert (one(found)["state"], one(found)["mend"]) == ("stock", "unset MODELING_OVERLAY")
    del asked.variables["MODELING_OVERLAY"]
    assert one(report(asked))["mend"] == mends.CALL


def test_unknown(venv: Site) -> None:
    put(venv, {path: content + b"# changed\n" for path, content in T5141.items()}, "5.14.1")
    found = report(venv)
    package = one(found)
    assert package["state"] == "unknown"
    assert package["faults"] == [
        {"code": "transformers-fault", "text": "likely, by its version: transformers 5.14.1 says stock"}
    ]
    assert shlex.split(package["mend"])[-3:] == ["--force-reinstall", "--no-deps", "transformers==5.14.1"]


@pytest.mark.parametrize(
    ("project", "version", "nearest"),
    [
        ("transformers", "4.57.0", "5.0.0"),
        ("transformers", "4.53.0", "5.0.0"),
        ("transformers", "5.0.0rc1", "5.0.0"),
        ("transformers", "5.13.1", "5.0.0"),
        ("transformers", "5.15.0.dev0", "5.14.1"),
        ("transformers", "5.30.0", "5.24.0"),
        ("transformer_engine", "2.10.0", "2.12.0"),
        ("transformer_engine", "2.11.0", "2.12.0"),
    ],
)
def test_releases_that_are_not_covered(venv: Site, project: str, version: str, nearest: str) -> None:
    files = dict.fromkeys([LAYERS, GENERIC] if project == "transformers" else [FUSER], b"unknown\n")
    put(venv, files, version)
    package = one(report(venv), project)
    assert package["state"] == "unknown"
    assert package["mend"].endswith(f" install {project}=={nearest}")
    hint = f"to cover this one, if a series fits it: overlay add-release {project}=={version}, in a checkout"
    assert (hint in package["notes"]) == version.replace(".", "").isdigit()
    assert [fault["text"].startswith("likely, by its version") for fault in package["faults"]] == [True]


@pytest.mark.parametrize(("project", "version"), [("transformers", "4.52.0"), ("transformer_engine", "2.9.0")])
def test_releases_before_the_fault(venv: Site, project: str, version: str) -> None:
    put(venv, {LAYERS if project == "transformers" else FUSER: b"unknown\n"}, version)
    package = one(report(venv), project)
    assert (package["state"], package["faults"], package["mend"]) == ("unknown", [], None)
    assert "whether it has the fault is not known" in package["notes"][0]


def test_a_release_without_the_covered_files(venv: Site) -> None:
    put(venv, {"transformers/trainer.py": b""}, "4.40.0")
    package = one(report(venv))
    assert (package["state"], set(states(package).values()), package["faults"]) == ("unknown", {"missing"}, [])


def test_a_later_release_than_the_one_that_upstream_fixed(venv: Site) -> None:
    put(venv, {FUSER: b"unknown\n"}, "2.22.0")
    package = one(report(venv), "transformer_engine")
    assert (package["state"], package["faults"]) == ("unknown", [])
    assert package["notes"] == [f"{FUSER}: by its version it is fixed upstream, but its content is not known"]
    assert "not all of the content is known" in venv.command("-m", "overlay", "doctor").out


@pytest.mark.parametrize("version", [None, "a fork"])
def test_unknown_content_without_a_version(venv: Site, version: str | None) -> None:
    put(venv, {LAYERS: b"unknown\n"}, version)
    package = one(report(venv))
    assert (package["state"], len(package["faults"])) == ("unknown", 1)


def test_partly_patched(venv: Site) -> None:
    put(venv, T5141 | {GENERIC: b"unknown\n"}, "5.14.1")
    package = one(report(venv))
    assert (package["state"], states(package)) == ("partly patched", {LAYERS: "overlaid", GENERIC: "unknown"})
    assert f"{LAYERS} overlaid, {GENERIC} unknown" in package["notes"]
    assert package["faults"]


def test_stock_files_over_a_patched_wheel(asked: Site) -> None:
    """As an installer leaves them that unpacks a second copy later."""
    put(asked, release("transformer_engine", "2.13.0"), "2.13.0+overlay.2")
    package = one(report(asked), "transformer_engine")
    assert package["state"] == "stock"
    assert any("stock files lie over it: 2.13.0+overlay.2" in note for note in package["notes"])


# ---- where a package is


@pytest.mark.parametrize("version", ["2.13.0+4a1b2c3", "2.13.0.dev0", None])
def test_a_build_with_another_label_is_known_by_its_content(venv: Site, version: str | None) -> None:
    put(venv, release("transformer_engine", "2.13.0"), version)
    package = one(report(venv), "transformer_engine")
    assert (package["state"], package["version"]) == ("overlaid", version)


def test_content_of_another_release_than_the_metadata_says(venv: Site) -> None:
    put(venv, T5141, "5.2.0")
    package = one(report(venv))
    assert (package["state"], package["notes"]) == ("overlaid", ["its covered files are those of 5.14.1"])


def test_metadata_without_a_package(venv: Site) -> None:
    label(venv.packages, "transformers", "5.14.1")
    package = one(report(venv))
    assert package["state"] == "not installed"
    assert package["notes"] == [f"there is metadata of 5.14.1 in {venv.packages}, but no package"]


def test_a_folder_without_init(venv: Site) -> None:
    (venv.packages / "transformers/__pycache__").mkdir(parents=True)
    package = one(report(venv))
    assert package["state"] == "not installed"
    assert "has no __init__.py" in package["notes"][0]


def test_metadata_of_several_versions(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    label(venv.packages, "transformers", "5.2.0")
    assert any("several versions: " in note and "5.2.0" in note for note in one(report(venv))["notes"])


@pytest.mark.parametrize("first", ["stock", "unknown"])
def test_the_first_of_two_copies_counts(venv: Site, tmp_path: Path, first: str) -> None:
    unknown = dict.fromkeys(T5141, b"unknown\n")
    put(venv, unknown if first == "stock" else T5141, "5.13.0")
    other = put(venv, T5141 if first == "stock" else unknown, "5.14.1", tmp_path / "other")
    venv.variables["PYTHONPATH"] = str(other)
    package = one(report(venv))
    assert package["state"] == ("overlaid" if first == "stock" else "unknown")
    assert (package["version"], package["location"]) == ("5.14.1", str(other / "transformers"))
    assert f"a second copy (5.13.0) in {venv.packages / 'transformers'} is not used" in package["notes"]
    if first == "unknown":  # pip would install it where it is not used
        assert package["mend"] is None
        assert any("not one that pip may exchange" in note for note in package["notes"])


@pytest.mark.parametrize("how", ["path", "finder", "egg-link"])
def test_an_editable_install(venv: Site, tmp_path: Path, how: str) -> None:
    checkout = put(venv, T5141, None, tmp_path / "checkout" / "src")
    if how == "egg-link":
        info = checkout / "transformers.egg-info"
        info.mkdir()
        (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.14.1.dev0\n", "utf-8")
    else:
        origin = {"url": (tmp_path / "checkout").as_uri(), "dir_info": {"editable": True}}
        label(venv.packages, "transformers", "5.14.1.dev0", **{"direct_url.json": json.dumps(origin)})
    if how == "finder":
        module = f"""
import sys
from importlib.util import spec_from_file_location

class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "transformers":
            return spec_from_file_location(fullname, {str(checkout / "transformers/__init__.py")!r})

sys.meta_path.append(Finder)
"""
        (venv.packages / "__editable___transformers_finder.py").write_text(module, encoding="utf-8")
        line = "import __editable___transformers_finder\n"
    else:
        line = f"{checkout}\n"
    (venv.packages / "__editable__.transformers.pth").write_text(line, encoding="utf-8")
    package = one(report(venv))
    assert (package["state"], package["version"], package["notes"]) == ("overlaid", "5.14.1.dev0", [])
    assert package["location"] == str(checkout / "transformers")


@pytest.mark.parametrize("what", ["transformers", "overlay", "both"])
def test_in_an_archive(tmp_path: Path, what: str) -> None:
    site = sites.make(tmp_path / "venv")
    place = put(site, T5141, "5.14.1", tmp_path / "files")
    install_overlay(site, place, pth=False)
    archived = ("transformers", "overlay") if what == "both" else (what,)
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(place.rglob("*")):
            inside = path.relative_to(place)
            if path.is_file() and re.split("[/-]", str(inside))[0] in archived:
                file.write(path, inside)
    for folder in [folder for folder in place.iterdir() if folder.name.partition("-")[0] in archived]:
        shutil.rmtree(folder)
    site.variables["PYTHONPATH"] = f"{archive}{os.pathsep}{place}"
    package = one(report(site))
    assert (package["state"], package["version"], package["mend"]) == ("stock", "5.14.1", mends.CALL)
    assert status(site, mends.CALL)["state"] == "overlaid"
    assert status(site, f"{mends.CALL}; {IMPORTED}")["state"] == "overlaid"


def test_a_package_without_sources(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    subprocess.run([venv.python, "-m", "compileall", "-q", "-b", venv.packages / "transformers"], check=True)
    for path in T5141:
        (venv.packages / path).unlink()
    assert one(report(venv))["state"] == "unknown"


def test_a_link_to_the_package(venv: Site, tmp_path: Path) -> None:
    put(venv, T5141, "5.14.1")
    shutil.move(venv.packages / "transformers", tmp_path / "elsewhere")
    (venv.packages / "transformers").symlink_to(tmp_path / "elsewhere")
    package = one(report(venv))
    assert (package["state"], package["version"], package["notes"]) == ("overlaid", "5.14.1", [])


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="needs root on Linux, for a read-only mount")
def test_site_packages_may_be_read_only(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    put(venv, {FUSER: b"unknown\n"}, "2.13.0")
    subprocess.run(["mount", "--bind", venv.packages, venv.packages], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", venv.packages], check=True)
        found = report(venv)
        assert one(found)["state"] == "overlaid"
        assert one(found, "transformer_engine")["mend"] is None
    finally:
        subprocess.run(["umount", venv.packages], check=True)


def test_another_finder_that_fails_or_comes_first(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    fails = "def find_spec(self, name, path=None, target=None): assert not name.startswith('transformers')"
    first = (
        "def find_spec(self, name, path=None, target=None): "
        "return importlib.machinery.PathFinder.find_spec(name, path) if name.startswith('transformers.') else None"
    )
    code = "import importlib.machinery, sys\nclass Other:\n  {}\nsys.meta_path.insert(0, Other())"
    assert status(venv, code.format(fails))["state"] == "overlaid"
    package = status(venv, code.format(first))
    assert (package["state"], package["mend"]) == ("stock", None)
    assert any("another finder on sys.meta_path comes before" in note for note in package["notes"])
    wraps = (  # as wrapt's post-import hooks do
        "def find_spec(self, name, path=None, target=None):\n"
        "    if name.startswith('transformers.') and not vars(self).get('busy'):\n"
        "      self.busy = True\n"
        "      try: return importlib.util.find_spec(name)\n"
        "      finally: self.busy = False"
    )
    for imported in ("", f"\n{IMPORTED}"):
        assert status(venv, "import importlib.util\n" + code.format(wraps) + imported)["state"] == "overlaid"


# ---- how Python was started


@pytest.mark.parametrize("options", [("-I",), ("-E",), ("-s",), ("-P",), ("-O",)])
def test_the_pth_file_is_read_with(venv: Site, options: tuple[str, ...]) -> None:
    put(venv, T5141, "5.14.1")
    assert one(report(venv, *options))["state"] == "overlaid"


def test_without_site(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    venv.variables["PYTHONPATH"] = str(venv.packages)
    found = report(venv, "-S")
    assert found["overlay"]["how"] == "not active: with -S Python reads no .pth files"
    assert (one(found)["state"], one(found)["mend"]) == ("stock", mends.CALL)


def test_users_site_packages_left_out(tmp_path: Path) -> None:
    made = sites.make(tmp_path / "venv")
    made.variables["PYTHONUSERBASE"] = str(tmp_path / "user")
    place = Path(made.run("import site; print(site.getusersitepackages())").out.strip())
    place.mkdir(parents=True)
    install_overlay(made, place)
    put(made, T5141, "5.14.1")
    made.variables["PYTHONPATH"] = str(place)  # a virtual environment leaves them out anyway
    assert one(report(made, "-s"))["state"] == "stock"
    assert "user's site-packages" in report(made)["overlay"]["how"]


def test_a_site_folder_that_others_added(tmp_path: Path) -> None:
    made = sites.make(tmp_path / "venv")
    place = tmp_path / "site"
    place.mkdir()
    install_overlay(made, put(made, T5141, "5.14.1", place))
    (made.packages / "added.pth").write_text(f"import site; site.addsitedir({str(place)!r})\n", encoding="utf-8")
    found = report(made)
    assert (one(found)["state"], found["overlay"]["how"]) == (
        "overlaid",
        "active in every process, by modeling_overlay.pth",
    )


# ---- what a process has imported


def test_imported_before_it_was_active(asked: Site) -> None:
    put(asked, T5141, "5.14.1")
    main = asked.folder / "train.py"

    def run(*lines: str) -> Report:
        main.write_text("\n".join([*lines, STATUS]), encoding="utf-8")
        done = asked.command(str(main))
        assert done.code == 0, done.said
        return one(json.loads(done.out))

    before = run(IMPORTED)
    assert (before["state"], before["mend"]) == ("stock", mends.CALL)
    late = "import sys, overlay.finder as f; sys.meta_path.insert(0, f.Finder(False))"  # what is imported stays stock
    package = run(IMPORTED, late)
    assert (package["state"], package["mend"]) == ("stock", mends.CALL)
    assert any(f"call it in {main} above" in note for note in package["notes"])
    partly = run("import transformers.modeling_layers", late)
    assert (partly["state"], states(partly)) == ("partly patched", {LAYERS: "stock", GENERIC: "overlaid"})
    mended = run(package["mend"], IMPORTED)
    assert (mended["state"], mended["faults"]) == ("overlaid", [])


def test_installed_after_the_process_started(asked: Site) -> None:
    """As in a notebook."""
    put(asked, T5141, "5.14.1")
    pth = asked.packages / "modeling_overlay.pth"
    place = Path(asked.variables.pop("PYTHONPATH"))
    for name in ("overlay", "_modeling_overlay"):
        shutil.move(place / name, asked.packages / name)
    code = f"{IMPORTED}; open({str(pth)!r}, 'w').write('import _modeling_overlay')"
    package = status(asked, code)
    assert (package["state"], package["mend"]) == ("stock", mends.RESTART)
    assert status(asked, IMPORTED)["state"] == "overlaid"


@pytest.mark.parametrize("imported", ["import transformers.modeling_layers as m", "import transformers"])
def test_exchanged_on_the_disk_after_it_was_imported(asked: Site, imported: str) -> None:
    put(asked, T5141, "5.14.1")
    files = {str(asked.packages / path): patched(path, "5.14.1") for path in T5141}
    code = f"{imported}\nfor path, content in {files!r}.items(): open(path, 'wb').write(content)"
    package = status(asked, code)
    if imported == "import transformers":  # no covered file yet
        assert package["state"] == "patched wheel"
        return
    assert states(package) == {LAYERS: "replaced since", GENERIC: "patched wheel"}
    assert (package["state"], package["mend"]) == ("partly patched", mends.RESTART)
    assert package["faults"]
    assert status(asked, imported)["state"] == "patched wheel"


def test_what_others_do_to_a_module_is_not_taken_for_an_exchange(venv: Site) -> None:
    put(venv, {path: patched(path, "5.14.1") for path in T5141}, "5.14.1+overlay.2")
    code = "import functools, transformers.modeling_layers as m\nfor _ in range(9999): m.told()\n"  # specialized code
    assert status(venv, code)["state"] == "patched wheel"
    assert status(venv, code + "m.told = functools.lru_cache(lambda: 1)")["state"] == "patched wheel"


# ---- the packages beside them


@pytest.mark.parametrize(
    ("version", "peft", "live"),
    [("0.19.2", True, True), ("0.19.3", True, False), ("0.19.2", False, False), ("0.20.0", True, False)],
)
def test_deepspeed(venv: Site, version: str, peft: bool, live: bool) -> None:
    put(venv, T5141, "5.14.1")
    put(venv, {"deepspeed/x.py": b""}, version)
    if peft:
        put(venv, {"peft/x.py": b""}, "0.18.0")
    found = report(venv)
    package = one(found, "deepspeed")
    assert [fault["code"] for fault in package["faults"]] == (["peft-zero3"] if live else [])
    assert (package["mend"] or "").endswith(" install 'deepspeed>=0.19.3'") == live
    if live:
        assert found["packages"][0] == package


def test_deepspeed_beside_a_guard(asked: Site) -> None:
    guard = "transformers/modeling_utils.py"
    put(asked, {**T5141, "deepspeed/x.py": b"", "peft/x.py": b""}, "5.14.1")
    label(asked.packages, "deepspeed", "0.19.2")
    file = Path(asked.variables["PYTHONPATH"]) / "overlay/patched/manifest.json"
    content = json.loads(file.read_text("utf-8"))
    (changed,) = (one for one in content["releases"] if one["version"] == "5.14.1")
    after = patched(guard, "5.14.1")
    (file.parent / "guard.py").write_bytes(after)
    ids = {"before": manifest.blob_id(b"stock\n"), "after": manifest.blob_id(after)}
    changed["files"].append({"path": guard, **ids, "image": "guard.py"})
    changed["faults"].append({"code": "peft-zero3", "text": "the fault is DeepSpeed's"})
    file.write_text(json.dumps(content), encoding="utf-8")
    put(asked, {guard: b"stock\n"})
    found = report(asked)
    assert [fault["code"] for fault in one(found)["faults"]] == ["transformers-fault"]
    assert [fault["code"] for fault in one(found, "deepspeed")["faults"]] == ["peft-zero3"]
    assert one(found, "deepspeed")["mend"] == mends.CALL  # the guard is among what that lays over
    assert status(asked, mends.CALL, "deepspeed")["faults"] == []
    put(asked, {guard: patched(guard, "5.14.1")})
    assert one(report(asked), "deepspeed")["faults"] == []


def test_what_is_beside_is_listed_where_it_is_installed(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    for project, version in {"torch": "2.13.0+cpu", "accelerate": "1.12.0"}.items():
        put(venv, {f"{project}/x.py": b""}, version)
    found = report(venv)
    assert [(package["project"], package["version"], package["state"]) for package in found["packages"][2:]] == [
        ("torch", "2.13.0+cpu", "beside"),
        ("accelerate", "1.12.0", "beside"),
    ]


# ---- the mends, run


def shell(site: Site, command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A command in a shell in which the environment is active, with no index but the folder of wheels."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "UV_"))}
    wheels = str(site.folder / "wheels")
    kept |= {"PATH": f"{site.folder / 'bin'}{os.pathsep}{kept['PATH']}", "VIRTUAL_ENV": str(site.folder)}
    kept |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels, "UV_NO_INDEX": "1", "UV_FIND_LINKS": wheels}
    kept |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1", "UV_CACHE_DIR": str(site.folder / "cache")}
    done = subprocess.run(
        ["bash", "-c", command], cwd=site.folder, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done


def give_installer(site: Site, name: str) -> None:
    if name == "uv":
        (site.folder / "bin" / "uv").symlink_to(Path(sys.executable).parent / "uv")
        return
    spec = importlib.util.find_spec("pip")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, site.packages / "pip", ignore=shutil.ignore_patterns("__pycache__"))


DOCTOR = "python -m overlay doctor"


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_unknown_content_is_mended_by_the_nearest_release(venv: Site, installer: str) -> None:
    give_installer(venv, installer)
    wheels = venv.folder / "wheels"
    wheel(wheels, "transformers", "5.14.1", T5141)
    wheel(wheels, "transformers", "5.15.0", {LAYERS: b"unknown\n"})
    first = wheel(wheels, "transformers", "5.0.0", dict.fromkeys(T5141, b"changed\n"))
    command = "python -m pip install" if installer == "pip" else f"uv pip install --python {venv.python}"
    assert shell(venv, f"{command} {first}").returncode == 0
    first.unlink()
    wheel(wheels, "transformers", "5.0.0", release("transformers", "5.0.0"))
    said = json.loads(shell(venv, f"{DOCTOR} --json").stdout)
    mend = one(said)["mend"]
    assert mend.startswith("python -m pip" if installer == "pip" else "uv pip install --python")
    done = shell(venv, mend)
    assert done.returncode == 0, done.stderr
    assert one(report(venv))["state"] == "overlaid"


def test_a_checkout_is_mended_by_the_wheel_that_it_built(tmp_path: Path) -> None:
    site = sites.make(tmp_path / "venv")
    give_installer(site, "pip")
    put(site, T5141, "5.14.1")
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    install_overlay(site, checkout, pth=False)
    (checkout / "upstream.lock").touch()
    found = [file for file in checkout.rglob("*") if file.is_file() and file.suffix in (".py", ".json")]
    files = {str(file.relative_to(checkout)): file.read_bytes() for file in found}
    before = json.loads(shell(site, f"{DOCTOR} --json", PYTHONPATH=str(checkout)).stdout)
    assert one(before)["mend"] == mends.CALL  # no wheel yet
    pth = (variants.ROOT / "overlay" / "modeling_overlay.pth").read_bytes()
    version = f"{overlay.__version__}+g0123456789"
    wheel(checkout / "dist", "modeling_overlay", version, {**files, "modeling_overlay.pth": pth})
    text = shell(site, DOCTOR, PYTHONPATH=str(checkout)).stdout
    assert "not active: this is a checkout" in text
    command = re.search(r"  mend\n((?:    .*\n)+)", text)
    assert command is not None
    done = shell(site, command[1])  # as it stands there, on two lines
    assert done.returncode == 0, done.stderr
    assert one(report(site))["state"] == "overlaid"
    beside = shell(site, DOCTOR, PYTHONPATH=str(checkout)).stdout  # the installed one is active there, too
    assert "active in every process, by modeling_overlay.pth" in beside
    off = shell(site, DOCTOR, PYTHONPATH=str(checkout), MODELING_OVERLAY="0").stdout
    assert "off: MODELING_OVERLAY is 0" in off
    assert "unset MODELING_OVERLAY" in off


@pytest.mark.parametrize("project", ["transformers", "transformer_engine"])
def test_a_checkout_that_was_asked_for_some_releases(asked: Site, project: str) -> None:
    """Has no word on the others: by the nearest release of those they would have its faults, or none."""
    put(asked, T5141, "5.14.1")
    place = Path(asked.variables["PYTHONPATH"]) / "overlay" / "patched" / "manifest.json"
    found = json.loads(place.read_bytes())
    found["releases"] = [one for one in found["releases"] if one["version"] == "5.14.1"]
    place.write_text(json.dumps(found | {"complete": False, "right": {}}), encoding="utf-8")
    assert one(report(asked))["state"] == "stock"
    edits = "".join(f"\nopen({str(asked.packages / path)!r}, 'w').write('told = 1')" for path in T5141)
    for before, mend in ((IMPORTED + edits, mends.RESTART), ("", "--force-reinstall")):
        assert mend in status(asked, before)["mend"]  # of a release that it has it has a word
    version = "5.24.0" if project == "transformers" else "2.13.0"
    put(asked, release(project, version), version)
    if project == "transformers":
        shutil.rmtree(asked.packages / "transformers-5.14.1.dist-info")
    done = asked.command("-m", "overlay", "doctor")
    assert done.code == 1
    assert f"to know {project} {version} by, found those of transformers 5.14.1 alone" in done.said
    assert done.said.rstrip().endswith("run it without a release")


def test_off_is_mended_by_unsetting(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    mend = one(json.loads(shell(venv, f"{DOCTOR} --json", MODELING_OVERLAY="0").stdout))["mend"]
    assert shell(venv, f"{mend}; {DOCTOR}", MODELING_OVERLAY="0").returncode == 0


def test_a_patched_wheel_mends_stock(asked: Site) -> None:
    give_installer(asked, "pip")
    wheels = asked.folder / "wheels"
    old = wheel(wheels, "transformers", "5.14.1", T5141)
    new = wheel(wheels, "transformers", "5.14.1+overlay.2", {path: patched(path, "5.14.1") for path in T5141})
    for file, state in ((old, "stock"), (new, "patched wheel")):
        assert shell(asked, f"python -m pip install --no-deps '{file}'").returncode == 0
        assert one(report(asked))["state"] == state


# ---- the command


def test_one_screen_of_80_columns(asked: Site) -> None:
    put(asked, T5141, "5.14.1")
    put(asked, release("transformer_engine", "2.13.0"), "2.13.0")
    for project in ("torch", "peft"):
        put(asked, {f"{project}/x.py": b""}, "1.0")
    put(asked, {"deepspeed/x.py": b""}, "0.19.2")
    done = asked.command("-m", "overlay", "doctor")
    lines = done.out.splitlines()
    assert (done.code, done.said) == (1, "")
    assert lines[0] == "FAULT LIVE in transformers, transformer_engine, deepspeed: mend it before you"
    assert max(len(line) for line in lines if os.sep not in line) <= 80
    assert "\033" not in done.out
    assert [line.split()[:2] for line in lines if line.startswith("!")] == [
        ["!", "transformers"],
        ["!", "transformer_engine"],
        ["!", "deepspeed"],
    ]
    assert "  mend   as for transformers" in lines


def test_on_a_terminal(asked: Site) -> None:
    put(asked, T5141, "5.14.1")
    assert shown(asked, 60).startswith("\033[1;31mFAULT LIVE in transformers: mend it before you train\033[0m")
    assert max(len(line) for line in shown(asked, 60).splitlines() if os.sep not in line) <= 60 + len(
        "\033[1;31m\033[0m"
    )
    asked.variables["NO_COLOR"] = "1"
    assert "\033" not in shown(asked, 60)


def shown(site: Site, columns: int) -> str:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != "COLUMNS"}
    running = subprocess.Popen(
        [site.python, "-m", "overlay", "doctor"], cwd=site.folder, env=kept | site.variables, stdout=slave
    )
    os.close(slave)
    said = b""
    while True:
        try:
            read = os.read(master, 4096)
        except OSError:
            break
        if not read:
            break
        said += read
    os.close(master)
    assert running.wait() == 1
    return said.decode().replace("\r\n", "\n")


def test_without_patched_files(venv: Site) -> None:
    shutil.rmtree(venv.packages / "overlay/patched")
    done = venv.command("-m", "overlay", "doctor")
    done.fails("expected the patched files", "scripts/apply.sh")
    assert "queue" not in done.said
    assert done.said.count("\n") == 1


def test_wrong_usage(venv: Site) -> None:
    for arguments in (["--root", "."], ["transformers"], ["--markdown"]):
        done = venv.command("-m", "overlay", "doctor", *arguments)
        assert done.code == 2
        assert done.said.startswith("usage: overlay doctor ")


def test_nothing_but_the_standard_library_is_imported(venv: Site) -> None:
    put(venv, T5141, "5.14.1")
    put(venv, {"torch/x.py": b""}, "2.13.0")
    names = "{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names"
    code = f"import sys, overlay, overlay.doctor; before = {names}; overlay.status(); print({names} - before)"
    venv.run(code).says("set()")


def test_the_json_is_what_the_docstring_says(asked: Site) -> None:
    put(asked, T5141, "5.14.1")
    assert doctor.__doc__ is not None
    example = doctor.__doc__.partition("\n    {")[2].rpartition("}")[0]
    shape = json.loads(
        "{" + re.sub(r"(?<=[,\"\]}e{\[])  +(?:or null|[a-z][^\n]*)$", "", example, flags=re.MULTILINE) + "}"
    )

    def kind(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kind(inside) for key, inside in value.items()}
        return [kind(value[0])] if isinstance(value, list) and value else type(value)

    assert kind(report(asked)) | {"packages": None} == kind(shape) | {"packages": None}
    assert kind(one(report(asked))) == kind(shape["packages"][0])


def test_every_state_is_documented() -> None:
    text = Path(overlay.__file__).with_name("packages.py").read_text("utf-8")
    for state in (*State.__args__, *FileState.__args__):  # type: ignore[attr-defined]
        assert state == "not installed" or f"`{state}`" in text
    assert PackageStatus.__doc__ is not None


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("4.57.6", "5.0.0"),
        ("5.0.0rc1", "5.0.0"),
        ("5.15.0.dev0", "5.15.0a1"),
        ("5.15.0", "5.15.0.post1"),
        ("5.9.0", "5.14.1"),
        ("not a version", "0.1"),
    ],
)
def test_versions(earlier: str, later: str) -> None:
    assert versions.key(earlier) < versions.key(later)


@pytest.mark.parametrize(("one", "same"), [("2.13.0", "2.13"), ("5.14.1+overlay.2", "5.14.1"), ("v1.0", "1.0.0")])
def test_versions_that_are_the_same(one: str, same: str) -> None:
    assert versions.key(one) == versions.key(same)


# ---- the real thing


def test_the_wheel_alone_knows_the_releases(tmp_path: Path) -> None:
    """The true files of stock releases, and the overlay wheel as it is delivered, installed by pip."""
    site = sites.make(tmp_path / "venv")
    give_installer(site, "pip")
    (found,) = variants.products().glob("modeling_overlay-*.whl")
    assert shell(site, f"python -m pip install {found}").returncode == 0
    assert shell(site, "overlay doctor --json").returncode == 0
    listed = json.loads((site.packages / "overlay/patched/manifest.json").read_text("utf-8"))
    assert [one["version"] for one in listed["releases"] if not one["faults"]] == []  # stock would be called right
    pins = lock.read(variants.ROOT / "upstream.lock")
    for requirement, state in {
        "transformers==5.14.1": "overlaid",
        "transformers==5.22.2": "overlaid",
        "transformers==5.24.0": "overlaid",
        "transformers==5.2.0": "overlaid",
        "transformer_engine==2.13.0": "overlaid",
        "transformer_engine==2.16.0": "fixed upstream",
    }.items():
        project, _, pinned = pins.find(requirement)
        shutil.rmtree(site.packages / project, ignore_errors=True)
        with zipfile.ZipFile(source.fetch(project, pinned.wheel)) as file:
            names = [
                name for name in (LAYERS, GENERIC, FUSER, "transformers/modeling_utils.py") if name in file.namelist()
            ]
            put(site, {name: file.read(name) for name in names})
        package = one(report(site), project)
        assert (package["state"], package["faults"]) == (state, []), requirement
        site.variables["MODELING_OVERLAY"] = "0"
        package = one(report(site), project)
        assert bool(package["faults"]) == (state == "overlaid"), requirement
        del site.variables["MODELING_OVERLAY"]
