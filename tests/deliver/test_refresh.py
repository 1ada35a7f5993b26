"""`overlay edit` and `overlay refresh`: patches as commits, and back."""

import hashlib
import io
import os
import re
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from overlay.deliver import edit, refresh
from overlay.queue import git as plain_git
from overlay.queue import lock
from tests.deliver.test_output import Killed
from tests.sample import Sample, archive, copy, git, members, message, record, snapshot, upstream
from tests.variants import ROOT

TODAY = datetime.now(UTC).date().isoformat()
CORE, BLOCK = "src/demo/core.py", "src/demo/layers/block.py"


def opened(sample: Sample, release: str = "demo==1.0", *options: str) -> Path:
    """The work tree of a release."""
    sample.overlay("edit", release, *options).succeeds()
    return sample.root / "edit" / release.replace("==", "-")


def subjects(tree: Path) -> list[str]:
    return git("log", "--reverse", "--format=%s", folder=tree).splitlines()


def exchange(tree: Path, path: str, old: str, new: str) -> None:
    file = tree / path
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def amend(tree: Path, number: int, path: str, old: str, new: str) -> None:
    """Changes a file in the commit of a patch, as a maintainer does."""
    exchange(tree, path, old, new)
    fixed = git("log", "--reverse", "--format=%H", "upstream..", folder=tree).splitlines()[number - 1]
    git("commit", "--quiet", "--all", "--fixup", fixed, folder=tree)
    git("-c", "sequence.editor=true", "rebase", "--quiet", "-i", "--autosquash", "upstream", folder=tree)


def committed(tree: Path, text: str, path: str, old: str, new: str) -> None:
    exchange(tree, path, old, new)
    git("commit", "--quiet", "--all", "--message", text, folder=tree)


def rebased(tree: Path, script: str) -> None:
    """Rebases with a sed script in the place of an editor."""
    git("-c", f"sequence.editor=sed -i '{script}'", "rebase", "--quiet", "-i", "upstream", folder=tree)


def queue(sample: Sample, series: str = "demo-1.0-1.1") -> dict[str, bytes]:
    return edit.contents(sample.root / "patches" / series)


def kept(sample: Sample) -> tuple[object, bytes]:
    """What a run that fails must leave alone."""
    return snapshot(sample.root / "patches"), sample.lock.read_bytes()


def changed(before: bytes, after: bytes) -> list[str]:
    """The lines that differ, without their numbers and what git abbreviates them to."""
    old, new = before.decode().splitlines(), after.decode().splitlines()
    return [re.sub(r" .*", "", row) for row in new if row not in old]


def test_the_tree_has_upstream_and_a_commit_for_each_patch(sample: Sample) -> None:
    tree = opened(sample)
    assert subjects(tree) == [
        "upstream demo 1.0",
        "Subtract in the core",
        "Multiply in the block and the core",
        "Test it",
    ]
    assert git("ls-tree", "-r", "--name-only", "upstream", folder=tree).splitlines() == [CORE, BLOCK]
    assert (
        git("show", f"upstream:{CORE}", folder=tree).encode() + b"\n"
        == upstream("demo", "1.0")["demo/core.py"].rstrip() + b"\n"
    )
    assert (
        git("log", "--format=%an <%ae> %ad", "--date=iso", "upstream..", folder=tree).splitlines()
        == ["A U Thor <author@mail.example> 2026-11-01 12:00:00 +0000"] * 3
    )
    assert git("status", "--porcelain", folder=tree) == ""
    text = git("log", "-1", "--format=%B", "HEAD~2", folder=tree)
    assert "Bug: https://bugs.example/1" in text
    assert "[PATCH]" not in text


def test_all_of_the_package_is_there_where_it_is_wanted(sample: Sample) -> None:
    tree = opened(sample, "demo==1.0", "--all")
    found = git("-c", "core.quotePath=false", "ls-tree", "-r", "--name-only", "upstream", folder=tree).splitlines()
    assert found == sorted(f"src/{path}" for path in upstream("demo", "1.0"))
    before = queue(sample)
    sample.overlay("refresh").succeeds()
    assert queue(sample) == before


