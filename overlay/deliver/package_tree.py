"""A patched copy of an unpacked package tree, for its user alone: no lock names it, so it goes to `--out` and nowhere
else."""

import filecmp
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name

from overlay.deliver import output, record
from overlay.deliver.apply import check_target
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import package_tree
from overlay.queue.lock import Lock

_COMPILED = "__pycache__"
"""The folder of what Python has compiled (PEP 3147)."""


class _Present(Exception):
    """The copy is there: another run has made it since this one looked."""


def from_tree(lock: Lock, root: Path, tree: Path, out: Path) -> None:
    """Writes a copy of a package tree in which the files that the overlay exchanges are patched.

    Modes, times and symbolic links are kept. The RECORD of an installed package or unpacked wheel (PEP 376) names the
    new hashes, and what Python had compiled of the old files (PEP 3147) is left out. Where other packages are installed
    beside it, only those that are patched are copied, with the metadata whose RECORD lists the files or, where none
    does, that of the project's name.

    Args:
        lock: the pins.
        root: the checkout of this project, which holds `patches/`.
        tree: the unpacked tree; nothing in it changes.
        out: where the copy goes. It may be there if it is empty, or holds just what would be written.

    Raises:
        OverlayError: the files are not those of a pin, or `out` is taken. Nothing is written then.
    """
    _check_places(tree, out)
    check_target(out, root)
    matches = package_tree.match(lock, root / "patches", tree)
    files = {one.package.place(image.path): image.after for one in matches for image in one.images}
    copy = _Copy.of(tree, [one.package for one in matches], files)
    for one in matches:
        say(
            f"{tree / one.package.folder}: the files of {one.package.project} {', '.join(one.labels)}, "
            f"{one.pin.series.name} fits; no lock names this tree, so its copy is for you alone"
        )
    if not _written(copy, out):
        say(f"{out} is this copy already")
        return
    for path in files:
        say(f"patched {out / path}")
    only = "" if copy.parts is None else f", with {', '.join(sorted(map(str, copy.parts)))} alone"
    say(f"wrote {out}{only}")


def _written(copy: "_Copy", out: Path) -> bool:
    """Writes the copy to `out`; False where it is there, which is asked again under the lock: two may run at once."""
    if copy.is_at(out):
        return False
    try:
        with output.replaced(out, lambda _: False) as staging:
            if copy.is_at(out):
                raise _Present
            copy.write(staging)
    except _Present:
        return False
    return True


def _check_places(tree: Path, out: Path) -> None:
    if not tree.is_dir():
        found = "a file: unpack it first" if tree.exists() else "no such folder: name one that is there"
        raise OverlayError(f"expected the folder of an unpacked package at {tree}, found {found}")
    here, there = tree.resolve(), Path(os.path.realpath(out))
    if here in (there, *there.parents) or there in here.parents:
        raise OverlayError(
            f"{out}: expected a folder outside of {tree}, which does not change, found one inside or around it: name "
            "another with --out"
        )


@dataclass(frozen=True)
class _Copy:
    """What the copy of `tree` holds; all paths are relative to it.

    `files` are those that get another content, `parts` the files and folders that are copied, None for all of them.
    """

    tree: Path
    files: Mapping[Path, bytes]
    parts: frozenset[Path] | None

    @classmethod
    def of(cls, tree: Path, packages: Iterable[package_tree.Unpacked], files: Mapping[Path, bytes]) -> "_Copy":
        """The copy in which `files` are exchanged, which belong to `packages`."""
        records: dict[Path, bytes] = {}
        parts: set[Path] = set()
        whole = False
        for package in packages:
            project, folder = canonicalize_name(package.project), package.folder
            place, installed = _installed(tree, folder)
            updated = {one: new for one in installed if (new := _updated_record(tree, one, project, files)) is not None}
            records |= {one / "RECORD": new for one, new in updated.items()}
            own = list(updated) or [one for one in installed if _project(tree / one) == project]
            beside = own or any(
                folder in path.parents for one in installed for path, _ in _rows(tree, one, project, [folder])
            )
            whole = whole or not beside or len(own) == len(installed)
            parts |= {place.joinpath(*folder.relative_to(place).parts[:1]), *own}
        return cls(tree, {**files, **records}, None if whole else frozenset(parts))

    def write(self, target: Path) -> None:
        """Writes it into the empty folder `target`.

        Raises:
            OverlayError: the tree holds something that is no file, folder or link.
        """
        folders = []
        for path, entry in self._entries():
            copy = target / path
            if path in self.files:
                copy.write_bytes(self.files[path])
                shutil.copymode(entry.path, copy)
            elif entry.is_symlink():
                copy.symlink_to(Path(entry.path).readlink())
                shutil.copystat(entry.path, copy, follow_symlinks=False)
            elif entry.is_dir():
                copy.mkdir()
                folders.append((entry.path, copy))
            elif entry.is_file():
                shutil.copy2(entry.path, copy)
            else:
                raise OverlayError(
                    f"{entry.path}: expected a file, a folder or a link, found a pipe, a socket or a device: take it "
                    "out of the tree"
                )
        for source, copy in reversed(folders):  # last: a folder that is read-only takes no files
            shutil.copystat(source, copy)

    def is_at(self, out: Path) -> bool:
        """Whether `out` is this copy; False where it is empty or not there.

        Raises:
            OverlayError: it holds something else.
        """
        if not out.is_dir() or not any(out.iterdir()):
            return False
        other = self.difference(out)
        if other is not None:
            raise OverlayError(
                f"{out}: expected a folder that is empty or not there, or this very copy, found something else "
                f"({other}): remove it, or name another with --out"
            )
        return True

    def difference(self, other: Path) -> Path | None:
        """A path at which `other` is not this copy. What Python has compiled there since is not looked at."""
        mine, theirs = (
            {path: entry for path, entry in entries if _COMPILED not in path.parts}
            for entries in (self._entries(), _entries(other))
        )
        for path in {**mine, **theirs}:
            if path not in mine or path not in theirs or not self._alike(path, mine[path], theirs[path]):
                return path
        return None

    def _alike(self, path: Path, mine: os.DirEntry[str], other: os.DirEntry[str]) -> bool:
        if path not in self.files and mine.is_symlink():
            return other.is_symlink() and Path(mine.path).readlink() == Path(other.path).readlink()
        modes = mine.stat().st_mode, other.stat(follow_symlinks=False).st_mode
        if modes[0] != modes[1] or not stat.S_ISREG(modes[0]):
            return modes[0] == modes[1]
        if path in self.files:
            return Path(other.path).read_bytes() == self.files[path]
        return filecmp.cmp(mine.path, other.path, shallow=False)

    def _entries(self) -> Iterator[tuple[Path, os.DirEntry[str]]]:
        return _entries(self.tree, lambda path: not _is_stale(path, self.files) and self._is_part(path))

    def _is_part(self, path: Path) -> bool:
        return self.parts is None or any(
            part == path or part in path.parents or path in part.parents for part in self.parts
        )


