"""One version of a built wheel never has two contents, as far as commits say."""

import os
import re
from pathlib import Path

import pytest

from overlay.queue import history, lock
from tests.sample import Sample, git
from tests.variants import ROOT


def committed(sample: Sample, text: str = "Commit") -> None:
    git("add", "--all", folder=sample.root)
    git("commit", "--quiet", "--message", text, folder=sample.root)


@pytest.fixture
def repository(sample: Sample) -> Sample:
    """The sample, in a git repository."""
    git("init", "--quiet", "--template=", "--initial-branch=main", folder=sample.root)
    committed(sample)
    return sample


def rewritten(sample: Sample, old: int, new: int) -> None:
    """Changes a patch, and the lock by hand so that it agrees, under the same revision."""
    before = sample.lock.read_text()
    sample.rewrite(1, f"+    return value - {old}", f"+    return value - {new}")
    sample.overlay("lock", "update").succeeds()
    sample.lock.write_text(
        re.sub(r"revision = [23]", "revision = 1", sample.lock.read_text()).replace("overlay.2-", "overlay.1-")
    )
    assert sample.lock.read_text() != before


def test_other_bytes_under_a_committed_revision(repository: Sample) -> None:
    repository.overlay("lock", "check").succeeds()
    rewritten(repository, 30, 31)
    said = repository.overlay("lock", "check").fails(
        "packages.demo.releases[0].built.sha256: expected ",
        "for revision 1, as commit ",
        "other bytes need another revision",
        "run overlay lock update demo==1.0",
    )
    assert re.match(rf"overlay: {re.escape(str(repository.lock))}:\d+: ", said)
    repository.overlay("lock", "update", "demo==1.0").succeeds()
    assert "revision = 2\n" in repository.lock.read_text()
    repository.overlay("lock", "check").succeeds()


def test_a_revision_that_is_not_committed_may_change(repository: Sample) -> None:
    repository.rewrite(1, "+    return value - 30", "+    return value - 31")
    repository.overlay("lock", "update").succeeds()
    found = re.search(r'overlay\.2-py3-none-any.whl", sha256 = "(\w+)"', repository.lock.read_text())
    assert found is not None
    text = repository.lock.read_text()
    repository.lock.write_text(text.replace(found[1], "0" * 64))
    repository.overlay("lock", "check").succeeds()
    repository.lock.write_text(text)
    committed(repository)
    repository.overlay("lock", "check").succeeds()
    repository.lock.write_text(text.replace(found[1], "0" * 64))
    repository.overlay("lock", "check").fails("for revision 2, as commit ")


def test_what_a_commit_itself_changes_is_seen(repository: Sample) -> None:
    """As continuous integration has it: the change is in HEAD."""
    rewritten(repository, 30, 31)
    committed(repository)
    repository.overlay("lock", "check").fails("for revision 1, as commit ")
    (repository.root / "notes").touch()
    committed(repository)
    repository.overlay("lock", "check").succeeds()


def test_a_branch_is_compared_with_where_it_left(repository: Sample) -> None:
    git("checkout", "--quiet", "-b", "topic", "--track", "main", folder=repository.root)
    rewritten(repository, 30, 31)
    committed(repository)
    (repository.root / "notes").touch()
    committed(repository)
    repository.overlay("lock", "check").fails("for revision 1, as commit ")


def test_a_branch_that_was_pushed_is_compared_with_where_it_left(repository: Sample) -> None:
    """Then it follows itself."""
    other = repository.folder / "other.git"
    git("clone", "--quiet", "--bare", str(repository.root), str(other), folder=repository.folder)
    git("remote", "add", "origin", str(other), folder=repository.root)
    git("fetch", "--quiet", "origin", folder=repository.root)
    git("checkout", "--quiet", "-b", "topic", folder=repository.root)
    rewritten(repository, 30, 31)
    committed(repository)
    (repository.root / "notes").touch()
    committed(repository)
    git("push", "--quiet", "--set-upstream", "origin", "topic", folder=repository.root)
    repository.overlay("lock", "check").fails("for revision 1, as commit ")


def revisions(sample: Sample) -> list[str]:
    return re.findall(r"revision = (\d+)", sample.lock.read_text())


