"""An unpacked package tree: where the packages in it lie, and which pin their files are those of.

No lock names such a tree, so its files are known by their git blob ids alone. Only what the overlay exchanges is looked
at: nothing gets a version label here, so a fork may have version checks, and anything else, of its own.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from overlay.errors import OverlayError
from overlay.queue import git, images, series
from overlay.queue.lock import Exchanged, Lock, Package
from overlay.queue.series import Series

ABBREVIATED = 10
"""Digits of a blob id in messages."""

State = Literal["before", "after", "line ends", "other", "missing"]
"""How a file stands to a pin: its pre-image, its post-image, its pre-image with CRLF line ends, another, not there."""


@dataclass(frozen=True)
class Pin:
    """A release in the lock, or the commit, that has a series: the files that the overlay exchanges of it, by path in
    its wheel."""

    label: str
    series: Series
    files: Mapping[str, Exchanged]


@dataclass(frozen=True)
class Unpacked:
    """A package in the tree `tree`, in the folder `folder` of it, whatever its name is there."""

    project: str
    tree: Path
    folder: Path

    def place(self, path: str) -> Path:
        """Where in the tree the file is that has `path` in the wheel."""
        return self.folder / path.partition("/")[2]

    def read(self, path: str) -> bytes:
        """The content of a file by its path in the wheel. Raises OverlayError where there is none."""
        content = self.content(path)
        if content is None:
            raise OverlayError(f"{self.tree}: expected {self.place(path)}, found no such file")
        return content

    def content(self, path: str) -> bytes | None:
        """As `read`, but None where there is no such file, or only one behind a symbolic link to a folder."""
        place = self.place(path)
        file = self.tree / place
        return file.read_bytes() if file.is_file() and _is_real(self.tree, place.parent) else None

    def link(self, path: str) -> Path | None:
        """The outermost symbolic link to a folder that a file by its path in the wheel is behind."""
        around = reversed(self.place(path).parents)
        return next((folder for folder in around if folder != Path() and (self.tree / folder).is_symlink()), None)

    def shadow(self, path: str) -> Path | None:
        """What Python imports in place of a file by its path in the wheel: an extension module of any platform, or a
        package, goes before a source file of the same name (importlib.machinery.FileFinder)."""
        place = self.place(path)
        for other in sorted((self.tree / place.parent).iterdir()):
            extension = other.suffix in (".so", ".pyd") and other.name.partition(".")[0] == place.stem
            if extension or (other.name == place.stem and any(other.glob("__init__.*"))):
                return place.with_name(other.name)
        return None

    def state(self, path: str, pinned: Exchanged) -> State:
        """How the file `path` stands to a pin."""
        content = self.content(path)
        if content is None:
            return "missing"
        found = git.blob_id(content)
        if found in (pinned.before, pinned.after):
            return "before" if found == pinned.before else "after"
        return "line ends" if git.blob_id(content.replace(b"\r\n", b"\n")) == pinned.before else "other"


@dataclass(frozen=True)
class Match:
    """A package whose files are those of `pin`, and the images of what the overlay exchanges in it. `labels` are all
    the pins that have these files and this series."""

    package: Unpacked
    pin: Pin
    labels: tuple[str, ...]
    images: Sequence[images.Image]


def match(lock: Lock, patches: Path, tree: Path) -> list[Match]:
    """Every package of a pinned project in the tree, with the pin that its files are those of.

    Args:
        lock: the pins; those of the tests and a verified commit are as good as delivered releases.
        patches: the folder of the series.
        tree: a wheel or an sdist as it is unpacked, a folder of installed packages, a checkout, or a package itself.

    Raises:
        OverlayError: there is no such package; or one has a file that is not as in any pin, and every such file is
            named; or Python imports something else in place of a file.
    """
    pinned = {project: known for project, package in lock.packages.items() if (known := pins(patches, package))}
    matches, problems = [], []
    for _, claims in groupby(find(lock, pinned, tree), key=lambda package: package.folder):
        claimed = [
            (package, [pin for pin in pinned[package.project] if _all_in(package, pin, "before")]) for package in claims
        ]
        package, fitting = next((claim for claim in claimed if claim[1]), claimed[0])
        if fitting:
            matches.append(_matched(package, lock.packages[package.project].prefix, fitting))
        else:
            problems.append(_Problem.of(package, pinned[package.project]))
    if problems:
        elsewhere = f", or name {tree / matches[0].package.folder} to patch that alone" if matches else ""
        said = "; ".join(problem.text() for problem in problems)
        advice = next((problem for problem in problems if not problem.patched), problems[0])
        raise OverlayError(f"{tree}: {said}: {advice.advice(lock, patches)}{elsewhere}")
    return matches


def pins(patches: Path, package: Package) -> list[Pin]:
    """The pins of a project that have a series, in the order of the lock.

    Raises:
        OverlayError: a series is not sound, or changes a file that the lock does not name.
    """
    queues: dict[str, Series] = {}
    found = []
    named = [(release.version, release.series, release.files) for release in package.releases]
    if package.commit is not None:
        named.append((f"commit {package.commit.id[:12]}", package.commit.series, package.commit.files))
    for label, name, files in named:
        if name is None or not files:
            continue
        queue = queues[name] = queues.get(name) or series.read(patches / name)
        exchanged = {file.path: file for file in files}
        paths = [path.removeprefix(package.prefix) for path in queue.paths("overlay")]
        for path in paths:
            if path not in exchanged:
                raise OverlayError(
                    f"{label}: expected {path} in the lock, which {name} changes, found no such file: run overlay lock "
                    "update"
                )
        if paths:
            found.append(Pin(label, queue, {path: exchanged[path] for path in paths}))
    return found


def find(lock: Lock, pinned: Mapping[str, Sequence[Pin]], tree: Path) -> list[Unpacked]:
    """The packages in the tree, sorted by folder. One that does not have the name of its project may be of several.

    In the usual place a package is taken for one of the pinned projects whatever is in it; elsewhere, under any name,
    where it has all of the files that are exchanged, or one with a content that the lock names. Symbolic links to
    folders are not followed.

    Raises:
        OverlayError: there is none, or a folder cannot be read.
    """
    there = _holding(tree, pinned)
    usual = [(project, folder) for project in pinned for folder in _usual(lock.packages[project].prefix, project, tree)]
    found = {key for key in usual if _is_real(tree, key[1]) and (tree / key[1] / "__init__.py").is_file()}
    for (project, folder), paths in there.items():
        known = {blob for pin in pinned[project] for file in pin.files.values() for blob in (file.before, file.after)}
        contents = map(Unpacked(project, tree, folder).read, paths)
        if paths == _paths(pinned[project]) or any(git.blob_id(content) in known for content in contents):
            found.add((project, folder))
    if not found:
        linked = next((folder for _, folder in usual if (tree / folder).is_dir() and not _is_real(tree, folder)), None)
        raise OverlayError(
            f"{tree}: expected a package of {' or '.join(pinned)} in it, found none with the files that the patches "
            "change: name "
            + (f"the folder that {linked} leads to" if linked else "the folder of a package, or one that holds it")
        )
    named = {folder for project, folder in found if (tree / folder).resolve().name == project}
    return [
        Unpacked(project, tree, folder)
        for project, folder in sorted(found, key=lambda key: (key[1], list(pinned).index(key[0])))
        if folder not in named or (tree / folder).resolve().name == project
    ]


def _paths(pinned: Sequence[Pin]) -> set[str]:
    """Every file, by path in the wheel, that is exchanged in one of the pins."""
    return {path for pin in pinned for path in pin.files}


def _holding(tree: Path, pinned: Mapping[str, Sequence[Pin]]) -> dict[tuple[str, Path], set[str]]:
    """The folders in which there are files where a package of a project has those that are exchanged, and which."""
    wanted = [(project, path, path.split("/")[1:]) for project in pinned for path in _paths(pinned[project])]
    found: dict[tuple[str, Path], set[str]] = {}
    for folder, subfolders, names in os.walk(tree, onerror=_raise):
        if ".git" in subfolders:
            subfolders.remove(".git")
        for project, path, parts in wanted:
            place = [*Path(folder).relative_to(tree).parts, parts[-1]]
            if parts[-1] in names and place[-len(parts) :] == parts and Path(folder, parts[-1]).is_file():
                found.setdefault((project, Path(*place[: -len(parts)])), set()).add(path)
    return found


def _usual(prefix: str, project: str, tree: Path) -> list[Path]:
    """Where a package lies in an unpacked wheel, in a checkout, and where the tree is the package."""
    own = [Path()] if tree.resolve().name == project else []
    return [Path(project), Path(prefix, project), *own]


def _is_real(tree: Path, folder: Path) -> bool:
    """Whether no part of `folder` is a symbolic link."""
    return (tree / folder).resolve() == tree.resolve() / folder


def _raise(error: OSError) -> None:
    raise error


def _all_in(package: Unpacked, pin: Pin, state: State) -> bool:
    return all(package.state(path, file) == state for path, file in pin.files.items())


def _matched(package: Unpacked, prefix: str, fitting: Sequence[Pin]) -> Match:
    pin = fitting[0]
    for path in pin.files:
        shadow = package.shadow(path)
        if shadow is not None:
            raise OverlayError(
                f"{package.tree}: expected Python to import {package.place(path)}, found {shadow}, which it imports in "
                "its place: patch a tree without that"
            )
    made = images.make(pin.series, prefix, package.read, "overlay")
    images.check(made, list(pin.files.values()), f"{package.project} {pin.label}")
    labels = tuple(one.label for one in fitting if one.series.name == pin.series.name)
    return Match(package, pin, labels, made)


@dataclass(frozen=True)
class _Problem:
    """A package whose files are not those of one pin. `nearest` are the pins that it has most in common with, and the
    same; or all, where it has nothing in common with any."""

    package: Unpacked
    pinned: Sequence[Pin]
    nearest: Sequence[Pin]

    @classmethod
    def of(cls, package: Unpacked, pinned: Sequence[Pin]) -> "_Problem":
        states = [{path: package.state(path, file) for path, file in pin.files.items()} for pin in pinned]

        def likeness(one: Mapping[str, State]) -> tuple[int, ...]:
            known: Sequence[State] = ("before", "after", "line ends")
            return tuple(list(one.values()).count(state) for state in known)

        best = max(states, key=likeness)
        nearest = [pin for pin, one in zip(pinned, states, strict=True) if one == best or not any(likeness(best))]
        return cls(package, pinned, nearest)

    @property
    def patched(self) -> bool:
        """Whether every file is patched already."""
        return _all_in(self.package, self.nearest[0], "after")

    def text(self) -> str:
        """Each file that does not match, with the blob ids that were expected and what was found."""
        if self.patched:
            labels = ", ".join(pin.label for pin in self.nearest)
            return (
                f"{self._shown()} is patched already: it has the files of {labels} after {self.nearest[0].series.name}"
            )
        return "; ".join(
            f"{self.package.place(path)}: expected the blob {self._expected(path)}, found {self._found(path)}"
            for path in dict.fromkeys(path for pin in self.nearest for path in pin.files)
            if any(path in pin.files and self._state(path, pin) != "before" for pin in self.nearest)
        )

    def advice(self, lock: Lock, patches: Path) -> str:
        """What to do."""
        if self.patched:
            return "use it as it is"
        states = {self._state(path, pin) for pin in self.nearest for path in pin.files}
        if "line ends" in states:
            return "write the files with LF line ends (in git: core.autocrlf=false)"
        package, pinned = self.package, lock.packages[self.package.project]
        link = next(filter(None, (package.link(path) for pin in self.nearest for path in pin.files)), None)
        if link is not None:
            return f"put the folder that {link} leads to, {(package.tree / link).resolve()}, in the place of that link"
        if states & {"after", "missing"}:
            return "use a complete tree that nobody has patched yet"
        queues = series.of(patches, package.project)
        fits, _ = images.fits(queues, pinned.prefix, package.read)
        if len(fits) == 1 and package.folder == Path(pinned.prefix, package.project):
            name = fits[0][0].name
            version = next(release.version for release in pinned.releases if release.series == name)
            return (
                f"{name} applies all the same: commit the tree and use --from-git with --any-commit and "
                f"--metadata-from {package.project}=={version}"
            )
        fits, reasons = images.fits(queues, pinned.prefix, package.read, "overlay")
        if fits:
            return f"the patches in {fits[0][0].folder} apply to these files all the same: git apply them by hand"
        said = {reason.partition(": hunk ")[0] for reason in reasons.values()}
        return f"no series applies{f' ({said.pop()})' if len(said) == 1 else ''}, use the files of a pinned release"

    def _shown(self) -> str:
        return self.package.project if self.package.folder == Path() else str(self.package.folder)

    def _state(self, path: str, pin: Pin) -> State:
        return self.package.state(path, pin.files[path])

    def _expected(self, path: str) -> str:
        labels: dict[str, list[str]] = {}
        for pin in self.nearest:
            if path in pin.files:
                labels.setdefault(pin.files[path].before, []).append(pin.label)
        return " or ".join(f"{blob[:ABBREVIATED]} ({', '.join(named)})" for blob, named in labels.items())

    def _found(self, path: str) -> str:
        content = self.package.content(path)
        if content is None:
            there = (self.package.tree / self.package.place(path)).is_file()
            return "it behind a symbolic link to a folder" if there else "no such file"
        found = git.blob_id(content)[:ABBREVIATED]
        states = {pin.label: self._state(path, pin) for pin in (*self.nearest, *self.pinned) if path in pin.files}
        for label, state in states.items():
            if state == "after":
                return f"{found}, which is patched already"
            if state == "line ends":
                return f"{found}, the same with CRLF line ends"
            if state == "before":
                return f"{found}, which is that of {label}"
        return found
