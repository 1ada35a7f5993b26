"""The SBOM of each wheel: what it says is so, it is enough to make the wheel's files again, and the licence is kept."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

from overlay import environments
from overlay.deliver import sbom
from overlay.queue import git, lock, series, source
from tests import sample as make
from tests import variants
from tests.sample import PRODUCTS, Sample, overlay_wheel_in

LOCK = lock.read(variants.ROOT / "upstream.lock")
DELIVERED = [(name, release) for name, _, release in LOCK.deliveries()]
each_release = pytest.mark.parametrize(
    ("name", "release"), DELIVERED, ids=[f"{name}-{release.version}" for name, release in DELIVERED]
)
CLOSED = "Fault: lost: gradients, without an error\n"


def text_of(wheel: Path) -> str:
    """The SBOM of a wheel; RECORD has it."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(f".dist-info/{sbom.MEMBER}"))
        assert f"{name},sha256=" in opened.read(f"{name.partition('/')[0]}/RECORD").decode()
        return opened.read(name).decode()


def read(wheel: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text_of(wheel))
    return found


def described(wheel: Path) -> dict[str, Any]:
    found: dict[str, Any] = read(wheel)["metadata"]["component"]
    return found


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {one["name"].removeprefix("modeling-overlay:"): one["value"] for one in component["properties"]}


def built(release: lock.Release) -> Path:
    assert release.built is not None
    return variants.products() / release.built.file


def each_component(found: Any) -> Iterator[dict[str, Any]]:
    """Every object that has a reference."""
    if isinstance(found, dict):
        if "bom-ref" in found:
            yield found
        for value in found.values():
            yield from each_component(value)
    elif isinstance(found, list):
        for value in found:
            yield from each_component(value)


def test_it_is_as_its_schema_says() -> None:
    """CycloneDX's own, with no key that it does not know."""
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    for file in sorted(variants.products().glob("*.whl")):
        error = validator.validate_str(text_of(file))
        assert error is None, f"{file.name}: {error}"
        references = [one["bom-ref"] for one in each_component(read(file))]
        assert len(references) == len(set(references)), "each is named once, so the library invents no name"
        assert not re.search(r'"(timestamp|serialNumber)"|BomRef', text_of(file))


@each_release
def test_upstreams_artefact_is_the_ancestor(name: str, release: lock.Release) -> None:
    component = described(built(release))
    purl = f"pkg:pypi/{name.replace('_', '-')}"
    assert (component["name"], component["version"]) == (name, release.local_version)
    assert component["purl"] == f"{purl}@{release.local_version.replace('+', '%2B')}"
    assert component["licenses"] == [{"expression": "Apache-2.0"}]
    (ancestor,) = component["pedigree"]["ancestors"]
    assert (ancestor["name"], ancestor["version"]) == (name, release.version)
    assert ancestor["purl"] == f"{purl}@{release.version}?file_name={release.wheel.file}"
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": release.wheel.sha256}]
    assert ancestor["externalReferences"] == [{"type": "vcs", "url": LOCK.packages[name].repository}]


@each_release
def test_each_patch_with_its_diff_and_what_it_resolves(name: str, release: lock.Release) -> None:
    assert release.series is not None
    queue = series.read(variants.ROOT / "patches" / release.series).for_delivery("wheel")
    component = described(built(release))
    said = properties(component)
    assert said["series"] == release.series
    patches = component["pedigree"]["patches"]
    assert len(patches) == len(queue)
    for number, (found, patch) in enumerate(zip(patches, queue, strict=True), 1):
        diff = found["diff"]["text"]["content"]
        assert diff.startswith("diff --git a/")
        assert diff in patch.file.read_text("utf-8")
        assert found["type"] == ("backport" if patch.trailers["Origin"].startswith("backport") else "unofficial")
        assert said[f"patch:{number}:file"] == patch.file.name
        assert said[f"patch:{number}:subject"] == patch.subject
        assert said[f"patch:{number}:applied-upstream"] == patch.trailers["Applied-Upstream"]
        assert {one["description"] for one in found["resolves"]} == {patch.reason}
        if patch.faults:
            assert [(one["type"], one["id"], one["name"]) for one in found["resolves"]] == [
                ("defect", fault.code, fault.text) for fault in patch.faults
            ]
        else:
            assert [(one["type"], one["id"], one["name"]) for one in found["resolves"]] == [
                ("enhancement", patch.file.stem, patch.subject)
            ]
        bug = patch.trailers["Bug"]
        for one in found["resolves"]:
            assert one.get("references", []) == ([bug] if re.search(r"/[0-9]+$", bug) else [])
            assert one.get("source") == ({"url": bug} if bug.endswith("/issues") else None)


