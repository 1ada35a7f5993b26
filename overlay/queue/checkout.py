"""A git checkout of an upstream project, read through git: what is committed, never the files in the user's work
tree."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError
from overlay.queue import git, images, series
from overlay.queue.lock import Lock, Package, check_apart, relative_path

MAXIMUM_LISTING = 16 << 20
"""Bytes that the names of all files may have: those of the pinned projects have a twentieth of that."""


@dataclass(frozen=True)
class Checkout:
    """A checkout and one of its commits (40 hex digits)."""

    folder: Path
    commit: str

    @classmethod
    def open(cls, folder: Path, revision: str = "HEAD") -> "Checkout":
        """The checkout at `folder`, at `revision`: HEAD or a commit id, which may be abbreviated.

        Raises:
            OverlayError: there is no git repository, git distrusts it, or it has no such commit.
        """
        if not folder.is_dir():
            raise OverlayError(f"expected a git checkout at {folder}, found no folder: name the folder of one")
        found = git.run("rev-parse", "--git-dir", folder=folder)
        if found.returncode != 0:
            said = found.stderr.decode("utf-8", "replace").removeprefix("fatal: ").partition("\n")[0]
            if "dubious ownership" in said:
                raise OverlayError(
                    f"{folder} belongs to another user, so git does not trust it: "
                    f"git config --global --add safe.directory {folder.resolve()}"
                )
            raise OverlayError(f"expected a git checkout at {folder}, found none ({said}): name the folder of one")
        # An id as git describe writes it is always a commit's, even where a branch has the id for its name.
        name = revision if revision == "HEAD" else f"commit-0-g{revision}"
        done = git.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", folder=folder)
        if done.returncode != 0:
            raise OverlayError(
                f"{folder}: expected the commit {revision}, found no such commit: fetch it first, or name another "
                "checkout"
            )
        return cls(folder, done.stdout.decode("ascii").strip())

    def read(self, path: str) -> bytes:
        """The content of the file `path` at the commit. Raises OverlayError where there is none."""
        done = git.run("cat-file", "blob", f"{self.commit}:{path}", folder=self.folder)
        if done.returncode != 0:
            raise OverlayError(
                f"{self.folder}: expected {path} at {self.commit[:12]}, found no such file: this is another "
                "project or another time of it"
            )
        return done.stdout

    def has(self, path: str) -> bool:
        """Whether the commit has a file or folder at `path`."""
        return bool(git.run("ls-tree", "--full-tree", self.commit, "--", path, folder=self.folder).stdout)

    def files(self, folder: str) -> dict[str, bytes]:
        """Every regular file under `folder` ("" for the root) at the commit, by its path from the root.

        Raises:
            OverlayError: a path is not safe to unpack (`relative_path`), or an entry is a link or a submodule.
        """
        modes = self._modes(folder)
        for path, mode in modes.items():
            if not mode.startswith("100"):
                raise OverlayError(
                    f"{self.folder}: {path}: expected a regular file, found mode {mode}: a wheel can hold no links "
                    "and no submodules"
                )
        return self._contents(modes)

    def export(self, folder: Path) -> None:
        """Writes everything at the commit, symbolic links too, into the new folder `folder`.

        Raises:
            OverlayError: a path is not safe to unpack (`relative_path`), a link leads out of the tree, or an entry is a
                submodule.
        """
        modes = self._modes("")
        for path, content in self._contents(modes).items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if modes[path] != "120000":
                file.write_bytes(content)
                file.chmod(0o755 if modes[path] == "100755" else 0o644)
                continue
            target = os.fsdecode(content)
            leads = os.path.normpath(Path("/tree", path).parent / target)
            if not f"{leads}/".startswith("/tree/"):
                raise OverlayError(f"{self.folder}: {path}: expected a link inside the tree, found one to {target!r}")
            file.symlink_to(target)

    def _modes(self, folder: str) -> dict[str, str]:
        done = git.run(
            *("ls-tree", "-r", "-z", "--full-tree", self.commit, "--", *filter(None, [folder])),
            folder=self.folder,
            maximum=MAXIMUM_LISTING,
        )
        modes: dict[str, str] = {}
        for row in filter(None, done.stdout.split(b"\0")):
            mode, _, path = row.partition(b"\t")
            try:
                modes[relative_path(path.decode("utf-8"))] = mode[:6].decode("ascii")
            except ValueError as error:
                raise OverlayError(
                    f"{self.folder} at {self.commit[:12]}: {error}, found {os.fsdecode(path)!r}: this tree cannot be "
                    "made into a wheel"
                ) from None
        try:
            check_apart(modes)
        except ValueError as error:
            raise OverlayError(
                f"{self.folder} at {self.commit[:12]}: expected each name once, found that {error}: this tree cannot "
                "be made into a wheel"
            ) from None
        return modes

    def _contents(self, modes: Mapping[str, str]) -> dict[str, bytes]:
        submodule = next((path for path, mode in modes.items() if mode == "160000"), None)
        if submodule is not None:
            raise OverlayError(
                f"{self.folder}: {submodule}: expected a file, found a submodule, whose content git does not have "
                "here: use --metadata-from"
            )
        wanted = "".join(f"{self.commit}:{path}\n" for path in modes)
        stream = git.run("cat-file", "--batch", folder=self.folder, stdin=wanted.encode("utf-8")).stdout
        contents, position = [], 0
        while position < len(stream):
            end = stream.index(b"\n", position)
            size = stream[position:end].rsplit(b" ", 1)[1]
            if not size.isdigit():
                break
            contents.append(stream[end + 1 : end + 1 + int(size)])
            position = end + 2 + int(size)
        if len(contents) != len(modes):
            missing = list(modes)[len(contents)]
            raise OverlayError(
                f"{self.folder}: expected the content of {missing} at {self.commit[:12]}, found that git does not have "
                "it: fetch it first (git fetch --refetch), or name another checkout"
            )
        return dict(zip(modes, contents, strict=True))

    def changed(self, paths: Iterable[str]) -> list[str]:
        """Which of `paths` differ in the user's work tree from the commit."""
        specs = [f":(top,literal){path}" for path in paths]  # from the root, wherever in the checkout `folder` is
        where = git.run("rev-parse", "--git-path", "index", folder=self.folder).stdout.removesuffix(b"\n")
        index = self.folder / os.fsdecode(where)
        if not index.is_file():
            return []  # nothing is checked out
        with tempfile.TemporaryDirectory(prefix="overlay-") as temporary:
            copy = Path(temporary, "index")  # git diff would write what it finds of the files into the user's own
            shutil.copyfile(index, copy)
            done = git.run(
                "diff",
                "--name-only",
                "--ignore-submodules",
                "-z",
                self.commit,
                "--",
                *specs,
                folder=self.folder,
                index=copy,
            )
        return [path for path in done.stdout.decode("utf-8").split("\0") if path]


