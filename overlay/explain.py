"""`overlay explain`: what is changed in a wheel or an installed package, and why, from its SBOM alone.

`overlay.deliver.sbom` writes what is read here: CycloneDX 1.6, in the metadata folder (PEP 770). Standard library only,
so that the overlay wheel is enough.

`--json` prints one object, whose form is stable: keys may be added, and what is here does not change while `format` is
1.

    {
      "format": 1,
      "source": "dist/transformers-5.14.1+overlay.3-py3-none-any.whl",     where the SBOM is
      "releases": [                             one; all that it has where the overlay wheel itself is asked about
        {
          "project": "transformers",
          "version": "5.14.1+overlay.3",        that of upstream where the overlay lays the files over
          "laid_over": false,
          "upstream": {"version": "5.14.1", "purl": "pkg:pypi/...", "sha256": "9db9...", "repository": "https://..."},
          "series": "transformers-5.2-5.22",    a folder of patches/
          "notes": null,
          "patches": [                          in the order in which they are applied
            {
              "file": "0001-keep-hooks-outside-of-the-checkpoint.patch",
              "subject": "...", "reason": "...",
              "faults": [{"code": "...", "text": "..."}],
              "bug": "...", "origin": "vendor", "applied_upstream": "no",
              "diff": "diff --git ...",
              "files": [{"path": "src/transformers/modeling_layers.py", "added": 12, "removed": 3}]
            }
          ],
          "files": [                            all that differs from upstream's; sha256 is that of the content here
            {"path": "transformers/modeling_layers.py", "change": "patched", "before": "<blob>", "after": "<blob>",
             "sha256": "..."}
          ]
        }
      ]
    }
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from overlay import manifest, terminal
from overlay.errors import OverlayError, escaped
from overlay.manifest import Fault
from overlay.terminal import wrapped

FILE = "modeling-overlay.cdx.json"
"""The name of an SBOM of this project, in the folder `sboms` of a `.dist-info` folder."""

NAMESPACE = "modeling-overlay"
"""What the names of its properties begin with (https://cyclonedx.github.io/cyclonedx-property-taxonomy)."""

FORMAT = 1

OVERLAY = "modeling-overlay"

_LARGEST = 16 << 20
"""Bytes of an SBOM: many times what the largest has, and read it takes twenty times that of memory."""


@dataclass(frozen=True)
class Counted:
    """A file in a diff, with the number of lines that it gets and loses."""

    path: str
    added: int
    removed: int


@dataclass(frozen=True)
class Patch:
    """A patch. `faults` are those that it mends; `bug`, `origin` and `applied_upstream` are trailers of its message."""

    file: str
    subject: str
    reason: str
    faults: tuple[Fault, ...]
    bug: str
    origin: str
    applied_upstream: str
    diff: str
    files: tuple[Counted, ...]


@dataclass(frozen=True)
class Upstream:
    """What was patched."""

    version: str
    purl: str
    sha256: str | None
    repository: str


@dataclass(frozen=True)
class Changed:
    """A file that differs from upstream's, with its git blob ids and the sha256 of what is in the wheel."""

    path: str
    change: str
    before: str | None
    after: str | None
    sha256: str | None


@dataclass(frozen=True)
class Release:
    """What an SBOM has of a patched release."""

    project: str
    version: str
    laid_over: bool
    upstream: Upstream
    series: str
    notes: str | None
    patches: tuple[Patch, ...]
    files: tuple[Changed, ...]


def main(target: str, form: str, diff: bool) -> int:
    """Prints the report.

    Args:
        target: a wheel, a folder, an SBOM, or the name of a release (`find`).
        form: `text` or `json`.
        diff: with the diffs, in the text.

    Returns:
        The exit code, 0.

    Raises:
        OverlayError: there is no such thing, or it has no SBOM of this project.
    """
    source, releases = find(target)
    if form == "json":
        report = {"format": FORMAT, "source": source, "releases": [asdict(release) for release in releases]}
        print(json.dumps(report, indent=2))  # noqa: T201
        return 0
    print(escaped("\n".join(_lines(source, releases, terminal.width(), diff)), "\n\t"))  # noqa: T201
    return 0


def find(target: str) -> tuple[str, list[Release]]:
    """The SBOM that `target` names: where it is, and the releases in it.

    Args:
        target: a wheel, an SBOM, a `.dist-info` folder or one around it, the folder of an installed package; or
            `name` or `name==version`, with or without the local label, which is looked for in what is installed for
            this Python, with the overlay, then in `dist/`, then in the overlay alone.

    Raises:
        OverlayError: there is none, or more than one.
    """
    path = Path(target)
    named = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*?)(?:===?([A-Za-z0-9.+!_-]+))?", target)
    if path.is_dir():
        found = _in_folder(path)
        if found:
            return found
        if named is None:
            raise OverlayError(
                f"expected an SBOM of this project in {path}, found none: it is not patched by a wheel of this "
                "project, or by one of a revision that had none"
            )
    if path.is_file():
        return str(path), parse(_of_file(path), str(path))
    if named is None or target.endswith((".whl", ".json")):
        raise OverlayError(
            f"expected a wheel, a folder or NAME==VERSION, found no file {target}: name one that is there"
        )
    return _named(named[1], named[2])


