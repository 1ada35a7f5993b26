"""Exports the work tree of a series back to patches, and brings the lock up to date with them.

Patches are written against one release of the series, its home, whichever the tree is of, so that blob ids and line
numbers change only where a patch does. A commit that says and does what a patch does is that patch, byte for byte.

The series is replaced at once, and then the lock. A run that is killed between the two leaves what `lock check` and
`apply` refuse, and what the next `refresh` or `lock update` completes.
"""

import re
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.parser import HeaderParser
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from overlay.deliver import edit, output, relock
from overlay.deliver.edit import State, Upstream
from overlay.errors import OverlayError
from overlay.progress import say
from overlay.queue import git, images, lock, series, worktree
from overlay.queue.lock import Location, Package
from overlay.queue.series import Patch, Series
from overlay.queue.worktree import CONTEXT, Commit, WorkTree

_NUMBERED = re.compile(r"\d{4}-(.+)\.patch")


@dataclass(frozen=True)
class Exported:
    """A commit as a patch: the name of its file, its content, and the file of the patch that it was, if it was one."""

    commit: Commit
    name: str
    content: bytes
    was: Patch | None


def run(path: Path, tree: Path) -> None:
    """Exports `tree`, and updates what the lock says of every release with its series.

    Args:
        path: the lock; `patches/` lies beside it.
        tree: a work tree of `overlay edit`.

    Raises:
        OverlayError: the tree is not clean, a commit is no patch, the series does not fit one of its releases, or it
            has changed since the tree was made. Nothing is changed then.
    """
    with relock.alone(path):
        _run(path, tree)


def _run(path: Path, tree: Path) -> None:
    state = State.read(tree)
    if state is None:
        raise OverlayError(f"{tree}: expected a tree of overlay edit, found none: name the folder of one")
    work = WorkTree(tree)
    commits = _commits(work, state.upstream)
    pins = lock.read(path)
    name, package, release = pins.find(state.requirement)
    state = _renamed(state, path.parent / "patches", release.series)
    folder = path.parent / "patches" / state.series
    old = series.read(folder)
    before = edit.contents(folder)
    sources = {one.version: Upstream(name, package, one) for one in package.releases if one.series == state.series}
    if release.version not in sources:
        raise OverlayError(
            f"{tree}: expected a release of {state.series}, found that {state.requirement} has "
            f"{release.series or 'no series'} now: run overlay edit again, with --tree for a new folder"
        )
    with tempfile.TemporaryDirectory(prefix="overlay-") as temporary:
        staged = Path(temporary)
        exported = _exported(work, commits, old, sources[release.version])
        draft = _written(staged / "draft" / state.series, before, exported, old)
        queue = _read(draft, exported)
        known = _fitting(queue, sources.values(), exported)
        home = _home(old, release.version, sources)
        final = _written(staged / "patches" / state.series, before, _at_home(staged, old, queue, exported, home), old)
        after = edit.contents(final)
        _check_same(work, series.read(final), exported, sources[release.version])
        if edit.digest(before) not in state.digests and after != before:
            raise OverlayError(
                f"{folder}: expected the series as it was when {tree} was made, found that it has changed since: keep "
                f"your commits (git -C {tree} format-patch upstream), remove {tree}, and run overlay edit again"
            )
        changes = relock.changes(
            path, pins, lambda project, one: (project, one.series) == (name, state.series), final.parent
        )
        changes |= _of_commit(name, package, series.read(final), known)
        text = lock.edited(lock.read_text(path), changes)
        lock.parse(text, str(path))
        _replace(path, text if changes else None, folder, before, after)
    digests = [one for one in state.digests if one != edit.digest(after)]
    replace(state, exported=work.head(), digests=[*digests, edit.digest(after)]).write(tree)
    _say(path, folder.name, before, after, changes)


def _renamed(state: State, patches: Path, now: str | None) -> State:
    """The state with the name that the series has now, if it is the same one: another range gives it another name."""
    if now is None or (patches / state.series).exists() or not (patches / now / "series").is_file():
        return state
    return replace(state, series=now) if edit.digest(edit.contents(patches / now)) in state.digests else state


