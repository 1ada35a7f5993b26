"""`overlay pr` makes a branch in a new work tree, and leaves everything else of the user's as it is."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pull_request.user import EMAIL, NAME, in_use, kept, known, left
from tests.sample import PROJECT, Done, Sample, commit, git, snapshot, upstream

BRANCH = "Subtract-in-the-core"
CORE = "src/demo/core.py"


@pytest.fixture
def checkout(sample: Sample) -> Path:
    return sample.checkouts / "demo-1.0"


def asked(sample: Sample, *arguments: str | Path, checkout: Path | None = None, project: str = "demo") -> Done:
    """`overlay pr`, without upstream's tests."""
    where = checkout or sample.checkouts / "demo-1.0"
    return sample.overlay("pr", project, "--checkout", where, "--python", "false", *arguments)


def undone(done: Done) -> None:
    """Runs the commands that a run gave to take everything away."""
    (line,) = re.findall(r"^(?:take it away  |To undo:    )(.*)$", done.stdout, re.MULTILINE)
    no_hooks = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.hooksPath", "GIT_CONFIG_VALUE_0": os.devnull}
    command = ["bash", "-e", "-c", line.replace("; ", "\n")]
    subprocess.run(command, env=os.environ | no_hooks, check=True, capture_output=True)


def test_the_branch_and_nothing_else(sample: Sample, checkout: Path) -> None:
    in_use(checkout)
    before, head = kept(checkout, BRANCH), git("rev-parse", "HEAD", folder=checkout)
    done = asked(known(sample)).succeeds()
    assert kept(checkout, BRANCH) == before
    tree = sample.checkouts / "demo-1.0-pull-request"
    assert git("symbolic-ref", "HEAD", folder=tree) == f"refs/heads/{BRANCH}"
    assert git("status", "--porcelain", folder=tree) == ""
    assert git("log", "--reverse", "--format=%s", f"{head}..{BRANCH}", folder=checkout).splitlines() == [
        "Subtract in the core",
        "Test it",
    ]
    assert b"value - 30" in (tree / CORE).read_bytes()
    assert b"value * 50" not in (tree / CORE).read_bytes(), "that patch is for wheels"
    assert (tree / "tests/test_core.py").is_file()
    assert "Nothing was pushed." in done.stdout
    undone(done)
    assert kept(checkout, BRANCH) == before
    assert left(sample) == []


def test_the_commits_are_the_users_own(sample: Sample, checkout: Path) -> None:
    asked(known(sample)).succeeds()
    form = "%an%n%ae%n%cn%n%ce%n%B"
    signed = f"Signed-off-by: {NAME} <{EMAIL}>"
    written = git("log", "-1", "--skip=1", f"--format={form}", BRANCH, folder=checkout).splitlines()
    assert written == [
        *(NAME, EMAIL, NAME, EMAIL),
        *("Subtract in the core", "", "The sample is wrong there, and this mends it.", "", signed),
    ]


def test_an_identity_of_the_environment(sample: Sample, checkout: Path) -> None:
    for role in ("AUTHOR", "COMMITTER"):
        sample.variables.update({f"GIT_{role}_NAME": f"A {role}", f"GIT_{role}_EMAIL": f"{role}@mail.example"})
    asked(sample).succeeds()
    assert git(
        "log", "-1", "--format=%an %ae, %cn: %(trailers:key=Signed-off-by,valueonly)", BRANCH, folder=checkout
    ) == ("A AUTHOR AUTHOR@mail.example, A COMMITTER: A COMMITTER <COMMITTER@mail.example>")


@pytest.mark.parametrize("name", ["0001-Subtract-in-the-core.patch", "Subtract-in-the-core"])
def test_one_patch_alone(sample: Sample, checkout: Path, name: str) -> None:
    done = asked(known(sample), "--patch", name).succeeds()
    assert git("log", "--format=%s", f"HEAD..{BRANCH}", folder=checkout) == "Subtract in the core"
    assert not (sample.checkouts / "demo-1.0-pull-request" / "tests/test_core.py").exists()
    text = (sample.checkouts / "demo-1.0-pull-request.md").read_text("utf-8")
    assert ("**Subtract in the core**" in text, "Test it" in text) == (True, False)
    assert "Test it" not in done.stdout