def _in_folder(folder: Path) -> tuple[str, list[Release]] | None:
    """The SBOM in a metadata folder, in one around it, or of the package that `folder` is."""
    places = [folder / "sboms" / FILE, folder / FILE, *sorted(folder.glob(f"*.dist-info/sboms/{FILE}"))]
    found = [place for place in places if place.is_file()]
    if not found:
        resolved = folder.resolve()
        for place in sorted(resolved.parent.glob(f"*.dist-info/sboms/{FILE}")):
            record = place.parents[1] / "RECORD"
            if record.is_file() and f"\n{resolved.name}/" in f"\n{record.read_text('utf-8')}":
                found.append(place)
    if len(found) > 1:
        listed = ", ".join(place.parents[1].name for place in found)
        raise OverlayError(f"expected one SBOM of this project in {folder}, found those of {listed}: name one of them")
    return (str(found[0]), parse(_of_file(found[0]), str(found[0]))) if found else None


def _of_file(path: Path) -> bytes:
    """The SBOM that a file is, or that a wheel has."""
    if not zipfile.is_zipfile(path):
        if path.suffix != ".json" or path.stat().st_size > _LARGEST:  # CycloneDX knows its own by that suffix
            raise OverlayError(f"{path}: expected a wheel or an SBOM, found neither: name another file")
        return path.read_bytes()
    try:
        with zipfile.ZipFile(path) as wheel:
            found = [
                entry for entry in wheel.infolist() if re.fullmatch(rf"[^/]+\.dist-info/sboms/{FILE}", entry.filename)
            ]
            if not found:
                raise OverlayError(
                    f"{path}: expected an SBOM of this project in it, found none: it is upstream's own wheel, or of a "
                    "revision that had none"
                )
            if len(found) > 1:
                raise OverlayError(f"{path}: expected one SBOM of this project, found more: do not use this file")
            if found[0].file_size > _LARGEST or found[0].compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                raise OverlayError(
                    f"{path}: expected an SBOM of at most {_LARGEST} bytes, stored or deflated, found "
                    f"{found[0].file_size} by method {found[0].compress_type}: do not use this file"
                )
            with wheel.open(found[0]) as member:
                return member.read(_LARGEST)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OSError, EOFError, zlib.error) as error:
        raise OverlayError(f"{path}: expected a wheel, found no sound zip file ({error}): fetch it again") from None


def _named(name: str, version: str | None) -> tuple[str, list[Release]]:
    """The SBOM of a release by its name: as it is installed, as a wheel in `dist/`, or in the overlay."""
    wanted = name if version is None else f"{name}=={version}"
    distribution = _distribution(name)
    found = None if distribution is None else distribution.version
    if distribution is not None and version in (None, found, _public(distribution.version)):
        installed = _installed(name, distribution)
        if installed:
            return installed
    wheels = _wheels(name, version)
    if len(wheels) > 1:
        listed = ", ".join(file.name for file in wheels)
        stock = "" if found is None else f" ({name} {found} is installed, without an SBOM of this project)"
        raise OverlayError(f"expected one wheel of {wanted}, found {listed} in dist{stock}: name one of them")
    if wheels:
        return str(wheels[0]), parse(_of_file(wheels[0]), str(wheels[0]))
    over = _in_overlay(name, version)
    if over:
        return over
    same = found is not None and version in (None, found, _public(found))
    seen = f"{name} {found} installed{', without an SBOM of this project' if same else ''}"
    raise OverlayError(
        f"expected {wanted} from this project: installed for this Python, as a wheel in dist/, or in the overlay, "
        f"found {'none' if found is None else seen}: name the wheel, or use the Python that it is installed for"
    )