@pytest.mark.parametrize("release", ["demo==1.0", "demo==1.1", "demo==2.0", "plain==3.0"])
def test_export_without_a_change_changes_no_byte(sample: Sample, release: str) -> None:
    before = kept(sample)
    tree = opened(sample, release)
    git("commit", "--quiet", "--amend", "--no-edit", folder=tree)  # other committer, date and ids
    done = sample.overlay("refresh").succeeds()
    assert "is as it was" in done.stderr
    assert kept(sample) == before


def test_the_list_of_patches_keeps_its_form(sample: Sample) -> None:
    listing = sample.root / "patches" / "demo-1.0-1.1" / "series"
    listing.write_text("\r\n".join(["", "# in this order", *sorted(queue(sample))[:3]]))
    before = kept(sample)
    opened(sample)
    sample.overlay("refresh").succeeds()
    assert kept(sample) == before


def test_a_change_in_one_commit_changes_its_patch_alone(sample: Sample) -> None:
    others = snapshot(sample.root / "patches" / "demo-2.0")
    tree = opened(sample)
    amend(tree, 1, CORE, "return value - 30", "return value - 31")
    done = sample.overlay("refresh").succeeds()
    assert "demo 1.0: the wheel's bytes changed, so its revision rises to 2" in done.stderr
    for file in (sample.patch(1), sample.patch(2)):
        file.write_text(re.sub(r"Last-Update: .*", "Last-Update: 2026-11-28", file.read_text()))
    shutil.rmtree(tree)
    before = queue(sample)
    tree = opened(sample)
    amend(tree, 1, CORE, "return value - 31", "return value - 32")
    sample.overlay("refresh").succeeds()
    after = queue(sample)
    assert list(after) == list(before)
    first, second, third = sorted(name for name in after if name != "series")
    assert changed(before[first], after[first]) == ["Last-Update:", "index", "+"]
    assert f"Last-Update: {TODAY}\n".encode() in after[first]
    assert changed(before[second], after[second]) == ["index"], "a patch of the same file further down"
    assert after[third] == before[third]
    assert after["series"] == before["series"]
    assert snapshot(sample.root / "patches" / "demo-2.0") == others
    assert b"From 0000000000000000000000000000000000000000 " in after[first]
    assert b"Date: Sun, 1 Nov 2026 12:00:00 +0000\n" in after[first], "the author's, not that of the amendment"
    sample.overlay("lock", "check").succeeds()
    sample.apply().succeeds()
    assert (sample.out / "demo-1.0+overlay.3-py3-none-any.whl").is_file()
    again = kept(sample)
    sample.overlay("refresh").succeeds()
    assert kept(sample) == again