def _commits(work: WorkTree, base: str) -> list[Commit]:
    """The commits of a tree. Raises OverlayError where it is not clean, or one of them can be no patch."""
    unfinished = work.unfinished()
    if unfinished:
        raise OverlayError(f"{work.folder}: expected a clean tree, found {unfinished} in progress: finish or abort it")
    changed = work.changed()
    if changed:
        raise OverlayError(
            f"{work.folder}: expected a clean tree, found changes in {', '.join(changed[:5])}: commit them (git commit "
            "--amend, or --fixup and git rebase --autosquash), or take them back"
        )
    commits = work.commits(base)
    if not commits:
        raise OverlayError(
            f"{work.folder}: expected at least one commit on top of upstream's files, found none: to drop a whole "
            "series see overlay retire"
        )
    for commit in commits:
        if len(commit.parents) != 1:
            raise OverlayError(
                f"{work.folder}: {commit.title}: expected a commit with one parent, found a merge: rebase it"
            )
    for commit in commits:
        _check(work, commit)
    return commits


def _check(work: WorkTree, commit: Commit) -> None:
    where = f"{work.folder}: {commit.title}"
    if commit.aside is None and not commit.changes:
        raise OverlayError(f"{where}: expected a change, found an empty commit: drop it")
    if commit.aside is not None and commit.changes:
        raise OverlayError(
            f"{where}: expected an empty commit in the place of {commit.aside}, found a change of "
            f"{next(iter(commit.changes))}: make it a commit of its own"
        )
    for path, change in commit.changes.items():
        if change.kind not in ("A", "M"):
            what = "deleted or renamed" if change.kind == "D" else "made something else"
            raise OverlayError(
                f"{where}: expected changes of files in their place, found {path} {what}: a patch may not do that"
            )


def _exported(work: WorkTree, commits: Sequence[Commit], old: Series, upstream: Upstream) -> list[Exported]:
    """The commits as patches against the tree's own release, in their order."""
    by_name = {patch.file.name: patch for patch in old.patches}
    was = _origins(commits, old.patches)
    exported: list[Exported] = []
    created: set[str] = set()
    for number, commit in enumerate(commits, 1):
        patch = was[number - 1]
        if commit.aside is not None:
            patch = by_name.get(commit.aside)
            if patch is None or commit.aside in {one.was.file.name for one in exported if one.was}:
                raise OverlayError(
                    f"{work.folder}: {commit.title}: expected the place of one patch of {old.folder}, found "
                    f"{commit.aside}, which is not there or has a place already: drop the commit"
                )
            exported.append(Exported(commit, _named(number, patch, ""), patch.file.read_bytes(), patch))
            continue
        for path, change in commit.changes.items():
            if change.kind == "A" and path not in created and upstream.read(path) is not None:
                raise OverlayError(
                    f"{work.folder}: {commit.title}: expected a change of {path}, which {upstream.project} "
                    f"{upstream.release.version} has, found a new file: open the tree with overlay edit --all"
                )
        created |= {path for path, change in commit.changes.items() if change.kind == "A"}
        width = CONTEXT if patch is None else worktree.context(patch.file.read_bytes().decode("utf-8")) or CONTEXT
        content = work.export(commit, width)
        exported.append(Exported(commit, _named(number, patch, work.slug(commit)), content, patch))
    return exported


def _origins(commits: Sequence[Commit], patches: Sequence[Patch]) -> list[Patch | None]:
    """Which patch each commit was: the only one with its subject, or else, for it may have got another one, the only
    one that is left with its author's time and its files."""

    def by_subject(one: Commit | Patch) -> object:
        return None if isinstance(one, Commit) and one.aside else one.subject

    def by_content(one: Commit | Patch) -> object:
        if isinstance(one, Commit):
            return None if one.aside else (one.time, frozenset(one.changes))
        return _time(one), frozenset(one.paths)

    found: dict[int, Patch] = {}
    for key in (by_subject, by_content):
        free = [position for position in range(len(commits)) if position not in found]
        left = [patch for patch in patches if all(patch is not other for other in found.values())]
        for position in free:
            wanted = key(commits[position])
            those = [patch for patch in left if key(patch) == wanted]
            if len(those) == 1 and [key(commits[other]) for other in free].count(wanted) == 1:
                found[position] = those[0]
    return [found.get(position) for position in range(len(commits))]


def _time(patch: Patch) -> float | None:
    """The author's time of a patch, in seconds since 1970."""
    headers = HeaderParser().parsestr(patch.file.read_text(encoding="utf-8"), headersonly=True)
    try:
        return parsedate_to_datetime(headers["Date"]).timestamp()
    except (TypeError, ValueError):
        return None