def _entries(
    tree: Path, wanted: Callable[[Path], bool] = lambda _: True, inside: Path = Path()
) -> Iterator[tuple[Path, os.DirEntry[str]]]:
    """Everything in `tree` that is wanted, by its path in it, a folder before what is in it."""
    for entry in os.scandir(tree / inside):
        path = inside / entry.name
        if wanted(path):
            yield path, entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(tree, wanted, path)


def _is_stale(path: Path, files: Iterable[Path]) -> bool:
    """Whether `path` is what Python has compiled of one of `files` (PEP 3147)."""
    return path.parent.name == _COMPILED and any(
        path.parent.parent == file.parent and path.name.startswith(f"{file.stem}.") for file in files
    )


def _installed(tree: Path, folder: Path) -> tuple[Path, list[Path]]:
    """The nearest folder around a package that has metadata of installed packages in it, and these.

    They are `.dist-info` folders (PEP 376), and `.egg-info` folders and files that have a version in their name: one
    without is what setuptools leaves in sources.
    """
    for place in folder.parents:
        found = [path for path in (tree / place).glob("*.dist-info") if path.is_dir()]
        found += (tree / place).glob("*-*.egg-info")
        if found:
            return place, sorted(place / path.name for path in found)
    return Path(), []


def _project(metadata: Path) -> str:
    """The canonical name (PEP 503) of the project that metadata is of: as it says, or as it is named."""
    for file in (metadata / "METADATA", metadata / "PKG-INFO", metadata):
        if file.is_file() and (name := BytesHeaderParser().parsebytes(file.read_bytes())["Name"]):
            return canonicalize_name(str(name).strip())
    return canonicalize_name(metadata.name.partition("-")[0])


def _rows(tree: Path, metadata: Path, project: str, wanted: Iterable[Path]) -> list[tuple[Path, list[str]]]:
    """The rows of the RECORD in `metadata`, each with its path in the tree.

    No rows where it does not name any of `wanted`, as most of what is installed beside a package, or where it
    cannot be parsed and is not of `project`.

    Raises:
        OverlayError: the RECORD of `project` cannot be parsed.
    """
    listing = tree / metadata / "RECORD"
    content = listing.read_bytes() if listing.is_file() else b""
    if not any(os.fsencode(path.name) in content for path in wanted):
        return []
    try:
        rows = record.parse(content, str(metadata))
    except OverlayError:
        if _project(tree / metadata) == project:
            raise
        return []
    return [(Path(os.path.normpath(metadata.parent / row[0])), row) for row in rows]


def _updated_record(tree: Path, metadata: Path, project: str, files: Mapping[Path, bytes]) -> bytes | None:
    """The RECORD in `metadata` with the hashes of `files`; None where it lists none of them."""
    rows = _rows(tree, metadata, project, files)
    if not any(path in files for path, _ in rows):
        return None
    return record.write(
        (record.row(row[0], files[path]) if path in files else row for path, row in rows if not _is_stale(path, files)),
        "\r\n" if b"\r\n" in (tree / metadata / "RECORD").read_bytes() else "\n",
    )