def installed(name: str) -> Release | None:
    """What an SBOM has of the release that is installed for this Python: by its wheel, or by the overlay.

    Raises:
        OverlayError: the SBOM is not one of this project.
    """
    distribution = _distribution(name)
    found = None if distribution is None else _installed(name, distribution)
    return found[1][0] if found else None


def _distribution(name: str) -> metadata.Distribution | None:
    """The first on the path, which is the one in use."""
    return next(iter(metadata.distributions(name=name)), None)


def _installed(name: str, distribution: metadata.Distribution) -> tuple[str, list[Release]] | None:
    text = distribution.read_text(f"sboms/{FILE}")
    if text is not None:
        where = f"{distribution.locate_file('')}: {name} {distribution.version}"
        return where, parse(text.encode(), where)
    return _in_overlay(name, distribution.version)


def _wheels(name: str, version: str | None) -> list[Path]:
    """The wheels of a release in `dist/`, here and in the checkout that this is."""
    found: dict[Path, Path] = {}
    for folder in (Path("dist"), manifest.folder().parents[1] / "dist"):
        for file in folder.glob("*-*-*.whl"):
            project, its = file.name.split("-")[:2]
            if _same(project, name) and version in (None, its, _public(its)):
                found.setdefault(file.resolve(), file)
    return sorted(found.values())


def _in_overlay(name: str, version: str | None) -> tuple[str, list[Release]] | None:
    """What the overlay lays over a release; all of it, where its own name is asked for."""
    for where, content in _overlay():
        releases = parse(content, where)
        if not _same(name, OVERLAY):
            releases = [one for one in releases if _same(one.project, name) and one.version == version]
        if releases:
            return where, releases
    return None


def _public(version: str) -> str:
    """A version without its local label (PEP 440)."""
    return version.partition("+")[0]


def _overlay() -> Iterator[tuple[str, bytes]]:
    """The SBOM of the overlay that this is, or of the one that is installed."""
    try:
        text = metadata.distribution(OVERLAY).read_text(f"sboms/{FILE}")
    except metadata.PackageNotFoundError:
        text = None
    if text is not None:
        yield f"the overlay, {OVERLAY} {metadata.version(OVERLAY)}", text.encode()
    made = manifest.folder() / FILE  # in a checkout
    if made.is_file():
        yield f"the overlay, {made}", made.read_bytes()


def _same(one: str, other: str) -> bool:
    """Whether two names are those of one project (PEP 503)."""
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()


def parse(content: bytes, where: str) -> list[Release]:
    """The releases in an SBOM.

    Args:
        content: the document.
        where: where it is, for messages.

    Raises:
        OverlayError: it is none of this project.
    """
    try:
        root = json.loads(content)["metadata"]["component"]
        if "pedigree" in root:
            return [_release(root, laid_over=False)]
        if root["name"] != OVERLAY:
            raise ValueError(f"that of {root['name']}")
        return [_release(component, laid_over=True) for component in root.get("components", ())]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise OverlayError(
            f"{where}: expected an SBOM as this version of modeling-overlay writes it, found something else "
            f"({type(error).__name__}: {error}): use the one that wrote it"
        ) from None


def _release(component: dict[str, Any], *, laid_over: bool) -> Release:
    said = _properties(component)
    pedigree = component["pedigree"]
    (ancestor,) = pedigree["ancestors"]
    upstream = Upstream(
        version=_text(ancestor["version"]),
        purl=_text(ancestor["purl"]),
        sha256=_sha256(ancestor),
        repository=_text(ancestor["externalReferences"][0]["url"]),
    )
    return Release(
        project=_text(component["name"]),
        version=_text(component["version"]),
        laid_over=laid_over,
        upstream=upstream,
        series=said["series"],
        notes=_text(pedigree["notes"]) if "notes" in pedigree else None,
        patches=tuple(_patch(patch, said, number) for number, patch in enumerate(pedigree.get("patches", ()), 1)),
        files=tuple(_changed(file) for file in component.get("components", ())),
    )


def _patch(patch: dict[str, Any], said: dict[str, str], number: int) -> Patch:
    diff = _text(patch["diff"]["text"]["content"])
    return Patch(
        file=said[f"patch:{number}:file"],
        subject=said[f"patch:{number}:subject"],
        reason=_text(patch["resolves"][0]["description"]),
        faults=tuple(
            Fault(_text(one["id"]), _text(one["name"])) for one in patch["resolves"] if one["type"] == "defect"
        ),
        bug=said[f"patch:{number}:bug"],
        origin=said[f"patch:{number}:origin"],
        applied_upstream=said[f"patch:{number}:applied-upstream"],
        diff=diff,
        files=tuple(_counted(diff)),
    )


