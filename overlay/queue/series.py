"""Series of patches: read, checked and applied.

A series is a folder with a file `series` that names its patches in order (as quilt and Debian source packages have
it). Each patch is a `git format-patch` file whose message ends in trailers (git-interpret-trailers(1), after Debian's
DEP-3).
"""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from packaging.version import Version

from overlay.errors import OverlayError, naming
from overlay.manifest import Fault
from overlay.queue import git
from overlay.queue.lock import INVISIBLE, nearest, relative_path

Delivery = Literal["wheel", "overlay", "pull-request"]
TRAILERS = {
    "Bug": re.compile(r"\S.*"),
    "Origin": re.compile(r"\S.*"),
    "Applied-Upstream": re.compile(r"no|[0-9]+(\.[0-9]+)+"),
    "Last-Update": re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
}
"""The trailers that every patch must have, and what they look like."""

OPTIONAL = ("Delivery", "Fault")
"""The trailers that may be left out. `Delivery: wheel, overlay, pull-request` says who takes the patch; without it, all
do. `Fault: <code>: <what the user sees>`, one for each fault that the patch mends, is what the overlay says of a
package that lacks it; a code is in one patch of a series."""

_FAULT = re.compile(r"([a-z0-9-]+): +(\S.*)")
_NUMBER = "([0-9]{1,9})"
_HUNK = re.compile(rf"@@ -{_NUMBER}(?:,{_NUMBER})? \+{_NUMBER}(?:,{_NUMBER})? @@")
_UNSEEN = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f{INVISIBLE}]")
_TRAILER = re.compile(r"([A-Za-z][A-Za-z-]*): +(\S.*)")


@dataclass(frozen=True)
class Hunk:
    """One hunk of a patch: the path it changes, its header, the line (from 1) of the old file at which it starts, and
    its lines before and after."""

    path: str
    header: str
    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Patch:
    """A `git format-patch` file.

    `faults` are those that it mends, `paths` the paths in upstream's git tree that it changes, `before` the abbreviated
    blob id that it was made against, by path; `diff` is the text that `git apply` takes, without the message.
    """

    file: Path
    subject: str
    reason: str
    trailers: Mapping[str, str]
    delivery: frozenset[Delivery]
    faults: tuple[Fault, ...]
    paths: tuple[str, ...]
    created: frozenset[str]
    before: Mapping[str, str]
    hunks: tuple[Hunk, ...]
    diff: str


@dataclass(frozen=True)
class Series:
    """An ordered list of patches for one range of releases."""

    name: str
    folder: Path
    patches: tuple[Patch, ...]

    def for_delivery(self, delivery: Delivery) -> tuple[Patch, ...]:
        """The patches that this delivery takes, in order."""
        return tuple(patch for patch in self.patches if delivery in patch.delivery)

    def paths(self, delivery: Delivery) -> tuple[str, ...]:
        """The paths in upstream's git tree that this delivery changes, in the order of the patches."""
        return tuple(dict.fromkeys(path for patch in self.for_delivery(delivery) for path in patch.paths))

    def faults(self, delivery: Delivery) -> tuple[Fault, ...]:
        """The faults that this delivery mends, in the order of the patches."""
        return tuple(fault for patch in self.for_delivery(delivery) for fault in patch.faults)


def read(folder: Path) -> Series:
    """The series in `folder`.

    Raises:
        OverlayError: no such folder or file, a patch that is named and missing or there and not named, or one that is
            not sound.
    """
    listing = folder / "series"
    if not listing.is_file():
        raise OverlayError(
            f"expected the list of patches at {listing}, found no such file: restore it, or name another series in "
            "upstream.lock"
        )
    names = [text for text in (row.partition("#")[0].strip() for row in _text(listing).splitlines()) if text]
    if not names:
        raise OverlayError(f"{listing}: expected the name of a patch on each line, found none: name at least one")
    for name in names:
        if names.count(name) > 1:
            raise OverlayError(f"{listing}: {name} is named twice: keep one of the two lines")
        if "/" in name or not name.endswith(".patch") or not (folder / name).is_file():
            raise OverlayError(
                f"{listing}: expected the name of a patch in the same folder, found {name!r}: correct the line"
            )
    for stray in sorted(folder.glob("*.patch")):
        if stray.name not in names:
            raise OverlayError(f"{stray} is not named in {listing}: name it there, or take the file away")
    series = Series(folder.name, folder, tuple(read_patch(folder / name) for name in names))
    _check_deliveries(series)
    _check_faults(series)
    return series