def _named(number: int, patch: Patch | None, slug: str) -> str:
    if patch is None:
        return f"{number:04}-{slug}.patch"
    numbered = _NUMBERED.fullmatch(patch.file.name)
    return f"{number:04}-{numbered[1]}.patch" if numbered else patch.file.name


def _written(folder: Path, before: Mapping[str, bytes], exported: Sequence[Exported], old: Series) -> Path:
    """Writes a series into the new folder `folder`."""
    folder.mkdir(parents=True)
    for one in exported:
        (folder / one.name).write_bytes(one.content)
    listing = _listed(before["series"].decode("utf-8"), exported, old)
    (folder / "series").write_bytes(listing.encode("utf-8"))
    return folder


def _listed(text: str, exported: Sequence[Exported], old: Series) -> str:
    """The file `series`: the comments at its top and its end stay there, one above a patch goes with the patch."""
    known = [patch.file.name for patch in old.patches]
    if [one.name for one in exported] == known:
        return text
    head, behind, above = "", "", ""
    rows: dict[str, tuple[str, str]] = {}
    for row in text.splitlines(keepends=True):
        name = row.partition("#")[0].strip()
        if name not in known:
            above += row
            continue
        if not rows:
            head, above = above, ""
        rows[name] = (above, row if row.endswith("\n") else f"{row}\n")
        above = ""
    behind = above
    listed = ""
    for one in exported:
        comment, row = rows[one.was.file.name] if one.was else ("", f"{one.name}\n")
        listed += comment + (row.replace(one.was.file.name, one.name, 1) if one.was else row)
    return head + listed + behind


def _read(folder: Path, exported: Sequence[Exported]) -> Series:
    """The series that the commits make. Raises OverlayError, with the commit, where one is not sound."""
    try:
        return series.read(folder)
    except OverlayError as error:
        raise OverlayError(_in_commits(str(error), folder, exported)) from None


def _in_commits(text: str, folder: Path, exported: Sequence[Exported]) -> str:
    """A message about patches, said of the commits that they were made from."""
    for one in exported:
        title = one.commit.title.replace("\\", "\\\\")
        text = re.sub(rf"{re.escape(str(folder / one.name))}(?::\d+)?", title, text)
    return text.replace(str(folder), folder.name)


def _fitting(queue: Series, sources: Iterable[Upstream], exported: Sequence[Exported]) -> dict[str, bytes]:
    """Every file that the series touches, of every release, by blob id. Raises OverlayError where it does not fit one
    of them."""
    known: dict[str, bytes] = {}
    problems = []
    titles = {one.name: one.commit.title for one in exported}
    for upstream in sources:
        label = f"{upstream.project} {upstream.release.version}"
        try:
            for image in images.make(queue, upstream.package.prefix, upstream.member):
                known[git.blob_id(image.before)] = image.before
        except OverlayError as error:
            wanted = queue.for_delivery("wheel")
            there = {path: upstream.read(path) for path in queue.paths("wheel")}
            rows = series.failures(wanted, {path: content for path, content in there.items() if content is not None})
            said = _in_commits(str(error), queue.folder, exported)
            problems.append(f"{label}: {said}")
            for row in rows:
                file, _, rest = row.partition(": ")
                say(f"{label}: {titles.get(file, file)}: {rest}")
    if problems:
        raise OverlayError(
            f"{problems[0]} ({len(problems)} of the releases with {queue.name} do not take it): nothing was written"
        )
    return known


def _home(old: Series, version: str, sources: Mapping[str, Upstream]) -> Upstream:
    """The release that the patches were made against: the one with the most blob ids that they name; of several the one
    of the tree, or the first."""
    first: dict[str, str] = {}
    for patch in old.patches:
        for path, blob in patch.before.items():
            first.setdefault(path, blob)

    def known(upstream: Upstream) -> int:
        contents = {path: upstream.read(path) for path in first if path.startswith(upstream.package.prefix)}
        return sum(
            content is not None and git.blob_id(content).startswith(first[path]) for path, content in contents.items()
        )

    return max(sources.values(), key=lambda upstream: (known(upstream), upstream.release.version == version))