def test_several_patches_in_the_order_of_the_series(sample: Sample, checkout: Path) -> None:
    asked(known(sample), "--patch", sample.patch(3).name, "--patch", "Subtract-in-the-core").succeeds()
    subjects = git("log", "--reverse", "--format=%s", f"HEAD..{BRANCH}", folder=checkout).splitlines()
    assert subjects == ["Subtract in the core", "Test it"]


def test_a_patch_that_is_none(sample: Sample) -> None:
    said = "--patch: expected one of 0001-Subtract-in-the-core.patch, "
    asked(known(sample), "--patch", "Nothing").fails(said, "found 'Nothing': name one of them")
    assert left(sample) == []


def test_a_patch_that_needs_another(sample: Sample) -> None:
    first = sample.patch(1)
    text = first.read_text("utf-8").replace("Subtract in the core", "Subtract more")
    text = text.replace("- 30", "- 31").replace("-    return value + 30", "-    return value - 30")
    first.with_name("0004-Subtract-more.patch").write_text(text.replace("wheel, overlay, ", ""), "utf-8")
    with first.with_name("series").open("a") as series:
        series.write("0004-Subtract-more.patch\n")
    asked(known(sample), "--patch", "Subtract-more").fails(
        "--patch: expected patches that apply without 0001-Subtract-in-the-core.patch, 0003-Test-it.patch, found that",
        "name what they need, too",
    )
    assert left(sample) == []
    asked(sample, "--patch", "Subtract-more", "--patch", "Subtract-in-the-core").succeeds()


@pytest.mark.parametrize("lacking", ["user.name", "user.email"])
def test_without_an_identity(sample: Sample, checkout: Path, lacking: str) -> None:
    git("config", "--file", str(known(sample).folder / "home/.gitconfig"), "--unset", lacking, folder=checkout)
    asked(sample).fails("expected git to know your name and address", 'git config --global user.name "YOUR NAME"')
    assert left(sample) == []


def test_the_origin_of_a_backport_is_told(sample: Sample, checkout: Path) -> None:
    sample.rewrite(1, "Origin: this project", "Origin: backport, https://git.example/demo/pull/7")
    asked(known(sample)).succeeds()
    text = git("log", "-1", "--skip=1", "--format=%B", BRANCH, folder=checkout)
    assert "\n\nThis is a backport of https://git.example/demo/pull/7.\n\nSigned-off-by: " in text


@pytest.mark.parametrize("place", ["the message", "the code"])
def test_a_patch_that_names_this_project(sample: Sample, place: str) -> None:
    if place == "the code":
        sample.rewrite(1, "+    return value - 30", "+    return value - 30  # 1.0+overlay.1")
    else:
        sample.rewrite(1, "The sample is wrong there", "modeling-overlay mends it")
    asked(known(sample)).fails("0001-Subtract", "expected nothing of this project in what a pull request takes, found")
    assert left(sample) == []


def test_what_is_named(sample: Sample, checkout: Path, tmp_path: Path) -> None:
    old = git("rev-parse", "HEAD", folder=checkout)
    git("tag", "v1.0", folder=checkout)
    later = commit(checkout, "Nothing of it", {CORE: b"nothing\n"})
    asked(known(sample), "--base", "v1.0", "--branch", "mine/topic", "--tree", tmp_path / "a tree").succeeds()
    assert git("rev-parse", "mine/topic~2", folder=checkout) == old
    assert (tmp_path / "a tree.md").is_file()
    assert git("rev-parse", "HEAD", folder=checkout) == later
    done = asked(sample, "--base", old[:10]).succeeds()
    assert git("rev-parse", f"{BRANCH}-{old[:10]}~2", folder=checkout) == old
    assert (sample.checkouts / f"demo-1.0-pull-request-{old[:10]}").is_dir()
    undone(done)


