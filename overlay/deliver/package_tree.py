"""A patched copy of an unpacked package tree, for its user alone: no lock names it, so it goes to `--out` and nowhere
else."""

import filecmp
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.deliver import output, record
from overlay.deliver.apply import check_target
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import package_tree
from overlay.queue.lock import Lock

_COMPILED = "__pycache__"
"""The folder of what Python has compiled (PEP 3147)."""


def from_tree(lock: Lock, root: Path, tree: Path, out: Path) -> None:
    """Writes a copy of a package tree in which the files that the overlay exchanges are patched.

    Modes, times and symbolic links are kept. The RECORD of an installed package or unpacked wheel (PEP 376) names the
    new hashes, and what Python had compiled of the old files (PEP 3147) is left out. Where other packages are installed
    beside it, only those that are patched are copied, with their metadata.

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
    copy = _Copy.of(tree, [one.package.folder for one in matches], files)
    other = copy.difference(out) if out.is_dir() and any(out.iterdir()) else None
    if other is not None:
        raise OverlayError(
            f"{out}: expected a folder that is empty or not there, or this very copy, found something else ({other}): "
            "remove it, or name another with --out"
        )
    for one in matches:
        say(
            f"{tree / one.package.folder}: the files of {one.package.project} {', '.join(one.labels)}, "
            f"{one.pin.series.name} fits; no lock names this tree, so its copy is for you alone"
        )
    if out.is_dir() and any(out.iterdir()):
        say(f"{out} is this copy already")
        return
    with output.replaced(out, lambda _: False) as staging:
        copy.write(staging)
    for path in files:
        say(f"patched {out / path}")
    only = "" if copy.parts is None else f", with {', '.join(sorted(map(str, copy.parts)))} alone"
    say(f"wrote {out}{only}")


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
    def of(cls, tree: Path, folders: Iterable[Path], files: Mapping[Path, bytes]) -> "_Copy":
        """The copy in which `files` are exchanged, which belong to the packages in `folders`."""
        records: dict[Path, bytes] = {}
        parts: set[Path] = set()
        alone = False
        for folder in folders:
            place, listed = _metadata(tree, folder)
            updated = {name: new for name in listed if (new := _updated_record(tree, name, files)) is not None}
            records |= {name / "RECORD": new for name, new in updated.items()}
            alone = alone or len(updated) == len(listed)
            parts |= {place / folder.relative_to(place).parts[0] if listed else folder, *updated}
        return cls(tree, {**files, **records}, None if alone else frozenset(parts))

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


def _metadata(tree: Path, folder: Path) -> tuple[Path, list[Path]]:
    """The nearest folder around a package that has `.dist-info` folders (PEP 376), and these."""
    for place in folder.parents:
        names = sorted(path.name for path in (tree / place).glob("*.dist-info") if path.is_dir())
        if names:
            return place, [place / name for name in names]
    return Path(), []


def _updated_record(tree: Path, metadata: Path, files: Mapping[Path, bytes]) -> bytes | None:
    """The RECORD in the `.dist-info` folder `metadata` with the hashes of `files`; None where it lists none of them."""
    listing = tree / metadata / "RECORD"
    content = listing.read_bytes() if listing.is_file() else b""
    if not any(os.fsencode(path.name) in content for path in files):
        return None  # so it is with most of what is installed beside the package
    rows = [(Path(os.path.normpath(metadata.parent / row[0])), row) for row in record.parse(content, str(metadata))]
    if not any(path in files for path, _ in rows):
        return None
    return record.write(
        (record.row(row[0], files[path]) if path in files else row for path, row in rows if not _is_stale(path, files)),
        "\r\n" if b"\r\n" in content else "\n",
    )