def of(patches: Path, project: str) -> list[Series]:
    """Every series of a project under `patches`, sorted by name. Raises OverlayError as `read` does."""
    release = r"[0-9]+(\.[0-9]+)*"
    named = re.compile(rf"{re.escape(project)}-{release}(-{release})?")
    return [read(folder) for folder in sorted(patches.iterdir()) if named.fullmatch(folder.name)]


def applied_upstream(queues: Iterable[Series], version: Version) -> str | None:
    """The release since which upstream has what the series nearest to `version` mends (`Applied-Upstream`), if it is
    not later: each patch of a fault, or any where none names one."""
    named = {queue.name: queue for queue in queues}
    if not named:
        return None
    patches = named[nearest(named, version)].patches
    applied = [patch.trailers["Applied-Upstream"] for patch in patches if patch.faults] or [
        patch.trailers["Applied-Upstream"] for patch in patches if patch.trailers["Applied-Upstream"] != "no"
    ]
    if not applied or "no" in applied:
        return None
    since = max(applied, key=Version)
    return since if Version(since) <= version else None


def _check_deliveries(series: Series) -> None:
    """A post-image is made once and used by both deliveries, so a file must not be patched in parts by one of them."""
    for path in series.paths("overlay"):
        for patch in series.for_delivery("wheel"):
            if path in patch.paths and "overlay" not in patch.delivery:
                raise OverlayError(
                    f"{patch.file}: Delivery: expected overlay too, because other patches of {path} have it: move "
                    "this hunk to a patch of its own file, or add overlay"
                )
        for patch in series.for_delivery("overlay"):
            if path in patch.paths and "wheel" not in patch.delivery:
                raise OverlayError(
                    f"{patch.file}: Delivery: expected wheel beside overlay: a post-image is the same in both"
                )


def _check_faults(series: Series) -> None:
    seen: dict[str, Path] = {}
    for patch in series.patches:
        for fault in patch.faults:
            if fault.code in seen:
                raise OverlayError(
                    f"{patch.file}: Fault: {fault.code} is that of {seen[fault.code].name} already: keep one of the two"
                )
            seen[fault.code] = patch.file