def test_a_base_that_means_nothing_or_two_things(sample: Sample, checkout: Path) -> None:
    git("tag", "-a", "-m", "A release", "one", folder=checkout)
    git("branch", "one", folder=checkout)
    commit(checkout, "Later", {"src/demo/later.py": b"LATER = 1\n"})
    asked(known(sample), "--base", "one", "--branch", "both").succeeds()  # of the same commit
    git("branch", "--force", "one", folder=checkout)
    asked(sample, "--base", "one").fails("--base: expected one commit for 'one', found a branch and a tag: name one of")
    asked(sample, "--base", "").fails("--base: expected a branch, tag or commit '', found none")
    asked(sample, "--base", "refs/tags/one", "--branch", "other").succeeds()
    assert git("rev-parse", "other~2", folder=checkout) == git("rev-parse", "refs/tags/one^{commit}", folder=checkout)


def test_a_branch_of_a_remote(sample: Sample, checkout: Path, tmp_path: Path) -> None:
    git("branch", "release_v1.0", folder=checkout)
    git("clone", "--quiet", "--single-branch", str(checkout), str(tmp_path / "clone"), folder=tmp_path)
    clone = tmp_path / "clone"
    asked(known(sample), "--base", "release_v1.0", checkout=clone).fails(
        "--base: expected a branch, tag or commit 'release_v1.0', found none: fetch it first"
    )
    git("fetch", "--quiet", "origin", "release_v1.0:refs/remotes/origin/release_v1.0", folder=clone)
    config = (clone / ".git/config").read_bytes()
    asked(sample, "--base", "release_v1.0", checkout=clone).succeeds()
    assert (clone / ".git/config").read_bytes() == config, "the branch follows none"


def test_another_project_and_no_checkout(sample: Sample, tmp_path: Path) -> None:
    asked(known(sample), project="plain").fails("expected a checkout of plain, found one of demo")
    asked(sample, project="else").fails("expected a checkout of else, found one of demo: name one of demo, plain")
    asked(sample, checkout=tmp_path).fails("expected a git checkout at", "found none")
    asked(sample, project="Plain", checkout=sample.checkouts / "plain-3.0").succeeds()


def test_a_checkout_that_is_not_clean(sample: Sample, checkout: Path) -> None:
    def refused(what: str) -> None:
        before = snapshot(checkout)
        asked(sample).fails(f"{checkout}: expected a clean checkout, found {what}")
        assert snapshot(checkout) == before
        assert not (sample.checkouts / "demo-1.0-pull-request").exists()

    known(sample)
    (checkout / CORE).write_bytes(b"mine\n")
    refused(f"changes of {CORE}: commit or stash them")
    git("add", "--all", folder=checkout)
    (checkout / CORE).write_bytes(upstream("demo", "1.0")["demo/core.py"])
    refused(f"changes of {CORE}")  # staged, though the file is as it was
    git("reset", "--quiet", "--hard", folder=checkout)
    (checkout / CORE).unlink()
    (checkout / "src/demo/table.bin").unlink()
    refused(f"changes of {CORE} and 1 more")
    git("reset", "--quiet", "--hard", folder=checkout)
    git("branch", "other", folder=checkout)
    commit(checkout, "x", {CORE: b"one\n"})
    git("switch", "--quiet", "other", folder=checkout)
    commit(checkout, "y", {CORE: b"two\n"})
    git("merge", "main", folder=checkout, check=False)
    refused("a merge under way: finish or abort it first")
    git("merge", "--abort", folder=checkout)
    git("rebase", "main", folder=checkout, check=False)
    refused("a rebase under way")


def test_the_users_index_is_not_written(sample: Sample, checkout: Path) -> None:
    (checkout / CORE).touch()  # git status would write the index now
    index = (checkout / ".git/index").stat()
    sample.variables.update({"GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere", "GIT_WORK_TREE": "/nowhere"})
    asked(known(sample)).succeeds()
    after = (checkout / ".git/index").stat()
    assert (after.st_ino, after.st_mtime_ns) == (index.st_ino, index.st_mtime_ns)