def _at_home(folder: Path, old: Series, queue: Series, exported: Sequence[Exported], home: Upstream) -> list[Exported]:
    """The same patches against the home of the series; those that have not changed are the old files."""
    was = _imported(folder / "old", old, home)
    now = _imported(folder / "new", queue, home)
    today = datetime.now(UTC).date().isoformat()
    made = []
    for one in exported:
        commit = now[1].get(one.name)
        before = was[1].get(one.was.file.name) if one.was else None
        if commit is None or one.commit.aside is not None:
            made.append(one)
            continue
        if one.was and before and before.same(commit) and commit.last_update <= before.last_update:
            made.append(replace(one, content=one.was.file.read_bytes()))
            continue
        width = worktree.context(one.content.decode("utf-8")) or CONTEXT
        days = [commit.last_update, before.last_update] if before else [commit.last_update]
        if before is None or was[0].diff(before, width) != now[0].diff(commit, width):
            days.append(today)
        made.append(replace(one, content=now[0].export(commit.dated(max(days)), width)))
    return made


def _imported(folder: Path, queue: Series, home: Upstream) -> tuple[WorkTree, dict[str, Commit]]:
    """A series as commits on its home, as far as git am takes it, by the names of the patches."""
    folder.mkdir()
    aside = edit.kept_aside(queue, home)
    work = WorkTree.create(folder, edit.base(queue, home, aside), "upstream")
    base = work.head()
    taken = [patch.file for patch in queue.patches if patch.file.name not in aside]
    work.take(*taken)
    return work, dict(zip((file.name for file in taken), work.commits(base), strict=False))


def _check_same(work: WorkTree, queue: Series, exported: Sequence[Exported], upstream: Upstream) -> None:
    """Raises OverlayError where the patches give other files than the tree has: a hunk found another place."""
    aside = {one.name: "" for one in exported if one.commit.aside}
    taken = [patch for patch in queue.patches if patch.file.name not in aside]
    blobs = work.blobs()
    for path, content in series.apply(taken, edit.base(queue, upstream, aside)).items():
        if git.blob_id(content) != blobs.get(path):
            raise OverlayError(
                f"{work.folder}: expected patches that give {path} as it is there, found that they give another file: "
                "a hunk fits in two places: change more of the lines around it, or make two commits of it"
            )


def _of_commit(name: str, package: Package, queue: Series, known: Mapping[str, bytes]) -> dict[Location, Any]:
    """What changes of a commit pin with this series. Its files are known where a release has the same; else somebody
    with a checkout has to complete it again."""
    pin = package.commit
    if pin is None or pin.series != queue.name:
        return {}
    at: Location = ("packages", name, "commit")
    named = {file.path: file.before for file in pin.files}
    try:
        made = images.make(queue, package.prefix, lambda path: known[named[path]])
    except (KeyError, OverlayError):
        say(f"packages.{name}.commit: its files are not known here: complete it with overlay lock complete --checkout")
        return {(*at, "verified"): False, (*at, "series"): None, (*at, "files"): None}
    found = [image.exchanged.model_dump() for image in made]
    return {} if found == [file.model_dump() for file in pin.files] else {(*at, "files"): found}


def _replace(
    path: Path, text: str | None, folder: Path, before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> None:
    """Puts the series in its place, and the lock right behind it."""

    def ours(file: str) -> bool:
        return file == "series" or ("/" not in file and file.endswith(".patch"))

    left = any(folder.parent.glob(f".{folder.name}.overlay-*"))
    with lock.replacement(path, text if text is not None else lock.read_text(path)) as replace_lock, _uninterrupted():
        try:
            if before != after or left:
                with output.replaced(folder, ours, "use a copy of this project that can be written") as staging:
                    for name, content in after.items():
                        (staging / name).write_bytes(content)
        finally:  # what fails behind the exchange, as to remove the old folder, must not leave the lock behind
            if text is not None and edit.contents(folder) == after:
                replace_lock()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Lets an interrupt wait for the end: the two steps take a moment, and belong together."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say(
    path: Path, name: str, before: Mapping[str, bytes], after: Mapping[str, bytes], changes: Mapping[Location, Any]
) -> None:
    for file in dict.fromkeys((*before, *after)):
        if before.get(file) != after.get(file):
            what = "new" if file not in before else "gone" if file not in after else "changed"
            say(f"patches/{name}/{file}: {what}")
    if before == after:
        say(f"patches/{name} is as it was")
    written: dict[str, list[str]] = {}
    for where in changes:
        depth = 4 if where[2] == "releases" else 3
        written.setdefault(lock.key(where[:depth]), []).append(str(where[depth]))
    for entry, keys in written.items():
        say(f"{path.name}: wrote {', '.join(dict.fromkeys(keys))} of {entry}")