def test_the_release_of_the_tree_makes_no_difference(sample: Sample, tmp_path: Path) -> None:
    old = upstream("demo", "1.1")
    found = []
    for release in ("demo==1.0", "demo==1.1"):
        tree = tmp_path / release
        sample.overlay("edit", release, "--tree", tree).succeeds()
        amend(tree, 2, BLOCK, "return value * 7", "return value * 70")
        before = kept(sample)
        sample.overlay("refresh", "--tree", tree).succeeds()
        found.append(queue(sample))
        shutil.rmtree(sample.root / "patches")
        for path, (kind, content) in (before[0] or {}).items():  # type: ignore[attr-defined]
            place = sample.root / "patches" / path
            if kind == "folder":
                place.mkdir(parents=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
        sample.lock.write_bytes(before[1])
    assert found[0] == found[1]
    assert old["demo/core.py"] != upstream("demo", "1.0")["demo/core.py"]


def test_a_patch_keeps_the_width_of_its_context(sample: Sample) -> None:
    tree = opened(sample)
    narrow = git(
        "format-patch", "--stdout", "--zero-commit", "-N", "--full-index", "-U1", "-1", "HEAD~2",
        "--signature=modeling-overlay", folder=tree,
    )  # fmt: skip
    shutil.rmtree(tree)
    sample.patch(1).write_text(narrow + "\n")
    assert narrow.count("\n def ") == 1
    tree = opened(sample)
    amend(tree, 1, CORE, "return value - 30", "return value - 31")
    sample.overlay("refresh").succeeds()
    hunk = sample.patch(1).read_text().partition("@@")[2].split("\n-- \n")[0].splitlines()[1:]
    assert [row[0] if row else " " for row in hunk] == [" ", "-", "+", " "]


def test_commits_that_are_moved_dropped_and_added(sample: Sample) -> None:
    folder = sample.root / "patches" / "demo-1.0-1.1"
    names = sorted(queue(sample))[:3]
    (folder / "series").write_text(
        f"# in this order\n{names[0]}\n# of the block\n{names[1]}  # too\n{names[2]}\n# and no more\n"
    )
    tree = opened(sample)
    rebased(tree, "1{h;d};2G")
    committed(tree, message("Add in the Block, too"), BLOCK, "return value + 8\n", "return value + 88\n")
    sample.overlay("refresh").succeeds()
    assert (folder / "series").read_text() == (
        "# in this order\n# of the block\n0001-Multiply-in-the-block-and-the-core.patch  # too\n"
        "0002-Subtract-in-the-core.patch\n0003-Test-it.patch\n0004-add-in-the-block-too.patch\n# and no more\n"
    )
    assert sorted(queue(sample)) == [
        "0001-Multiply-in-the-block-and-the-core.patch",
        "0002-Subtract-in-the-core.patch",
        "0003-Test-it.patch",
        "0004-add-in-the-block-too.patch",
        "series",
    ]
    sample.overlay("lock", "check").succeeds()
    rebased(tree, "1d")
    sample.overlay("refresh").succeeds()
    assert sorted(queue(sample))[:3] == [
        "0001-Subtract-in-the-core.patch",
        "0002-Test-it.patch",
        "0003-add-in-the-block-too.patch",
    ]
    sample.overlay("lock", "check").succeeds()


def test_a_commit_with_another_subject_keeps_its_file(sample: Sample) -> None:
    before = queue(sample)
    tree = opened(sample)
    git("reset", "--quiet", "--hard", "HEAD~1", folder=tree)
    git("commit", "--quiet", "--amend", "--message", message("Multiply twice", "wheel, overlay"), folder=tree)
    sample.overlay("refresh").succeeds()
    names = sorted(before)
    assert sorted(queue(sample)) == [*names[:2], "series"]
    rows = changed(before[names[1]], queue(sample)[names[1]])
    assert rows == ["Subject:", "index", "index", "modeling-overlay"], "the day has not changed"


def test_a_commit_in_two_and_two_in_one(sample: Sample) -> None:
    tree = opened(sample)
    git("reset", "--quiet", "--hard", "HEAD~1", folder=tree)
    git("reset", "--quiet", "HEAD~1", folder=tree)
    for path in (CORE, BLOCK):
        git("add", path, folder=tree)
        git("commit", "--quiet", "--message", message(f"Multiply in {Path(path).stem}", "wheel, overlay"), folder=tree)
    sample.overlay("refresh").succeeds()
    assert sorted(queue(sample))[:3] == [
        "0001-Subtract-in-the-core.patch",
        "0002-multiply-in-core.patch",
        "0003-multiply-in-block.patch",
    ]
    git("reset", "--quiet", "--soft", "HEAD~3", folder=tree)
    git("commit", "--quiet", "--message", message("Both"), folder=tree)
    sample.overlay("refresh").succeeds()
    assert sorted(queue(sample)) == ["0001-both.patch", "series"]
    sample.apply().succeeds()


def merged(tree: Path) -> None:
    git("checkout", "--quiet", "-b", "other", "HEAD~1", folder=tree)
    git("commit", "--quiet", "--allow-empty", "--message", "Other", folder=tree)
    git("checkout", "--quiet", "main", folder=tree)
    git("merge", "--quiet", "--no-edit", "other", folder=tree)


def stopped(tree: Path) -> None:
    git("-c", "sequence.editor=sed -i 1s/pick/edit/", "rebase", "--quiet", "-i", "upstream", folder=tree)


def removed(tree: Path) -> None:
    git("rm", "--quiet", BLOCK, folder=tree)
    git("commit", "--quiet", "--message", message("Remove"), folder=tree)


def moved(tree: Path) -> None:
    git("mv", BLOCK, "src/demo/layers/other.py", folder=tree)
    git("commit", "--quiet", "--message", message("Move"), folder=tree)


def binary(tree: Path) -> None:
    (tree / CORE).write_bytes(b"\0\1\2")
    git("commit", "--quiet", "--all", "--message", message("Binary"), folder=tree)


def link(tree: Path) -> None:
    (tree / CORE).unlink()
    (tree / CORE).symlink_to("layers/block.py")
    git("commit", "--quiet", "--all", "--message", message("Link"), folder=tree)


def unexplained(tree: Path) -> None:
    committed(
        tree, "Do it\n\nBecause.\n\nBug: none\nOrigin: vendor\nLast-Update: 2026-11-01", CORE, "value + 8\n", "value\n"
    )


def unseen(tree: Path) -> None:
    committed(tree, message("Bell \1"), CORE, "value + 8\n", "value\n")


def created(tree: Path) -> None:
    (tree / "src/demo/new.py").write_text("NEW = 1\n")
    git("add", "src/demo/new.py", folder=tree)
    git("commit", "--quiet", "--message", message("Create"), folder=tree)


def unknown(tree: Path) -> None:
    (tree / "src/demo/__init__.py").write_text("NEW = 1\n")
    git("add", "src/demo/__init__.py", folder=tree)
    git("commit", "--quiet", "--message", message("Guess"), folder=tree)


REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "dirty": (lambda tree: (tree / CORE).write_text("x\n"), ("expected a clean tree", CORE, "commit them")),
    "untracked": (lambda tree: (tree / "notes").write_text("x\n"), ("expected a clean tree", "notes")),
    "rebase": (stopped, ("expected a clean tree, found a rebase in progress",)),
    "merge": (merged, ("commit ", "found a merge")),
    "removed": (removed, ("(Remove)", "found src/demo/layers/block.py deleted or renamed")),
    "moved": (moved, ("(Move)", "found src/demo/layers/block.py deleted or renamed")),
    "binary": (binary, ("(Binary)", "expected a change of a text file", "binary")),
    "link": (link, ("(Link)", "found src/demo/core.py made something else")),
    "trailer": (unexplained, ("commit ", "(Do it)", "expected the trailer Applied-Upstream:", "add it")),
    "unseen": (unseen, ("(Bell ", "expected text that can be read")),
    "empty": (
        lambda tree: git("commit", "--quiet", "--allow-empty", "--message", message("Nothing"), folder=tree),
        ("(Nothing)", "found an empty commit: drop it"),
    ),
    "created": (created, ("demo 1.0: commit ", "(Create)", "found src/demo/new.py", "nothing was written")),
    "unknown": (unknown, ("(Guess)", "which demo 1.0 has, found a new file: open the tree with overlay edit --all")),
    "nothing": (
        lambda tree: git("reset", "--quiet", "--hard", "upstream", folder=tree),
        ("expected at least one commit", "overlay retire"),
    ),
    "elsewhere": (
        lambda tree: (
            git("checkout", "--quiet", "--orphan", "new", folder=tree),
            git("commit", "--quiet", "--message", "New", folder=tree),
        ),
        ("found that HEAD does not come from them",),
    ),
}