@pytest.mark.parametrize("kind", ["bare", "shallow", "sparse", "work tree", "inside", "through a link"])
def test_checkouts_of_all_kinds(sample: Sample, checkout: Path, kind: str) -> None:
    commit(checkout, "Later", {"src/demo/later.py": b"LATER = 1\n"})
    place = sample.folder / "other" / kind
    place.parent.mkdir()
    if kind == "work tree":
        git("worktree", "add", "--quiet", "--detach", str(place), folder=checkout)
    elif kind == "through a link":
        place.symlink_to(checkout)
    elif kind == "inside":
        place = checkout / "src" / "demo"
    else:
        option = {"bare": "--bare", "shallow": "--depth=1", "sparse": "--sparse"}[kind]
        git("clone", "--quiet", option, checkout.as_uri(), str(place), folder=sample.folder)
    asked(known(sample), checkout=place).succeeds()
    assert kind != "sparse" or not (place / "src").exists()
    beside = place.parent if kind in ("bare", "shallow", "sparse", "work tree") else checkout.parent
    (tree,) = beside.glob("*-pull-request")
    assert git("log", "-2", "--format=%s", folder=tree) == "Test it\nSubtract in the core"
    assert (tree / "src/demo/later.py").is_file()
    assert git("status", "--porcelain", folder=tree) == ""


def test_nothing_is_overwritten(sample: Sample, checkout: Path) -> None:
    asked(known(sample)).succeeds()
    tree = sample.checkouts / "demo-1.0-pull-request"
    before = snapshot(sample.checkouts)
    asked(sample).fails(
        f"expected no branch {BRANCH}, found one", "--branch", "git -C", "worktree remove --force", BRANCH
    )
    asked(sample, "--branch", "other").fails(f"{tree}: expected nothing there, found a folder", "--tree")
    text = sample.checkouts / "tree.md"
    text.touch()
    before = snapshot(sample.checkouts)
    asked(sample, "--branch", "other", "--tree", text.with_suffix("")).fails(
        f"{text}: expected nothing there, found a file"
    )
    asked(sample, "--branch", "a..b", "--tree", tree.with_name("x")).fails("expected a name for a branch, found 'a..b'")
    asked(sample, "--branch", "other", "--tree", tree / "y" / "z").fails("expected its parent folder, found none")
    assert snapshot(sample.checkouts) == before


def test_what_a_kill_leaves_can_be_taken_away(sample: Sample, checkout: Path) -> None:
    """git locks a work tree while it makes it."""
    before = kept(checkout, BRANCH)
    tree = sample.checkouts / "demo-1.0-pull-request"
    git("worktree", "add", "--lock", "--reason=initializing", "-b", BRANCH, str(tree), folder=checkout)
    done = asked(known(sample))
    done.fails(f"expected no branch {BRANCH}, found one, of an earlier run perhaps")
    commands = done.stderr.rpartition("take it away: ")[2].replace("; ", "\n")
    subprocess.run(["bash", "-e", "-c", commands], check=True, capture_output=True)
    assert kept(checkout, BRANCH) == before
    assert left(sample) == []


def test_what_git_says_of_many_files_is_told_in_short(sample: Sample, checkout: Path) -> None:
    """As where the disk is full."""
    commit(checkout, "Many", {f"src/demo/many/{number}.py": b"x = 1\n" for number in range(300)})
    lost = git("rev-parse", "HEAD:src/demo/many/0.py", folder=checkout)
    (checkout / ".git/objects" / lost[:2] / lost[2:]).unlink()
    done = asked(known(sample))
    done.fails("git worktree add failed: ", "lines more)", "mend that and run this again")
    assert len(done.stderr) < 1000
    assert left(sample) == []


def conflict(checkout: Path) -> bytes:
    """Commits another change of the line that the patch changes; gives the file."""
    core = upstream("demo", "1.0")["demo/core.py"].replace(b"return value + 30\n", b"return value + 300\n")
    commit(checkout, "Development", {CORE: core})
    return core


def test_a_conflict_stops_with_its_state(sample: Sample, checkout: Path) -> None:
    core = conflict(checkout)
    before = kept(checkout, BRANCH)
    done = asked(known(sample))
    done.fails("a patch does not apply to", "git am --continue")
    assert kept(checkout, BRANCH) == before
    tree = sample.checkouts / "demo-1.0-pull-request"
    assert f"Patch 1 of 2 does not apply: Subtract in the core\n  in conflict, with markers in the file: {CORE}\n" in (
        done.stdout
    )
    assert "The 0 before it are on the branch; 1 come after it." in done.stdout
    assert b"<<<<<<<" in (tree / CORE).read_bytes()
    assert "were not run" in done.stdout
    assert (tree.parent / f"{tree.name}.md").is_file()
    asked(sample).fails(f"{tree}: the conflict of the run before is open there still", "worktree remove --force")
    assert b"<<<<<<<" in (tree / CORE).read_bytes()
    (tree / CORE).write_bytes(core.replace(b"return value + 300\n", b"return value - 300\n"))
    git("add", CORE, folder=tree)
    git("am", "--continue", folder=tree)
    signed = git("log", "-2", "--format=%s%n%b", folder=tree)
    assert signed.startswith("Test it\n")
    assert signed.count("Signed-off-by: ") >= 2
    undone(done)
    assert kept(checkout, BRANCH) == before
    assert left(sample) == []


