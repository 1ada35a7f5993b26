"""The user's checkout, and the branch in a new work tree of it.

The user's own work tree, branch, index, stash and configuration stay as they are; what is new in the repository is the
branch, the administration of the work tree (git-worktree(1)), and objects.
"""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError
from overlay.pull_request import own
from overlay.queue.checkout import Checkout

_UNDER_WAY = {
    "rebase-merge": "rebase",
    "rebase-apply": "rebase or git am",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}


@dataclass(frozen=True)
class Target:
    """Where the pull request is made: a branch, and the folder of its work tree."""

    checkout: Path
    branch: str
    tree: Path

    @property
    def text(self) -> Path:
        """The file that the pull request's text is written to, beside the work tree."""
        return self.tree.with_name(f"{self.tree.name}.md")

    @property
    def undo(self) -> tuple[str, ...]:
        """The commands that take everything away again."""
        git = ["git", "-C", str(self.checkout)]
        commands = (
            # Twice: git has locked a work tree whose making was killed
            [*git, "worktree", "remove", "--force", "--force", str(self.tree)],
            [*git, "branch", "-D", self.branch],
            ["rm", "-f", str(self.text)],
        )
        return tuple(map(shlex.join, commands))


def check(folder: Path) -> None:
    """Checks that nothing is changed, staged or under way in the checkout.

    Untracked files are fine: a new work tree does not have them. A bare repository has no files at all.

    Raises:
        OverlayError: something is.
    """
    for name, what in _UNDER_WAY.items():
        if (folder / own.out("rev-parse", "--git-path", name, folder=folder)).exists():
            raise OverlayError(
                f"{folder}: expected a clean checkout, found a {what} under way: finish or abort it first"
            )
    if own.out("rev-parse", "--is-bare-repository", folder=folder) == "true":
        return
    # Without the option git status would write what it finds of the files into the user's index
    done = own.run(
        "--no-optional-locks", "status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", folder=folder
    )
    if done.returncode != 0:
        raise OverlayError(f"{folder}: git status failed: {own.said(done)}: mend that first")
    changed = [row[3:].decode("utf-8", "replace") for row in done.stdout.split(b"\0") if row]
    if changed:
        raise OverlayError(
            f"{folder}: expected a clean checkout, found changes of {changed[0]}"
            f"{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}: commit or stash them (git stash), or use "
            "a fresh clone"
        )


def base(folder: Path, name: str) -> Checkout:
    """The checkout at the commit that `name` means: a branch, a tag, a commit id, or a branch of one remote.

    Raises:
        OverlayError: there is none.
    """
    meant = {_commit(folder, f"refs/{kind}/{name}") for kind in ("heads", "tags")} - {""}
    if len(meant) > 1:
        raise OverlayError(
            f"{folder}: --base: expected one commit for {name!r}, found a branch and a tag: name one of "
            f"refs/heads/{name} and refs/tags/{name}"
        )
    done = _commit(folder, name)
    if not done:
        remote = own.out("for-each-ref", "--format=%(refname)", f"refs/remotes/*/{name}", folder=folder).splitlines()
        if len(remote) != 1:
            named = f", found {' and '.join(ref.removeprefix('refs/remotes/') for ref in remote)}" if remote else ""
            raise OverlayError(
                f"{folder}: --base: expected a branch, tag or commit {name!r}{named or ', found none'}: "
                f"{'name one of these' if remote else f'fetch it first (git -C {folder} fetch origin {name})'}"
            )
        done = _commit(folder, remote[0])
    return Checkout(folder, done)


def _commit(folder: Path, name: str) -> str:
    return own.out("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", folder=folder)


def check_free(target: Target) -> None:
    """Checks that nothing would be overwritten.

    Raises:
        OverlayError: the branch, the folder or the file of the text is there already; says whether an earlier run left
            it, and how to go on or to take it away.
    """
    if own.run("check-ref-format", "--branch", target.branch, folder=target.checkout).returncode != 0:
        raise OverlayError(f"--branch: expected a name for a branch, found {target.branch!r}: name another")
    if not target.tree.parent.is_dir():
        raise OverlayError(
            f"{target.tree}: expected its parent folder, found none: make it, or name another with --tree"
        )
    if under_way(target):
        raise OverlayError(
            f"{target.tree}: the conflict of the run before is open there still: mend it and git am --continue in that "
            f"folder, or take everything away: {'; '.join(target.undo)}"
        )
    if own.out("rev-parse", "--verify", "--quiet", f"refs/heads/{target.branch}", folder=target.checkout):
        raise OverlayError(
            f"{target.checkout}: expected no branch {target.branch}, found one, of an earlier run perhaps: name "
            f"another with --branch, or take it away: {'; '.join(target.undo)}"
        )
    for place in (target.tree, target.text):
        if place.exists() or place.is_symlink():
            raise OverlayError(
                f"{place}: expected nothing there, found a {'folder' if place.is_dir() else 'file'}: move it away, or "
                "name another place with --tree"
            )


def under_way(target: Target) -> bool:
    """Whether a `git am` of this branch has stopped in its work tree."""
    place = own.out("rev-parse", "--git-path", "rebase-apply", folder=target.tree) if target.tree.is_dir() else ""
    if not place or not (target.tree / place / "applying").exists():
        return False
    return own.out("symbolic-ref", "HEAD", folder=target.tree) == f"refs/heads/{target.branch}"


@contextmanager
def made(target: Target, base: Checkout) -> Iterator[None]:
    """Makes the branch at the base, in its new work tree; an exception inside takes both away.

    Raises:
        OverlayError: git cannot make them.
    """
    try:
        done = own.run(
            *("worktree", "add", "--quiet", "--no-track", "-b", target.branch, str(target.tree), base.commit),
            folder=target.checkout,
        )
        if done.returncode != 0:
            lazily = "not allowed" in own.said(done)
            todo = (
                "this is a partial clone, and nothing is fetched here: check the commit out once, and run this again"
                if lazily
                else "mend that and run this again"
            )
            raise OverlayError(f"{target.checkout}: git worktree add failed: {own.said(done)}: {todo}")
        yield
    except BaseException:
        own.run("worktree", "remove", "--force", "--force", str(target.tree), folder=target.checkout)
        shutil.rmtree(target.tree, ignore_errors=True)  # where git had not got as far as to know of it
        own.run(
            "update-ref", "-d", f"refs/heads/{target.branch}", folder=target.checkout
        )  # git branch -D writes config
        raise
