"""A series as commits: a git repository of upstream's files with a commit for each patch, and back.

The user's own configuration and attributes, and what of the repository's says how a diff or a patch looks, change
nothing of what is made here; only `changed` looks at the work tree as the user's git does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from overlay.errors import OverlayError
from overlay.queue import git

SIGNATURE = "modeling-overlay"
"""What a patch ends with, in the place of git's version."""

CONTEXT = 3
"""Lines around a change in a new patch."""

ASIDE = "Kept-Aside"
"""The trailer of an empty commit that holds the place of a patch, whose file it names."""

_AM = ("am", "--quiet", "--keep-cr", "--keep-non-patch", "--committer-date-is-author-date")
_DIFF = ("--full-index", "--no-renames", "--diff-algorithm=myers", "--inter-hunk-context=0", "--indent-heuristic")
_IDENTITY = ("-c", f"user.name={SIGNATURE}", "-c", f"user.email={SIGNATURE}@users.noreply.github.com")
_SETTINGS = (
    "-c", "diff.noprefix=false", "-c", "diff.orderFile=/dev/null", "-c", "diff.suppressBlankEmpty=false",
    "-c", "i18n.commitEncoding=UTF-8", "-c", "i18n.logOutputEncoding=UTF-8",
)  # fmt: skip
"""Against what the configuration of the repository itself may say; `_FORMAT` too."""

_FORMAT = (
    "--stdout", "--zero-commit", "-N", "--no-encode-email-headers", "--subject-prefix=PATCH", "--no-signoff",
    "--no-base", "--no-cover-letter", "--no-attach", "--no-thread", "--no-add-header", "--no-to", "--no-cc",
    "--no-from", "--no-notes", "--src-prefix=a/", "--dst-prefix=b/", f"--signature={SIGNATURE}",
)  # fmt: skip
_LAST_UPDATE = re.compile(r"^Last-Update: *(\S*)[ \t]*$", re.MULTILINE)
_UNFINISHED = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or git am",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "BISECT_LOG": "a bisection",
}


@dataclass(frozen=True)
class Change:
    """What a commit does to one file: git's letter for it (`A`, `M`, `D`, `T`), the mode after it, and the blob ids
    before and after."""

    kind: str
    mode: str
    before: str
    after: str


@dataclass(frozen=True)
class Commit:
    """A commit: its id, that of its tree and those of its parents, its author (`NAME <EMAIL>`) and his time (seconds
    since 1970), its message, and what it changes, by path."""

    id: str
    tree: str
    parents: tuple[str, ...]
    author: str
    time: int
    message: str
    changes: Mapping[str, Change]

    @property
    def parent(self) -> str:
        """The id of its only parent."""
        (only,) = self.parents
        return only

    @property
    def subject(self) -> str:
        """The first paragraph of the message, in one line."""
        return " ".join(self.message.strip("\n").partition("\n\n")[0].splitlines())

    @property
    def title(self) -> str:
        """The commit, for messages."""
        return f"commit {self.id[:12]} ({self.subject})"

    @property
    def aside(self) -> str | None:
        """The file of the patch whose place it holds."""
        found = re.findall(rf"^{ASIDE}: *(\S+) *$", self.message, re.MULTILINE)
        return found[-1] if found else None

    @property
    def last_update(self) -> str:
        """What its trailer says, or nothing."""
        found = _LAST_UPDATE.findall(self.message)
        return found[-1] if found else ""

    def dated(self, day: str) -> "Commit":
        """The commit with `day` in the trailer `Last-Update`, where there is one."""
        rows = list(_LAST_UPDATE.finditer(self.message))
        if not rows:
            return self
        start, end = rows[-1].span()
        return replace(self, message=f"{self.message[:start]}Last-Update: {day}{self.message[end:]}")

    def same(self, other: "Commit") -> bool:
        """Whether the two say and do the same, whatever their `Last-Update` and their ids."""
        return (self.author, self.time, self.dated("").message.strip(), self.changes) == (
            other.author,
            other.time,
            other.dated("").message.strip(),
            other.changes,
        )