@pytest.fixture(scope="module")
def refusing(template: Sample, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A sample with an open tree, of which each case spoils a copy."""
    sample = copy(template, tmp_path_factory.mktemp("refusing") / "sample")
    opened(sample)
    return sample


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_can_be_no_patch_is_refused(refusing: Sample, case: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(refusing.root / "edit" / "demo-1.0", tree)
    spoil, said = REFUSED[case]
    spoil(tree)
    before = kept(refusing)
    refusing.overlay("refresh", "--tree", tree).fails(*said)
    assert kept(refusing) == before


CONFIGURED = """\
[diff]
noprefix = true
mnemonicPrefix = true
orderFile = /nonexistent
external = /bin/false
context = 9
interHunkContext = 99
suppressBlankEmpty = true
indentHeuristic = false
algorithm = patience
[format]
subjectPrefix = OTHER
signOff = true
useAutoBase = true
coverLetter = true
attach = true
thread = true
numbered = true
headers = "X-Other: yes\\n"
to = to@mail.example
from = true
notes = true
noprefix = true
signature = me
[log]
showSignature = true
date = iso
[i18n]
commitEncoding = ISO-8859-1
logOutputEncoding = ISO-8859-1
[core]
autocrlf = true
hooksPath = /nonexistent
[color]
ui = always
[commit]
gpgSign = true
[init]
defaultBranch = trunk
templateDir = /nonexistent
"""


@pytest.mark.parametrize("whose", ["user", "repository"])
def test_no_configuration_changes_what_is_exported(sample: Sample, whose: str, tmp_path: Path) -> None:
    found = []
    for name in ("plain", "configured"):
        here = copy(sample, tmp_path / name)
        if name == "configured" and whose == "user":
            here.environment()
            (here.folder / "home" / ".gitconfig").write_text(CONFIGURED)
        tree = opened(here)
        amend(tree, 1, CORE, "return value - 30", "return value - 31\n    # größe")
        exchange(tree, CORE, "return value + 20\n", "return value + 21\n")
        exchange(tree, CORE, "return value + 23\n", "return value + 24\n")
        git("commit", "--quiet", "--all", "--message", message("Größe, near"), folder=tree)
        if name == "configured" and whose == "repository":
            (tree / ".git" / "config").open("a").write(CONFIGURED)
        here.overlay("refresh").succeeds()
        found.append(kept(here))
    assert found[0] == found[1]


def test_subjects_without_a_letter_make_files_of_their_own(sample: Sample) -> None:
    tree = opened(sample)
    committed(tree, message("修复"), BLOCK, "return value + 8\n", "return value + 88\n")
    sample.overlay("refresh").succeeds()
    committed(tree, message("问题"), BLOCK, "return value + 16\n", "return value + 17\n")
    rebased(tree, "1d")
    sample.overlay("refresh").succeeds()
    assert sorted(queue(sample))[2:] == ["0003-patch.patch", "0004-patch.patch", "series"]


def test_every_release_of_the_series_has_to_take_it(sample: Sample) -> None:
    tree = opened(sample)
    last = "    return value + 59\n"
    committed(tree, message("Change the end"), CORE, f"{last}\n", f"{last}\n\nEND = True\n")
    before = kept(sample)
    done = sample.overlay("refresh")
    done.fails("demo 1.1: commit ", "(Change the end) does not fit src/demo/core.py: hunk @@ ", "nothing was written")
    assert re.search(
        r"demo 1\.1: commit .* \(Change the end\): src/demo/core\.py: hunk @@ .* does not fit near", done.stderr
    )
    assert kept(sample) == before


def test_work_that_is_not_exported_stays(sample: Sample) -> None:
    tree = opened(sample)
    assert "already" in sample.overlay("edit", "demo==1.0").succeeds().stderr
    (tree / CORE).write_text("x\n")
    sample.overlay("edit", "demo==1.0").fails("expected a tree whose work is exported", CORE, "run overlay refresh")
    git("reset", "--quiet", "--hard", folder=tree)
    amend(tree, 1, CORE, "return value - 30", "return value - 31")
    head = git("rev-parse", "HEAD", folder=tree)
    sample.overlay("edit", "demo==1.0").fails("found other commits than the series has", "or remove the folder")
    sample.overlay("refresh").succeeds()
    assert "already" in sample.overlay("edit", "demo==1.0").succeeds().stderr
    assert git("rev-parse", "HEAD", folder=tree) == head
    sample.rewrite(1, "this mends it", "this mends it well")
    sample.overlay("edit", "demo==1.0").fails("found other commits than the series has")
    sample.overlay("refresh").fails("has changed since: keep your commits")
    other = sample.folder / "other"
    other.mkdir()
    (other / "file").touch()
    sample.overlay("edit", "demo==1.0", "--tree", other).fails("expected a new folder", "name another folder")
    assert [file.name for file in other.iterdir()] == ["file"]


def test_a_hunk_that_finds_another_place_is_refused(sample: Sample) -> None:
    """The patches are written against 1.0, where what is alike begins eight lines earlier."""
    files = members("demo", "1.1")
    del files["demo-1.1.dist-info/RECORD"]
    files["demo/core.py"] = b"# later\n" * 8 + files["demo/core.py"]
    sample.offer(archive(files | {"demo-1.1.dist-info/RECORD": record(files, "demo-1.1.dist-info")}), "demo-1.1")
    sample.overlay("lock", "update").succeeds()
    tree = opened(sample, "demo==1.1")
    alike = "    value\n"
    committed(tree, message("Alike"), CORE, "return value + 20\n", f"return value + 20\n{alike * 40}")
    sample.overlay("refresh").succeeds()
    committed(tree, message("One of them"), CORE, alike * 40, f"{alike * 35}    other\n{alike * 4}")
    before = kept(sample)
    sample.overlay("refresh").fails("src/demo/core.py: expected one place for hunk @@ -", "found two, at lines ")
    assert kept(sample) == before


def test_a_tree_follows_a_series_that_is_renamed(sample: Sample) -> None:
    """As add-release advises, for a wider range."""
    tree = opened(sample)
    patches = sample.root / "patches"
    (patches / "demo-1.0-1.1").rename(patches / "demo-1.0-1.2")
    sample.lock.write_text(sample.lock.read_text().replace("demo-1.0-1.1", "demo-1.0-1.2"))
    amend(tree, 1, CORE, "return value - 30", "return value - 31")
    sample.overlay("refresh").succeeds()
    assert b"+    return value - 31\n" in queue(sample, "demo-1.0-1.2")["0001-Subtract-in-the-core.patch"]
    assert not (patches / "demo-1.0-1.1").exists()
    assert "with demo-1.0-1.2 already" in sample.overlay("edit", "demo==1.0").succeeds().stderr
    (patches / "demo-1.0-1.2").rename(patches / "demo-1.0-1.3")
    sample.lock.write_text(sample.lock.read_text().replace("demo-1.0-1.2", "demo-1.0-1.3"))
    assert "already" not in sample.overlay("edit", "demo==1.0").succeeds().stderr
    sample.overlay("refresh").succeeds()


def test_a_tree_without_work_follows_its_series(sample: Sample) -> None:
    tree = opened(sample)
    sample.rewrite(1, "this mends it", "this mends it well")
    sample.overlay("lock", "update").succeeds()
    assert opened(sample) == tree
    assert "mends it well" in git("log", "--format=%B", folder=tree)
    before = kept(sample)
    sample.overlay("refresh").succeeds()
    assert kept(sample) == before


def test_the_tree_is_found_where_there_is_one(sample: Sample) -> None:
    sample.overlay("refresh").fails("expected one tree of overlay edit", "found none", "run overlay edit NAME==VERSION")
    tree = opened(sample)
    opened(sample, "plain==3.0")
    sample.overlay("refresh").fails("found ", "demo-1.0, ", "plain-3.0", "name one with --tree")
    assert "demo-1.0-1.1 is as it was" in sample.overlay("refresh", cwd=tree / "src").succeeds().stderr
    sample.overlay("refresh", "--tree", sample.root).fails("expected a tree of overlay edit, found none")
    sample.overlay("edit", "demo==9.9").fails("expected one of the pinned releases")


def aside(sample: Sample) -> str:
    """Adds a patch of a file that no wheel has, and gives its name."""
    checkout = sample.checkouts / "demo-1.0"
    (checkout / "tests/test_sample.py").write_text("def test_sample():\n    assert True\n")
    git("commit", "--quiet", "--all", "--message", message("Test more", "pull-request"), folder=checkout)
    text = git("format-patch", "--stdout", "--zero-commit", "-N", "-1", folder=checkout)
    git("reset", "--quiet", "--hard", "HEAD~1", folder=checkout)
    folder = sample.root / "patches" / "demo-1.0-1.1"
    (folder / "0004-test-more.patch").write_text(text)
    (folder / "series").write_text((folder / "series").read_text() + "0004-test-more.patch\n")
    return "0004-test-more.patch"


def test_a_patch_of_files_that_are_not_pinned_is_kept_as_it_is(sample: Sample) -> None:
    name = aside(sample)
    before = queue(sample)
    done = sample.overlay("edit", "demo==1.0").succeeds()
    assert f"{name}: tests/test_sample.py is not among the files of demo 1.0" in done.stderr
    tree = sample.root / "edit" / "demo-1.0"
    sample.overlay("refresh").succeeds()
    assert queue(sample) == before
    rebased(tree, "2d")
    sample.overlay("refresh").succeeds()
    assert queue(sample)["0003-test-more.patch"] == before[name], "in its new place, byte for byte"
    (tree / CORE).write_text("x\n")
    git("commit", "--quiet", "--all", "--amend", "--no-edit", folder=tree)
    sample.overlay("refresh").fails("[aside] Test more", f"in the place of {name}", "a commit of its own")


def test_an_sdist_has_what_the_wheel_lacks(sample: Sample) -> None:
    name = aside(sample)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        test = (sample.checkouts / "demo-1.0" / "tests/test_sample.py").read_bytes()
        entry = tarfile.TarInfo("demo-1.0/tests/test_sample.py")
        entry.size = len(test)
        archive.addfile(entry, io.BytesIO(test))
    sha256 = hashlib.sha256(content.getvalue()).hexdigest()
    place = sample.cache / "modeling-overlay" / "artefacts" / sha256 / "demo-1.0.tar.gz"
    place.parent.mkdir(parents=True)
    place.write_bytes(content.getvalue())
    pin = f'sdist = {{ file = "demo-1.0.tar.gz", size = {len(content.getvalue())}, sha256 = "{sha256}" }}'
    text = sample.lock.read_text()
    sample.lock.write_text(text.replace("files = [", f"{pin}\nfiles = [", 1))
    before = queue(sample)
    tree = opened(sample)
    assert subjects(tree)[-1] == "Test more"
    sample.overlay("refresh").succeeds()
    assert queue(sample) == before
    amend(tree, 4, "tests/test_sample.py", "assert True", "assert 1")
    sample.overlay("refresh").succeeds()
    assert "+    assert 1\n" in queue(sample)[name].decode()


def test_a_commit_pin_follows(sample: Sample) -> None:
    sample.overlay("lock", "complete", "--checkout", sample.checkouts / "demo-1.0").succeeds()
    tree = opened(sample)
    amend(tree, 1, CORE, "return value - 30", "return value - 31")
    sample.overlay("refresh").succeeds()
    package = lock.read(sample.lock).packages["demo"]
    assert package.commit is not None
    assert package.commit.verified
    assert set(package.commit.files) <= set(package.releases[0].files)
    sample.lock.write_text(sample.lock.read_text().replace(package.commit.files[0].before, "1" * 40, 1))
    amend(tree, 1, CORE, "return value - 31", "return value - 32")
    done = sample.overlay("refresh").succeeds()
    assert "complete it with overlay lock complete" in done.stderr
    package = lock.read(sample.lock).packages["demo"]
    assert package.commit is not None
    assert (package.commit.verified, package.commit.files) == (False, ())
    sample.overlay("lock", "check").succeeds()


class Interrupted(Killed):
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def replaced(sample: Sample, new: tuple[dict[str, bytes], str], at: int, how: type[Killed]) -> int:
    """Puts a series and a lock into their places in a fork of this process, killed at a step; how it ended."""
    folder = sample.root / "patches" / "demo-1.0-1.1"
    before = edit.contents(folder)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.environ["XDG_CACHE_HOME"] = str(sample.cache)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.addaudithook(how(sample.root, at))
            refresh._replace(sample.lock, new[1], folder, before, new[0])
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("how", [Killed, Interrupted])
def test_a_kill_before_every_step(sample: Sample, how: type[Killed]) -> None:
    tree = opened(sample)
    amend(tree, 1, CORE, "return value - 30", "return value - 31")
    store = sample.folder / "before"
    shutil.copytree(sample.root, store, symlinks=True)
    before = queue(sample), sample.lock.read_text()
    sample.overlay("refresh").succeeds()
    after = queue(sample), sample.lock.read_text()
    whole = kept(sample)
    seen = set()
    step = 0
    while True:
        step += 1
        shutil.rmtree(sample.root / "patches")
        shutil.copytree(store / "patches", sample.root / "patches")
        shutil.copyfile(store / "upstream.lock", sample.lock)
        shutil.copyfile(store / "edit/demo-1.0/.git/overlay.json", tree / ".git/overlay.json")
        ended = replaced(sample, after, step, how)
        found = queue(sample), sample.lock.read_text()
        assert found[0] in (before[0], after[0]), f"step {step}"
        assert found[1] in (before[1], after[1]), f"step {step}"
        state = found[0] == after[0], found[1] == after[1]
        if ended == 0:
            break
        if state == (True, False) and state not in seen:
            sample.overlay("lock", "check").fails("expected the blob", "run overlay lock update")
            sample.apply().fails("expected the blob", "run overlay lock update")
        if state not in seen:
            sample.overlay("refresh").succeeds()
            assert kept(sample) == whole, f"step {step}"
            assert not list(sample.root.glob(".upstream.lock*"))
        seen.add(state)
    assert step > 15
    assert seen >= {(False, False), (True, True)} if how is Killed else {(True, True)}
    assert ((True, False) in seen) == (how is Killed), "an interrupt waits for the lock"


def test_an_update_completes_a_killed_run_too(sample: Sample) -> None:
    tree = opened(sample)
    amend(tree, 1, CORE, "return value - 30", "return value - 31")
    before = sample.lock.read_bytes()
    sample.overlay("refresh").succeeds()
    after = sample.lock.read_bytes()
    sample.lock.write_bytes(before)
    sample.overlay("lock", "update").succeeds()
    assert sample.lock.read_bytes() == after


@pytest.mark.parametrize(
    "requirement",
    [
        "transformers==5.14.1",
        "transformers==5.0.0",
        "transformers==5.23.0",
        "transformers==5.24.0",
        "transformer_engine==2.10.0",
        "transformer_engine==2.15.0",
    ],
)
def test_the_patches_of_this_project_come_back_byte_for_byte(requirement: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    shutil.copyfile(ROOT / "upstream.lock", tmp_path / "upstream.lock")
    edit.start(tmp_path / "upstream.lock", requirement, tmp_path / "tree")
    plain_git.run("commit", "--amend", "--no-edit", folder=tmp_path / "tree")
    before = snapshot(tmp_path / "patches"), (tmp_path / "upstream.lock").read_bytes()
    refresh.run(tmp_path / "upstream.lock", tmp_path / "tree")
    assert (snapshot(tmp_path / "patches"), (tmp_path / "upstream.lock").read_bytes()) == before