def _counted(diff: str) -> Iterator[Counted]:
    """The files of a diff. Lines are counted where a hunk says that it has them, whatever they look like."""
    for part in re.split(r"^diff --git a/", diff, flags=re.MULTILINE)[1:]:
        path, added, removed, old, new = part.partition(" b/")[0], 0, 0, 0, 0
        for row in part.split("\n"):
            if old > 0 or new > 0:
                kind = row[:1] or " "
                old -= kind in " -"
                new -= kind in " +"
                added += kind == "+"
                removed += kind == "-"
            elif hunk := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", row):
                old, new = int(hunk[1] or 1), int(hunk[2] or 1)
        yield Counted(path, added, removed)


def _changed(file: dict[str, Any]) -> Changed:
    said = _properties(file)
    return Changed(_text(file["name"]), said["change"], said.get("blob:before"), said.get("blob:after"), _sha256(file))


def _properties(component: dict[str, Any]) -> dict[str, str]:
    return {one["name"].removeprefix(f"{NAMESPACE}:"): _text(one["value"]) for one in component.get("properties", ())}


def _sha256(component: dict[str, Any]) -> str | None:
    return next((_text(one["content"]) for one in component.get("hashes", ()) if one["alg"] == "SHA-256"), None)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in the place of a text")
    return value


def _lines(source: str, releases: Sequence[Release], width: int, diff: bool) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Release]] = {}
    for release in releases:
        groups.setdefault((release.project, *(patch.diff for patch in release.patches)), []).append(release)
    yield from wrapped(source, "read in  ", width)
    for alike in groups.values():
        yield ""
        for release in alike:
            yield from _head(release, width)
        yield ""
        yield from wrapped(_summary(alike[0]), "", width)
        for number, patch in enumerate(alike[0].patches, 1):
            yield ""
            yield from _told(patch, f"{number}. ", width)
            if diff:
                yield ""
                yield from patch.diff.rstrip("\n").split("\n")


def _head(release: Release, width: int) -> Iterator[str]:
    over = ", laid over an installed one by the overlay" if release.laid_over else ""
    yield from wrapped(f"{release.project} {release.version}{over}", "", width)
    upstream = release.upstream
    _, _, query = upstream.purl.partition("?")
    kind, _, value = query.partition("=")
    made = unquote(value) if kind in ("file_name", "vcs_url") else upstream.purl
    yield from wrapped(made, "  made of  ", width)
    yield from wrapped(upstream.sha256 or "none: no lock names it", "  sha256   ", width)
    yield from wrapped(upstream.repository, "  from     ", width)
    if release.notes:
        yield from wrapped(release.notes, "  note     ", width)


def _summary(release: Release) -> str:
    patched = [file.path for file in release.files if file.change.startswith("patched")]
    others = [file.path for file in release.files if not file.change.startswith("patched")]
    number = len(release.patches)
    said = f"{number} patch{'' if number == 1 else 'es'} of {release.series} change{'s' if number == 1 else ''} "
    said += ", ".join(patched)
    if others:
        said += f". The version label, and the hashes of all that, change {', '.join(others)}"
    rest = "" if release.laid_over else "This SBOM is added. "
    return f"{said}. {rest}Nothing else differs from upstream's."


def _told(patch: Patch, number: str, width: int) -> Iterator[str]:
    indent = " " * len(number)
    yield from wrapped(patch.subject, number, width)
    for paragraph in re.split(r"\n\s*\n", patch.reason):
        yield ""
        yield from wrapped(" ".join(paragraph.split()), indent, width)
    yield ""
    for fault in patch.faults:
        yield from wrapped(f"{fault.code}: {fault.text}", f"{indent}mends    ", width)
    yield from wrapped(_origin(patch), f"{indent}origin   ", width)
    if re.search(r"/[0-9]+/?$", patch.bug):
        yield from wrapped(patch.bug, f"{indent}issue    ", width)
    yield from wrapped(patch.file, f"{indent}patch    ", width)
    for file in patch.files:
        yield from wrapped(f"{file.path}  +{file.added} -{file.removed}", f"{indent}changes  ", width)


def _origin(patch: Patch) -> str:
    kind, _, source = patch.origin.partition(", ")
    said = f"backport of {source or 'what upstream has'}" if kind == "backport" else "this project's own"
    if patch.applied_upstream == "no":
        return f"{said}; upstream has nothing like it so far"
    return f"{said}; upstream has it since {patch.applied_upstream}"