@each_release
def test_its_diffs_make_the_files_of_the_wheel_again(name: str, release: lock.Release, tmp_path: Path) -> None:
    """From upstream's wheel and the SBOM alone."""
    component = described(built(release))
    changed = {one["name"]: one for one in component["components"]}
    prefix = LOCK.packages[name].prefix
    with zipfile.ZipFile(source.fetch(name, release.wheel)) as stock, zipfile.ZipFile(built(release)) as patched:
        for path, file in changed.items():
            if properties(file)["change"] == "patched":
                make.lay(tmp_path, {f"{prefix}{path}": stock.read(path)})
        for number, patch in enumerate(component["pedigree"]["patches"]):
            file = tmp_path / f"{number}.patch"
            file.write_bytes(patch["diff"]["text"]["content"].encode())
            make.git("apply", str(file), folder=tmp_path)
        renamed = {
            path.replace(f"{name}-{release.version}.dist-info/", f"{name}-{release.local_version}.dist-info/"): path
            for path in stock.namelist()
        }
        differing = {path for path, old in renamed.items() if patched.read(path) != stock.read(old)}
        assert set(changed) == differing, "all that differs is named"
        for path, file in changed.items():
            said = properties(file)
            if said["change"] == "patched":
                assert (tmp_path / prefix / path).read_bytes() == patched.read(path)
            if path.endswith("/RECORD"):
                assert "hashes" not in file
                continue
            assert file["hashes"] == [
                {"alg": "SHA-256", "content": hashlib.sha256(patched.read(path)).hexdigest()},
            ]
            assert said["blob:before"] == git.blob_id(stock.read(renamed[path]))
            assert said["blob:after"] == git.blob_id(patched.read(path))


def test_the_overlay_wheel_has_every_release_and_no_package_of_it() -> None:
    file = variants.overlay_wheel()
    component = described(file)
    version = file.name.split("-")[1]
    assert (component["name"], component["version"]) == ("modeling-overlay", version)
    assert component["purl"] == f"pkg:pypi/modeling-overlay@{version.replace('+', '%2B')}"
    with zipfile.ZipFile(file) as wheel:
        manifest = json.loads(wheel.read("overlay/patched/manifest.json"))
    releases = {(one["name"], one["version"]): one for one in component["components"]}
    assert set(releases) == {(one["project"], one["version"]) for one in manifest["releases"]}
    for one in manifest["releases"]:
        found = releases[one["project"], one["version"]]
        assert "purl" not in found, "it would be taken for the whole package"
        assert {file["name"]: properties(file)["blob:after"] for file in found["components"]} == {
            file["path"]: file["after"] for file in one["files"]
        }
        pin = LOCK.find(f"{one['project']}=={one['version']}")[2]
        assert found["pedigree"]["ancestors"][0]["hashes"][0]["content"] == pin.wheel.sha256
        faults = {issue["id"] for patch in found["pedigree"]["patches"] for issue in patch["resolves"]}
        assert {fault["code"] for fault in one["faults"]} <= faults


def test_patches_stand_in_the_order_of_the_series(sample: Sample) -> None:
    """The names, the types and the texts of the diffs all have another order here."""
    folder = sample.root / "patches" / "demo-1.0-1.1"
    sample.rewrite(2, "Origin: this project", "Origin: backport, https://bugs.example/2")
    first, second, third = (sample.patch(number) for number in (1, 2, 3))
    later = first.rename(folder / f"0009-{first.name[5:]}")
    (folder / "series").write_text(f"{later.name}\n{second.name}\n{third.name}\n")
    sample.overlay("lock", "update").succeeds()
    sample.apply().succeeds()
    for wheel, release in ((next(sample.out.glob("demo-1.0*.whl")), 0), (sample.out / overlay_wheel_in(sample.out), 1)):
        component = described(wheel)
        component = component["components"][0] if release else component
        said = properties(component)
        assert [said[f"patch:{number}:file"] for number in (1, 2)] == [later.name, second.name]
        patches = component["pedigree"]["patches"]
        assert [patch["type"] for patch in patches] == ["unofficial", "backport"]
        assert ["value - 30" in patch["diff"]["text"]["content"] for patch in patches] == [True, False]


def test_a_fault_and_an_issue_with_a_number(sample: Sample) -> None:
    sample.rewrite(1, "Bug: https", f"{CLOSED}Bug: https")
    sample.overlay("lock", "update").succeeds()
    sample.apply("demo==1.0").succeeds()
    patch = described(next(sample.out.glob("demo-1.0*.whl")))["pedigree"]["patches"][0]
    assert patch["resolves"] == [
        {
            "type": "defect",
            "id": "lost",
            "name": "gradients, without an error",
            "description": "The sample is wrong there, and this mends it.",
            "references": ["https://bugs.example/1"],
        }
    ]


def test_the_same_bytes_whatever_the_environment_is(sample: Sample) -> None:
    texts = set()
    for seed, zone, language in (("0", "UTC", "C"), ("1", "Asia/Kolkata", "tr_TR.UTF-8"), ("77", "EST", "C.UTF-8")):
        sample.variables.update({"PYTHONHASHSEED": seed, "TZ": zone, "LC_ALL": language})
        sample.overlay("apply", own=True).succeeds()
        texts.add(tuple(text_of(sample.out / name) for name in (*PRODUCTS, overlay_wheel_in(sample.out))))
    assert len(texts) == 1