def read_patch(file: Path) -> Patch:
    """The patch in `file`.

    Raises:
        OverlayError: it is not UTF-8, holds what nobody sees (`lock.INVISIBLE`), has no subject, reason or trailer that
            it must have, or names a path outside the tree, a `.git`, a symbolic link, a mode, a rename or binary
            content.
    """
    text = _text(file)
    found = _UNSEEN.search(text.replace("\r\n", " \n"))  # of the same length, so that the place is right
    if found is not None:
        kind = "control" if found[0] < " " or found[0] == "\x7f" else "invisible"
        raise OverlayError(
            f"{file}: expected text that can be read, found the {kind} character {found[0]!a} in line "
            f"{text[: found.start()].count(chr(10)) + 1}: write it as an escape in the source, and export the patch "
            "again"
        )
    message, separator, body = text.partition("\n---\n")
    if not separator:
        raise OverlayError(
            f"{file}: expected a git format-patch file, found no line '---' after the message: export it with git "
            "format-patch"
        )
    headers, _, description = message.partition("\n\n")
    subject = _subject(headers)
    if not headers.startswith("From ") or not subject:
        raise OverlayError(
            f"{file}: expected a git format-patch file with From and Subject, found {headers.splitlines()[:1]}: "
            "export it with git format-patch"
        )
    paragraphs = [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", description.strip("\n"))]
    rows = paragraphs[-1].splitlines()
    trailers = {row[1]: row[2] for row in map(_TRAILER.fullmatch, rows) if row}
    _check_trailers(file, trailers)
    reason = "\n\n".join(paragraphs[:-1])
    if not reason:
        raise OverlayError(
            f"{file}: expected the reason for the change in the message, found only trailers: say why it is needed"
        )
    paths, created, before, hunks = _content(file, text, text.count("\n", 0, len(text) - len(body)))
    delivery, faults = _delivery(file, trailers), _faults(file, rows)
    return Patch(file, subject, reason, trailers, delivery, faults, paths, created, before, hunks, _diff(text))


def _check_trailers(file: Path, trailers: Mapping[str, str]) -> None:
    missing = [f"{name}:" for name in TRAILERS if name not in trailers]
    if missing:
        noun, them = ("trailer", "it") if len(missing) == 1 else ("trailers", "them")
        raise OverlayError(
            f"{file}: expected the {noun} {', '.join(missing)} at the end of the message, found "
            f"{', '.join(trailers) or 'no trailer'}: add {them}"
        )
    for name, form in TRAILERS.items():
        if form.fullmatch(trailers[name]) is None:
            expected = "a day such as 2026-11-29" if name == "Last-Update" else "a release such as 2.16.0, or no"
            raise OverlayError(f"{file}: {name}: expected {expected}, found {trailers[name]!r}: correct the trailer")
    for name in trailers:
        if name not in (*TRAILERS, *OPTIONAL) and not name.endswith("-by"):
            raise OverlayError(
                f"{file}: expected the trailers {', '.join((*TRAILERS, *OPTIONAL))}, found {name!r}: correct the "
                "trailer"
            )


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise OverlayError(
            f"{file}: expected UTF-8, found the byte 0x{error.object[error.start]:02x} at offset {error.start}: "
            "write it again in UTF-8"
        ) from None


def _subject(headers: str) -> str:
    found = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", headers, re.MULTILINE)
    return "" if found is None else re.sub(r"^\[PATCH[^\]]*\]\s*", "", re.sub(r"\n[ \t]+", " ", found[1])).strip()


def _delivery(file: Path, trailers: Mapping[str, str]) -> frozenset[Delivery]:
    known = get_args(Delivery)
    names = [name.strip() for name in trailers.get("Delivery", ", ".join(known)).split(",")]
    for name in names:
        if name not in known:
            raise OverlayError(
                f"{file}: Delivery: expected some of {', '.join(known)}, found {name!r}: correct the trailer"
            )
    return frozenset(delivery for delivery in known if delivery in names)


def _diff(text: str) -> str:
    """The patch from its first diff to the signature that git format-patch puts below the last one."""
    found = re.search(r"^diff --git ", text, re.MULTILINE)
    assert found is not None  # a hunk without one is refused
    return re.sub(r"\n-- \n[^\n]*\n*\Z", "\n", text[found.start() :])


def _faults(file: Path, rows: Sequence[str]) -> tuple[Fault, ...]:
    """The faults in the last paragraph of a message."""
    faults = []
    for row, following in zip(rows, (*rows[1:], ""), strict=True):
        if not row.startswith("Fault:"):
            continue
        found = _FAULT.fullmatch(row.removeprefix("Fault:").strip())
        if found is None or following.startswith((" ", "\t")):
            raise OverlayError(
                f"{file}: Fault: expected a code of a-z, 0-9 and -, a colon and one line of what the user sees, found "
                f"{row + following if found else row!r}: correct the trailer"
            )
        faults.append(Fault(found[1], found[2]))
    return tuple(faults)


def _content(
    file: Path, text: str, first_line: int
) -> tuple[tuple[str, ...], frozenset[str], dict[str, str], tuple[Hunk, ...]]:
    """What the diff changes. Reads the whole file, message included, as git apply does: it takes a diff wherever one
    stands."""
    paths: dict[str, None] = {}
    created: set[str] = set()
    before: dict[str, str] = {}
    hunks: list[Hunk] = []
    path, removed, added = "", 0, 0
    header, start, rows = "", 0, list[str]()
    for number, row in enumerate(text.split("\n"), 1):
        where = f"{file}:{number}"
        if removed > 0 or added > 0:
            removed -= row[:1] in (" ", "-", "")
            added -= row[:1] in (" ", "+", "")
            if not row.startswith("\\"):
                rows.append(row)
            if removed <= 0 and added <= 0:
                hunks.append(_hunk(path, header, start, rows))
            continue
        if row.startswith("diff --git "):
            named = re.fullmatch(r"diff --git a/(.+) b/(.+)", row)
            if named is None or named[1] != named[2]:
                raise OverlayError(
                    f"{where}: expected 'diff --git a/PATH b/PATH' with the same plain path twice, found {row!r}: "
                    "a patch may only change files in their place"
                )
            path = _safe(where, named[1])
            paths[path] = None
        elif path and row.startswith("index "):
            found = re.fullmatch(r"index ([0-9a-f]+)\.\.[0-9a-f]+(?: ([0-7]{6}))?", row)
            if found is None:
                raise OverlayError(f"{where}: expected 'index BLOB..BLOB MODE', found {row!r}: export the patch again")
            before[path] = found[1]
            _regular(where, found[2])
        elif path and (found := re.match(r"(new file mode|deleted file mode|old mode|new mode)\s+(\S*)", row)):
            _regular(where, found[2])
            if found[1] != "new file mode":
                raise OverlayError(
                    f"{where}: expected a change of a file's content, found {row!r}: a patch may neither delete a "
                    "file nor change its mode"
                )
            created.add(path)
        elif path and re.match(r"(rename|copy|similarity|dissimilarity)\s|GIT binary patch|Binary files ", row):
            raise OverlayError(
                f"{where}: expected a change of a text file, found {row!r}: a patch may not rename, copy or hold "
                "binary content"
            )
        elif re.match(r"(---|\+\+\+) .", row) and (number >= first_line or "/" in row):
            side, name = row[:3], row[4:].split("\t")[0]
            if name != "/dev/null" or path not in created:
                if name[:2] not in ("a/", "b/"):
                    raise OverlayError(
                        f"{where}: expected '{side} {'a' if side == '---' else 'b'}/PATH', found {row!r}: a patch "
                        "may only name paths inside the tree"
                    )
                if _safe(where, name[2:]) != path:
                    raise OverlayError(
                        f"{where}: expected the path {path!r} that 'diff --git' names, found {name[2:]!r}: export "
                        "the patch again"
                    )
        elif found := _HUNK.match(row):
            if not path:
                raise OverlayError(
                    f"{where}: expected 'diff --git' before the first hunk, found {row!r}: export the patch again"
                )
            removed, added = int(found[2] or 1), int(found[4] or 1)
            if removed == 0 and path not in created:
                raise OverlayError(
                    f"{where}: expected lines of the old file around what is added, found none: export the patch with "
                    "context"
                )
            header, start, rows = row, int(found[1]), []
        elif row.startswith("@@ -"):
            raise OverlayError(
                f"{where}: expected '@@ -FIRST,LINES +FIRST,LINES @@', found {row[:100]!r}: export the patch again"
            )
    if not hunks:
        raise OverlayError(f"{file}: expected at least one hunk, found none: export the patch again")
    return tuple(paths), frozenset(created), before, tuple(hunks)


def _hunk(path: str, header: str, start: int, rows: Sequence[str]) -> Hunk:
    before = tuple(row[1:] for row in rows if row[:1] in (" ", "-", ""))
    after = tuple(row[1:] for row in rows if row[:1] in (" ", "+", ""))
    return Hunk(path, header, start, before, after)


def _safe(where: str, path: str) -> str:
    try:
        return relative_path(path)
    except ValueError as error:
        raise OverlayError(f"{where}: {error}, found {path!r}: a patch may only name paths inside the tree") from None


def _regular(where: str, mode: str | None) -> None:
    if mode not in (None, "100644", "100755"):
        kind = "a symbolic link" if mode == "120000" else "a submodule" if mode == "160000" else f"mode {mode}"
        raise OverlayError(f"{where}: expected a regular file, found {kind}: a patch may only change regular files")


def apply(patches: Sequence[Patch], pre_images: Mapping[str, bytes]) -> dict[str, bytes]:
    """The post-images: every file of `pre_images` after all `patches`, by path in upstream's git tree.

    git applies them with zero fuzz (a hunk may move, its context must match), in a temporary tree that holds only
    these files.

    Raises:
        OverlayError: a patch does not fit, fits in more than one place, is applied already, or changes a file that is
            not among the pre-images.
    """
    for patch in patches:
        for path in patch.paths:
            if path not in pre_images and path not in patch.created:
                raise OverlayError(
                    f"{patch.file} changes {path}, which is not there: expected it among "
                    f"{', '.join(sorted(pre_images)) or 'no files'}: this series is for another release"
                )
    _check_places(patches, pre_images)
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary, naming(Path(temporary)):
        tree = Path(temporary) / "tree"
        _lay(tree, pre_images)
        done = (
            git.run(*_APPLY, *(str(patch.file.resolve()) for patch in patches), folder=tree, isolated=True)
            if patches
            else None
        )
        if done is not None and done.returncode != 0:
            _explain(patches, pre_images, Path(temporary) / "again")
        return {
            path: (tree / path).read_bytes()
            for path in dict.fromkeys((*pre_images, *(path for patch in patches for path in patch.created)))
        }


def _check_places(patches: Sequence[Patch], pre_images: Mapping[str, bytes]) -> None:
    """Raises OverlayError where a hunk fits in two places: git would take the one that is nearer to the line in its
    header, and in another release of the series' range that may be the wrong one."""
    texts = {path: f"\n{content.decode('utf-8', 'replace')}\n" for path, content in pre_images.items()}
    for patch in patches:
        for hunk in patch.hunks:
            if not hunk.before:  # of a new file
                texts[hunk.path] = "\n".join(("", *hunk.after, ""))
                continue
            text, old = texts.get(hunk.path, ""), "\n".join(("", *hunk.before, ""))
            first = text.find(old)
            if first < 0:  # it does not fit, as git will say, or fits in a way that is told by line ends
                texts.pop(hunk.path, None)
                continue
            second = text.find(old, first + 1)
            if second >= 0:
                lines = [text.count("\n", 0, place) + 1 for place in (first, second)]
                raise OverlayError(
                    f"{patch.file}: {hunk.path}: expected one place for hunk {hunk.header}, found two, at lines "
                    f"{lines[0]} and {lines[1]}: change a line that is nowhere else with it, so that it reaches as far"
                )
            texts[hunk.path] = text[:first] + "\n".join(("", *hunk.after, "")) + text[first + len(old) :]


def failures(patches: Sequence[Patch], pre_images: Mapping[str, bytes]) -> list[str]:
    """What of `patches` does not fit, a line for each hunk: patch, path, the header of the hunk, its line.

    What fits of a patch is applied before the next one is tried, so a later line may follow from an earlier one.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary, naming(Path(temporary)):
        tree = Path(temporary) / "tree"
        _lay(tree, pre_images)
        for patch in patches:
            missing = [path for path in patch.paths if path not in patch.created and not (tree / path).is_file()]
            found += [f"{patch.file.name}: {path}: there is no such file" for path in missing]
            others = ["--exclude=" + re.sub(r"([*?[\\])", r"\\\1", path) for path in missing]
            done = git.run(*_APPLY, "--reject", *others, str(patch.file.resolve()), folder=tree, isolated=True)
            rejected = _rejected(patch, done.stderr.decode("utf-8", "replace")) if done.returncode else []
            if done.returncode and not rejected and not missing:
                said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["git apply failed"]
                rejected = [f"{patch.file.name}: {said[0].removeprefix('error: ')}"]
            found += rejected
    return found


def _rejected(patch: Patch, said: str) -> list[str]:
    """The hunks that `git apply --reject` says it has left out."""
    found, path = [], ""
    for row in said.splitlines():
        if named := re.fullmatch(r"Applying patch (.+) with \d+ rejects?\.\.\.", row):
            path = named[1]
        elif numbered := re.fullmatch(r"Rejected hunk #(\d+)\.", row):
            hunks = [hunk for hunk in patch.hunks if hunk.path == path]
            hunk = hunks[int(numbered[1]) - 1]
            found.append(f"{patch.file.name}: {path}: hunk {hunk.header} does not fit near line {hunk.start}")
    return found


def is_applied(patch: Patch, contents: Mapping[str, bytes]) -> bool:
    """Whether all that the patch changes is in these files already.

    Args:
        patch: the patch.
        contents: files by path in upstream's git tree; one that is not there lacks the change.
    """
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary, naming(Path(temporary)):
        tree = Path(temporary) / "tree"
        _lay(tree, contents)
        return (
            git.run(*_APPLY, "--reverse", "--check", str(patch.file.resolve()), folder=tree, isolated=True).returncode
            == 0
        )


_APPLY = ("apply", "--whitespace=nowarn")


def _lay(tree: Path, files: Mapping[str, bytes]) -> None:
    tree.mkdir()
    for path, content in files.items():
        file = tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _explain(patches: Sequence[Patch], pre_images: Mapping[str, bytes], tree: Path) -> None:
    """Applies the patches one by one, to say which hunk of which does not fit. Always raises OverlayError."""
    _lay(tree, pre_images)
    said = ""
    for patch in patches:
        done = git.run(*_APPLY, str(patch.file.resolve()), folder=tree, isolated=True)
        if done.returncode == 0:
            continue
        said = done.stderr.decode("utf-8", "replace").strip()
        if is_applied(patch, {path: (tree / path).read_bytes() for path in patch.paths if (tree / path).is_file()}):
            raise OverlayError(
                f"{patch.file} is applied already to {', '.join(patch.paths)}: expected the file as upstream "
                "released it: take the patch out of the series, or use the unpatched file"
            )
        failed = re.search(r"patch failed: (.+):(\d+)$", said, re.MULTILINE)
        if failed is None:
            break
        path, start = failed[1], int(failed[2])
        header = next(
            (hunk.header for hunk in patch.hunks if hunk.path == path and hunk.start == start), f"at line {start}"
        )
        expected, found = patch.before.get(path, "unknown"), git.blob_id((tree / path).read_bytes())
        raise OverlayError(
            f"{patch.file} does not fit {path}: hunk {header}: expected the blob {expected} or the same context, "
            f"found {found}: use the series of this release, or export the patch again"
        )
    raise OverlayError(
        f"{patch.file}: git apply failed: {said.splitlines()[0] if said else 'without a message'}: export the patch "
        "again"
    )
