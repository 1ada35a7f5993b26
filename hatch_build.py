"""What the overlay wheel has beside the import package: the patched files, the `.pth` file that activates them, and a
version that says which they are.

hatchling runs this for every build of the project, that of `overlay apply` too
(https://hatch.pypa.io/latest/plugins/build-hook/custom/, https://hatch.pypa.io/latest/plugins/metadata-hook/custom/).
An editable installation gets neither of the two files.
"""

import hashlib
import json
import re
import stat
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PATCHED = "overlay/patched"

SBOM = "modeling-overlay.cdx.json"
"""Made beside the patched files by `overlay apply`; the wheel has it where PEP 770 says."""

SOURCES = ("LICENSE", "NOTICE", "README.md", "hatch_build.py", "pyproject.toml")
"""What a build reads beside the import package."""


class OverlayMetadataHook(MetadataHookInterface):
    """The version of the import package, with a local label (PEP 440) of what goes into the wheel.

    Patches and pins change more often than the version is raised by hand, and pip and uv leave a wheel in place that
    has the version that a constraints file names.
    """

    PLUGIN_NAME = "overlay"

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the version, which is the same wherever the same files are."""
        root = Path(self.root)
        found = re.search(r'^__version__ = "(.+)"$', (root / "overlay/__init__.py").read_text("utf-8"), re.MULTILINE)
        if found is None:
            raise ValueError('overlay/__init__.py: expected a line __version__ = "...", found none: restore it')
        metadata["version"] = f"{found[1]}+g{_digest(root)[:10]}"


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    inside = (
        path.relative_to(root)
        for folder in (
            root / "overlay",
            root / PATCHED,
        )  # the second may be a link, which is not followed from the first
        for path in folder.rglob("*")
        if path.is_file() and not any(part == "__pycache__" or part[0] == "." for part in path.relative_to(root).parts)
    )
    for name in sorted({*map(str, inside), *SOURCES}):
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


class OverlayBuildHook(BuildHookInterface[Any]):
    """Asks for the patched files of every pinned release, and makes the bytes of the wheel independent of the
    machine."""

    PLUGIN_NAME = "overlay"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files; aborts with one line where `overlay apply` has not made all of them."""
        if version != "standard":
            return
        problem = _problem(Path(self.root, PATCHED))
        if problem is not None:
            self.app.abort(f"modeling-overlay: {problem}")
        patched = {f"{PATCHED}/{path.name}" for path in Path(self.root, PATCHED).iterdir() if path.name != SBOM}
        build_data["force_include"] |= {
            **{path: path for path in sorted(patched)},
            "overlay/modeling_overlay.pth": "modeling_overlay.pth",
            # a package: of a module, uv would leave the bytecode behind
            "overlay/startup.py": "_modeling_overlay/__init__.py",
        }
        self.made = tempfile.TemporaryDirectory(prefix="overlay-")
        sbom = Path(self.made.name, SBOM)
        sbom.write_bytes(_sbom(Path(self.root, PATCHED, SBOM), self.metadata.version))
        build_data["sbom_files"].append(str(sbom))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Stores every member, with the earliest date that zip knows and mode 0644: what zlib makes differs between its
        versions, and the mode of a file between checkouts."""
        if version != "standard":
            return
        self.made.cleanup()
        with zipfile.ZipFile(artifact_path) as wheel:
            members = [(name, wheel.read(name)) for name in wheel.namelist()]
        with zipfile.ZipFile(artifact_path, "w", zipfile.ZIP_STORED) as wheel:
            for name, content in members:
                entry = zipfile.ZipInfo(name)
                entry.create_system = 3
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                wheel.writestr(entry, content)


def _sbom(file: Path, version: str) -> bytes:
    """The SBOM with the version of the wheel, which has a digest of the SBOM without it."""
    document = json.loads(file.read_bytes())
    component = document["metadata"]["component"]
    component |= {"version": version, "purl": f"pkg:pypi/{component['name']}@{quote(version)}"}
    return (json.dumps(document, indent=2) + "\n").encode()


def _problem(patched: Path) -> str | None:
    """What is wrong with the patched files, and what to do; None where nothing is."""
    try:
        manifest = json.loads((patched / "manifest.json").read_bytes())
    except FileNotFoundError:
        return f"expected the patched files in {patched}, found none: run scripts/apply.sh first"
    if not (patched / SBOM).is_file():
        return f"expected {patched / SBOM}, found none: run scripts/apply.sh first"
    releases = manifest["releases"]
    if not manifest.get("complete"):
        named = ", ".join(f"{release['project']} {release['version']}" for release in releases)
        return (
            f"expected the patched files of every pinned release in {patched}, found those of {named} alone: run "
            "scripts/apply.sh first, without naming releases"
        )
    pinned = _pinned(patched.parents[1] / "upstream.lock")
    for release in releases:
        for file in release["files"]:
            image = patched / file["image"]
            if not image.is_file():
                return f"expected the patched file {image}, found none: run scripts/apply.sh first"
            content = image.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            named = pinned.get((release["project"], release["version"], file["path"]), file["after"])
            for expected in {file["after"], named}:
                if blob != expected:
                    return f"{image}: expected git blob {expected}, found {blob}: run scripts/apply.sh first"
    return None


def _pinned(lock: Path) -> dict[tuple[str, str, str], str]:
    """The blob ids of post-images by project, version and path: nothing where there is no lock, as in an sdist."""
    if not lock.is_file():
        return {}
    return {
        (project, release["version"], file["path"]): file["after"]
        for project, package in tomllib.loads(lock.read_text("utf-8"))["packages"].items()
        for release in package.get("releases", ())
        for file in release.get("files", ())
    }