def test_a_commit_is_the_ancestor_of_a_wheel_from_git(sample: Sample) -> None:
    checkout = sample.checkouts / "demo-1.0"
    commit = make.git("rev-parse", "HEAD", folder=checkout)
    sample.overlay("apply", "--from-git", checkout, "--any-commit", "--out", sample.out).succeeds()
    (file,) = sample.out.glob("*.whl")
    component = described(file)
    assert component["version"] == f"1.0+overlay.g{commit[:12]}"
    (ancestor,) = component["pedigree"]["ancestors"]
    assert ancestor["purl"] == f"pkg:pypi/demo@1.0?vcs_url=git%2Bhttps://git.example/demo%40{commit}"
    assert "hashes" not in ancestor
    assert component["pedigree"]["notes"].startswith("No lock names this commit")
    assert "demo-1.0-py3-none-any.whl" in component["pedigree"]["notes"]
    assert len(component["pedigree"]["patches"]) == 2
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text_of(file)) is None
    again = file.rename(sample.folder / file.name)  # it has an SBOM, which the next one takes the place of
    sample.overlay("apply", "--from-git", checkout, "--any-commit", "--metadata-from", again).succeeds()
    (other,) = sample.out.glob("*.whl")
    assert again.name in described(other)["pedigree"]["notes"]


def test_what_writes_the_bytes_is_pinned() -> None:
    """In the extra as in the environment of the commands."""
    project = tomllib.loads((variants.ROOT / "pyproject.toml").read_text("utf-8"))
    extra = {one.name: one for one in map(Requirement, project["project"]["optional-dependencies"]["queue"])}
    pinned = environments.pins("queue").read_text("utf-8").splitlines()
    for name in ("cyclonedx-python-lib", "hatchling", "packageurl-python", "py-serializable"):
        assert f"{name}{extra[name].specifier}" in pinned
    assert project["build-system"]["requires"] == [f"hatchling{extra['hatchling'].specifier}"]


@each_release
def test_the_licence_and_the_notices_are_kept(name: str, release: lock.Release) -> None:
    """Apache licence, sections 4(a) and 4(d)."""
    with zipfile.ZipFile(source.fetch(name, release.wheel)) as stock, zipfile.ZipFile(built(release)) as patched:
        kept = [path for path in stock.namelist() if re.search(r"(^|/)(LICEN[CS]E|NOTICE|COPYING)", path)]
        assert any("Apache License" in stock.read(path).decode() for path in kept)
        for path in kept:
            place = path.replace(f"-{release.version}.dist-info/", f"-{release.local_version}.dist-info/")
            assert patched.read(place) == stock.read(path)


@each_release
def test_each_exchanged_file_says_so(name: str, release: lock.Release) -> None:
    """Section 4(b); the version file too. METADATA and RECORD have no place for it: the SBOM names them."""
    with zipfile.ZipFile(built(release)) as patched:
        for file in release.files:
            assert re.search(rb"(?i)# (modified|changed) by modeling-overlay: ", patched.read(file.path)), file.path


def test_no_patch_removes_a_notice() -> None:
    """Section 4(c): of copyright, patent, trademark or attribution."""
    lines = 0
    for patch in sorted((variants.ROOT / "patches").glob("*/*.patch")):
        for line in series.read_patch(patch).diff.splitlines():
            if line.startswith("-") and not line.startswith("---"):
                lines += 1
                assert not re.search(r"(?i)copyright|\(c\)|licen[cs]e|patent|trademark|author", line), (patch, line)
    assert lines > 50


def test_the_overlay_wheel_names_both_upstreams() -> None:
    with zipfile.ZipFile(variants.overlay_wheel()) as wheel:
        (notice,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/licenses/NOTICE"))
        assert "The HuggingFace Inc. team" in notice
        assert "NVIDIA CORPORATION & AFFILIATES" in notice
        for project in LOCK.packages:
            assert "Apache License" in wheel.read(f"overlay/patched/{project}/LICENSE").decode()


def test_twine_and_installer_take_it(sample: Sample, tmp_path: Path) -> None:
    sample.apply().succeeds()
    for name in (PRODUCTS[0], overlay_wheel_in(sample.out)):
        file = sample.out / name
        command = [sys.executable, "-m", "installer", "--no-compile-bytecode", "--validate-record", "all"]
        subprocess.run([*command, "--destdir", str(tmp_path / name), str(file)], check=True)
        assert len(list((tmp_path / name).rglob(sbom.FILE))) == 1
        done = subprocess.run(
            [sys.executable, "-m", "twine", "check", str(file)],
            env=os.environ | {"NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "PASSED" in done.stdout, done.stdout + done.stderr