@dataclass(frozen=True)
class WorkTree:
    """A git repository in `folder`, with its files beside it."""

    folder: Path

    def git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """What git prints. Raises OverlayError where it fails."""
        done = self._run(*arguments, stdin=stdin)
        if done[0] != 0:
            said = " ".join(done[2].decode("utf-8", "replace").split())
            raise OverlayError(f"{self.folder}: git {arguments[0]} failed: {said}: mend that and run this again")
        return done[1]

    def _run(self, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        place = ("--git-dir", ".git", "--work-tree", ".", "-c", "core.quotePath=false", *_SETTINGS, *_IDENTITY)
        done = git.run(*place, *arguments, folder=self.folder, isolated=True, stdin=stdin)
        return done.returncode, done.stdout, done.stderr

    @classmethod
    def create(cls, folder: Path, files: Mapping[str, bytes], message: str) -> "WorkTree":
        """A new repository in the empty folder `folder`, with one commit of `files`, by path."""
        tree = cls(folder)
        tree.git("init", "--quiet", "--template=", "--initial-branch=main")
        for path, content in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        # What a patch does to line ends is nobody else's business: the user's settings must not exchange them.
        (folder / ".git" / "info").mkdir(exist_ok=True)
        (folder / ".git" / "info" / "attributes").write_text("* -text\n", encoding="utf-8")
        (folder / ".git" / "info" / "exclude").write_text("__pycache__/\n", encoding="utf-8")
        tree.git("add", "--all", "--force")
        tree.git("commit", "--quiet", "--allow-empty", "--message", message)
        return tree

    def take(self, *patches: Path) -> bool:
        """Makes commits of patches, by `git am`. False where one does not fit; those before it are taken."""
        if self._run(*_AM, *(str(patch.resolve()) for patch in patches))[0] == 0:
            return True
        self._run("am", "--quit")
        return False

    def hold_place(self, file: str, subject: str, why: str) -> None:
        """An empty commit in the place of a patch that cannot be one here."""
        said = (
            f"[aside] {subject}\n\n{why} So this patch stays as it is, and this empty commit holds its place: "
            f"move it or drop it, and change the patch by hand.\n\n{ASIDE}: {file}\n"
        )
        self.git("commit", "--quiet", "--allow-empty", "--message", said)

    def head(self) -> str:
        """The id of the commit that is checked out."""
        return self.git("rev-parse", "--verify", "HEAD^{commit}").decode("ascii").strip()

    def commits(self, base: str) -> list[Commit]:
        """The commits from `base` (not with it) to HEAD, oldest first.

        Raises:
            OverlayError: HEAD does not come from `base`.
        """
        if self._run("merge-base", "--is-ancestor", base, "HEAD")[0] != 0:
            raise OverlayError(
                f"{self.folder}: expected commits on top of upstream's files ({base[:12]}), found that HEAD does not "
                "come from them: check out the branch with your commits"
            )
        form = "--format=%x01%H%x00%T%x00%P%x00%an <%ae>%x00%at%x00%B%x00"
        listed = self.git(
            "log", "--reverse", "--topo-order", "--raw", "-z", "--no-renames", "--no-abbrev", form, f"{base}..HEAD"
        )
        each = re.split(
            rb"\x01(?=[0-9a-f]{40}\0[0-9a-f]{40}\0)", listed
        )  # a message has no NUL, but any other character
        return [_commit(row.decode("utf-8", "surrogateescape")) for row in each[1:]]

    def blobs(self) -> dict[str, str]:
        """The blob ids of the files at HEAD, by path."""
        listed = self.git("ls-tree", "-r", "-z", "HEAD").decode("utf-8", "surrogateescape").split("\0")
        return {path: head.split()[2] for head, _, path in (row.partition("\t") for row in listed if row)}

    def diff(self, commit: Commit, context: int) -> str:
        """The diff of a commit without what only says where: blob ids, line numbers, the section of a hunk."""
        raw = self.git("diff-tree", "-p", "--no-commit-id", *_DIFF, f"-U{context}", commit.id)
        return re.sub(r"^(?:index .*\n|@@ -[0-9, +]+ @@.*)", "", raw.decode("utf-8", "surrogateescape"), flags=re.M)

    def export(self, commit: Commit, context: int) -> bytes:
        """The commit as a patch: no commit id, its date in UTC, full blob ids, `context` lines around a change."""
        rows = [f"tree {commit.tree}", f"parent {commit.parent}"]
        rows += [f"{who} {commit.author} {commit.time} +0000" for who in ("author", "committer")]
        content = "\n".join(rows) + f"\n\n{commit.message}"
        made = self.git(
            "hash-object", "-t", "commit", "-w", "--stdin", stdin=content.encode("utf-8", "surrogateescape")
        )
        return self.git("format-patch", *_FORMAT, *_DIFF, f"-U{context}", "-1", made.decode("ascii").strip())

    def slug(self, commit: Commit) -> str:
        """What git names the file of its patch by, in lower case."""
        return (
            self.git("show", "-s", "--format=%f", commit.id).decode("utf-8").strip().lower()[:52].strip("-.") or "patch"
        )

    def unfinished(self) -> str | None:
        """What is in progress there: a rebase, a merge."""
        return next((what for name, what in _UNFINISHED.items() if (self.folder / ".git" / name).exists()), None)

    def changed(self) -> list[str]:
        """The files that are changed and not committed, or new and not known to git."""
        done = git.run("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", folder=self.folder)
        if done.returncode != 0:
            said = " ".join(done.stderr.decode("utf-8", "replace").split())
            raise OverlayError(f"{self.folder}: git status failed: {said}: mend that and run this again")
        return [row[3:] for row in done.stdout.decode("utf-8", "surrogateescape").split("\0") if row]

    def other_work(self, known: str) -> list[str]:
        """Branches and stashes that have commits which `known` does not have."""
        listed = self.git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/stash").decode("utf-8").split()
        return [ref for ref in listed if self.git("rev-list", "--max-count=1", ref, f"^{known}")]


def _commit(row: str) -> Commit:
    """A commit in what `git log` printed of it: fields, and then a header and a path for each file."""
    id_, tree, parents, author, time, message, *raw = row.split("\0")
    listed = [field for field in raw if field.strip("\n")]
    changes = {}
    for header, path in zip(listed[::2], listed[1::2], strict=True):
        _, mode, before, after, kind = header.strip("\n").split()
        changes[path] = Change(kind, mode, before, after)
    return Commit(id_, tree, tuple(parents.split()), author, int(time), message, changes)


def context(text: str) -> int:
    """How many lines a patch has around its changes: the most that any hunk begins or ends with."""
    widest = 0
    left = right = run = 0
    changed = False
    for row in text.split("\n"):
        found = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", row)
        if found and left <= 0 and right <= 0:
            left, right, run, changed = int(found[1] or 1), int(found[2] or 1), 0, False
            continue
        if left <= 0 and right <= 0:
            continue
        left -= row[:1] in (" ", "-", "")
        right -= row[:1] in (" ", "+", "")
        if row[:1] in (" ", ""):
            run += 1
        elif row[:1] in ("+", "-"):
            widest, run, changed = widest if changed else max(widest, run), 0, True
        if left <= 0 and right <= 0 and changed:
            widest = max(widest, run)
    return widest