def project_of(lock: Lock, checkout: Checkout) -> tuple[str, Package]:
    """Which of the pinned projects this is a checkout of. Raises OverlayError where it is none of them."""
    for name, package in lock.packages.items():
        if checkout.has(f"{package.prefix}{name}/__init__.py"):
            return name, package
    looked = ", ".join(f"{package.prefix}{name}" for name, package in lock.packages.items())
    raise OverlayError(
        f"{checkout.folder}: expected a checkout of one of {', '.join(lock.packages)}, found none of {looked}: "
        "name the root of one"
    )


def fitting(
    patches: Path, project: str, package: Package, checkout: Checkout
) -> tuple[series.Series, list[images.Image]]:
    """The one series of the project that fits the commit, and its images.

    Raises:
        OverlayError: none fits (says why each does not), or more than one.
    """
    fits, reasons = images.fits(
        series.of(patches, project), package.prefix, lambda path: checkout.read(package.prefix + path)
    )
    if len(fits) == 1:
        return fits[0]
    if not fits:
        raise OverlayError(
            f"{checkout.folder} at {checkout.commit[:12]}: expected one series that fits, found none: "
            f"{', '.join(f'{name} ({why})' for name, why in reasons.items()) or 'there is no series of this project'}: "
            f"add one for it under {patches}"
        )
    raise OverlayError(
        f"{checkout.folder} at {checkout.commit[:12]}: expected one series that fits, found "
        f"{', '.join(queue.name for queue, _ in fits)}: narrow one of them"
    )
