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