def test_a_conflict_without_the_file_that_the_patch_was_made_of(sample: Sample, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    shutil.copytree(sample.checkouts / "demo-1.0" / "src", fresh / "src")
    git("init", "--quiet", "--template=", folder=fresh)
    conflict(fresh)
    done = asked(known(sample), checkout=fresh)
    done.fails("a patch does not apply to")
    assert f"  unchanged, for git has not the file that the patch was made of: {CORE}\n" in done.stdout
    assert "git am --show-current-patch=diff | git apply --reject" in done.stdout
    undone(done)
    assert git("branch", "--format=%(refname:short)", folder=fresh) in ("main", "master")


def test_a_commit_between_releases_is_merged(sample: Sample, checkout: Path) -> None:
    core = upstream("demo", "1.0")["demo/core.py"].replace(b"def core_31(value):", b"def core_31(value, more=0):")
    commit(checkout, "Development", {CORE: core, "src/demo/__init__.py": b'__version__ = "1.2.dev0"\n'})
    asked(known(sample)).succeeds()
    merged = git("show", f"{BRANCH}:{CORE}", folder=checkout)
    assert "return value - 30\n\n\ndef core_31(value, more=0):" in merged


def test_no_series_is_for_it(sample: Sample, checkout: Path) -> None:
    commit(checkout, "x", {CORE: b"nothing\n", "src/demo/__init__.py": b'__version__ = "0.9"\n'})
    asked(known(sample)).fails("expected a commit that a series of demo is for, found none of them", "does not fit")
    commit(checkout, "x", {"src/demo/__init__.py": b""})
    asked(sample).fails("expected a commit that a series of demo is for, found none of them")
    assert left(sample) == []


def test_git_that_cannot_sign(sample: Sample, checkout: Path) -> None:
    before = kept(checkout)
    asked(known(sample, {"commit.gpgSign": "true", "gpg.program": "false"})).fails(
        "git am failed", "gpg failed to sign"
    )
    assert kept(checkout) == before
    assert left(sample) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_leaves_nothing(sample: Sample, checkout: Path, number: signal.Signals) -> None:
    before, reached, program = kept(checkout), sample.folder / "reached", sample.folder / "gpg"
    program.write_text(f"#!/bin/sh\ntouch {reached}\nwhile kill -0 $PPID; do sleep 0.1; done\n")  # it ends with git
    program.chmod(0o755)
    process = known(sample, {"commit.gpgSign": "true", "gpg.program": str(program)}).start(
        "pr", "demo", "--checkout", checkout, "--python", "false"
    )
    while not reached.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(600) == 130
    assert kept(checkout) == before
    assert left(sample) == []


def test_nothing_is_pushed_or_fetched(sample: Sample, checkout: Path, tmp_path: Path) -> None:
    for file in (PROJECT / "overlay/pull_request").glob("*.py"):
        assert not re.search(r'"(push|fetch|pull|send-email|request-pull|remote|ls-remote)"', file.read_text("utf-8"))
    git("config", "uploadpack.allowFilter", "true", folder=checkout)
    origin = snapshot(checkout)
    command = ("clone", "--quiet", "--no-checkout", "--filter=blob:none", checkout.as_uri(), str(tmp_path / "part"))
    git(*command, folder=tmp_path)
    git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main", folder=tmp_path / "part")
    git("read-tree", "--empty", folder=tmp_path / "part")
    objects = snapshot(tmp_path / "part/.git/objects")
    asked(known(sample), "--base", "origin/main", checkout=tmp_path / "part").fails()
    assert snapshot(tmp_path / "part/.git/objects") == objects
    assert snapshot(checkout) == origin