@pytest.mark.parametrize("how", ["set back", "taken out", "pinned anew"])
def test_a_revision_of_an_earlier_commit_is_not_given_again(repository: Sample, how: str) -> None:
    for old, new in ((30, 31), (31, 32)):
        repository.rewrite(1, f"+    return value - {old}", f"+    return value - {new}")
        repository.overlay("lock", "update", "demo==1.0", "demo==1.1").succeeds()
        committed(repository)
    text = repository.lock.read_text()
    built = re.search(r"built = .*overlay\.3.*\n", text)
    assert built is not None
    if how == "set back":
        repository.lock.write_text(text.replace(built[0], "").replace("revision = 3", "revision = 2"))
    else:
        entry = text[text.index("[[packages.demo.releases]]") : text.index("# Only for the tests.")]
        repository.lock.write_text(text.replace(entry, ""))
        committed(repository)
        (repository.root / "notes").touch()
        committed(repository)
    repository.rewrite(1, "+    return value - 32", "+    return value - 33")
    if how != "set back":
        repository.overlay("add-release", "demo==1.0", "--use", "deliver").succeeds()
    if how == "taken out":  # and its revision by hand
        repository.lock.write_text(repository.lock.read_text().replace("revision = 4", "revision = 2"))
        repository.lock.write_text(repository.lock.read_text().replace("overlay.4-", "overlay.2-"))
        repository.overlay("lock", "update", "demo==1.1").succeeds()
        (repository.cache / "modeling-overlay").rename(repository.folder / "away")
        repository.overlay("lock", "check").fails("for revision 2, as commit ")
        return
    repository.overlay("lock", "update").succeeds()
    assert sorted(revisions(repository)) == ["1", "1", "4"]
    repository.overlay("lock", "check").succeeds()


def test_apply_gives_no_other_bytes_to_a_committed_revision(repository: Sample) -> None:
    """A lock that agrees with its patches, as it is made where nothing is committed."""
    (repository.root / ".git").rename(repository.folder / "away")
    repository.rewrite(1, "+    return value - 30", "+    return value - 31")
    repository.lock.write_text(re.sub(r"built = .*demo-1\.0.*\n", "", repository.lock.read_text()))
    repository.overlay("lock", "update").succeeds()
    (repository.folder / "away").rename(repository.root / ".git")
    assert revisions(repository) == ["1", "1", "1"]
    repository.apply().fails("for revision 1, as commit HEAD has it, found ", "run overlay lock update demo==1.0")
    assert not repository.out.exists()
    repository.overlay("lock", "update").succeeds()
    repository.apply("demo==1.0").succeeds()
    assert (repository.out / "demo-1.0+overlay.2-py3-none-any.whl").is_file()


def test_a_shallow_clone_says_so(repository: Sample) -> None:
    committed_twice = repository.root / "notes"
    committed_twice.touch()
    committed(repository)
    clone = repository.folder / "clone"
    git("clone", "--quiet", "--depth", "1", repository.root.as_uri(), str(clone), folder=repository.folder)
    done = repository.overlay("lock", "check", "--root", clone).succeeds()
    assert "is a shallow clone: what its commits lack was not looked at" in done.stderr
    assert "shallow" not in repository.overlay("lock", "check").succeeds().stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository to somebody else")
def test_a_repository_that_git_distrusts(repository: Sample) -> None:
    os.chown(repository.root, 1234, 1234)
    assert "what is committed was not looked at" in repository.overlay("lock", "check").succeeds().stderr


def test_no_wheel_of_this_project_has_changed_under_its_revision() -> None:
    """So that continuous integration sees it, in a clone that has the commits to compare with."""
    history.check(ROOT / "upstream.lock", lock.read(ROOT / "upstream.lock"))


def test_a_lock_of_another_form_says_nothing(repository: Sample, tmp_path: Path) -> None:
    whole = repository.lock.read_bytes()
    for content in (b"\xff", b"packages = 1", b"[packages.demo]\nreleases = [1]"):
        repository.lock.write_bytes(content)
        committed(repository)
        repository.lock.write_bytes(whole)
        repository.overlay("lock", "check").succeeds()
