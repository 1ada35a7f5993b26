"""`overlay lock check`, `update` and `complete`."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.sample import Sample, commit, git, snapshot, upstream


def without_network() -> list[str]:
    """A command that runs another one without any network; skips where this machine lets nobody have one."""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("unshare --net is not to be had here")
    return command


def releases(sample: Sample) -> dict[str, tuple[int, str]]:
    """Revision and sha256 of every built wheel in the lock."""
    rows = re.findall(
        r'^version = "(.+)"\n(?:.+\n)*?revision = (\d+)\n(?:.+\n)*?built = \{.*sha256 = "([0-9a-f]+)"',
        sample.lock.read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 3
    return {version: (int(revision), sha256) for version, revision, sha256 in rows}


def test_check_needs_no_network_and_no_artefact(sample: Sample) -> None:
    shutil.rmtree(sample.cache)
    shutil.rmtree(sample.index)
    done = sample.overlay("lock", "check", prefix=without_network()).succeeds()
    assert done.stdout == f"{sample.lock} is sound\n"
    lines = done.stderr.splitlines()
    assert lines
    assert all("is not in the cache: whether " in line for line in lines)
    assert not sample.cache.exists()


def test_check_sees_a_patch_that_was_edited_where_the_artefact_is_in_the_cache(sample: Sample) -> None:
    patch = sample.patch(1)
    text = patch.read_text()
    added = next(row for row in text.splitlines() if row.startswith("+") and not row.startswith("+++"))
    patch.write_text(text.replace(added, f"{added}  # edited", 1))
    sample.overlay("lock", "check").fails("expected the blob", "the series has changed since the lock was written")


def test_comments_between_files_survive(sample: Sample) -> None:
    text = sample.lock.read_text()
    at = text.index("  {path = ")
    sample.lock.write_text(f"{text[:at]}  # why this file\n{text[at:]}")
    patch = sample.patch(1)
    content = patch.read_text()
    added = next(row for row in content.splitlines() if row.startswith("+") and not row.startswith("+++"))
    patch.write_text(content.replace(added, f"{added}  # edited", 1))
    sample.overlay("lock", "update").succeeds()
    assert "  # why this file\n" in sample.lock.read_text()


def test_check_names_the_file_that_no_patch_changes(sample: Sample) -> None:
    sample.edit('path = "plain/layers/block.py"', 'path = "plain/layers/other.py"')
    sample.overlay("lock", "check").fails("packages.plain.releases[0].files: plain/layers/", "run overlay lock update")


def test_check_names_the_file_that_the_lock_lacks(sample: Sample) -> None:
    text = sample.lock.read_text()
    sample.lock.write_text(re.sub(r"  \{path = .demo/__init__.*\n", "", text, count=1))
    number = text[: text.index("files = [")].count("\n") + 1
    said = sample.overlay("lock", "check").fails(
        "packages.demo.releases[0].files: demo/__init__.py: it is missing: run overlay lock update"
    )
    assert said.startswith(f"overlay: {sample.lock}:{number}: ")


def test_check_wants_the_hash_of_each_built_wheel(sample: Sample) -> None:
    sample.lock.write_text(re.sub(r"built = .*\n", "", sample.lock.read_text(), count=1))
    sample.overlay("lock", "check").fails("packages.demo.releases[0].built: missing", "run overlay lock update")
    sample.apply().fails("demo 1.0: expected the sha256 of the patched wheel", "run overlay lock update")
    sample.overlay("lock", "update").succeeds()
    sample.overlay("lock", "check").succeeds()


def test_check_looks_at_series_that_nothing_uses(sample: Sample) -> None:
    (sample.root / "patches" / "demo-9.0").mkdir()
    sample.overlay("lock", "check").fails("demo-9.0/series", "found no such file")


def test_check_wants_the_patches(sample: Sample) -> None:
    shutil.rmtree(sample.root / "patches")
    sample.overlay("lock", "check").fails("patches/demo-1.0-1.1/series", "found no such file")


def test_the_revision_rises_when_the_bytes_change_and_only_then(sample: Sample) -> None:
    before = releases(sample)
    sample.rewrite(1, "Last-Update: 2026-11-28", "Last-Update: 2026-11-29")
    sample.overlay("lock", "update").succeeds()
    assert releases(sample) == before, "another day changes no byte of the wheel"
    sample.rewrite(1, "+    return value - 30", "+    return value - 31")
    sample.apply().fails("demo 1.0: demo/core.py: expected the blob", "after the series", "run overlay lock update")
    sample.overlay("lock", "update").succeeds()
    after = releases(sample)
    assert {version for version in before if after[version] != before[version]} == {"1.0"}
    assert (before["1.0"][0], after["1.0"][0]) == (1, 2)
    sample.overlay("lock", "update").succeeds()
    assert releases(sample) == after
    sample.overlay("lock", "check").succeeds()
    sample.apply().succeeds()
    assert (sample.out / "demo-1.0+overlay.2-py3-none-any.whl").is_file()


def test_the_revision_rises_when_a_patch_says_something_else(sample: Sample) -> None:
    """Its message is in the wheel's SBOM."""
    sample.rewrite(1, "Subtract in the core", "Take away in the core")
    sample.overlay("lock", "update").succeeds()
    assert {version: revision for version, (revision, _) in releases(sample).items()} == {"1.0": 2, "2.0": 1, "3.0": 1}


def test_a_release_for_tests_is_updated_too(sample: Sample) -> None:
    before = sample.lock.read_text()
    sample.lock.write_text(before.replace("86a28efee88c36125aa0110d103a34f0c8e01a22", "0" * 40))
    sample.overlay("lock", "update", "demo==1.1").succeeds()
    assert sample.lock.read_text() == before


def test_update_takes_only_what_is_pinned(sample: Sample) -> None:
    for name in ("demo==9.9", "demo", "other==1.0", "demo=1.0", "demo==1.0+overlay.1"):
        sample.overlay("lock", "update", name).fails(
            "expected one of the pinned releases (demo==1.0, demo==1.1", repr(name)
        )


def completed(sample: Sample, folder: Path) -> str:
    sample.overlay("lock", "complete", "--checkout", folder).succeeds()
    sample.overlay("lock", "check").succeeds()
    found = re.search(
        r'id = "([0-9a-f]{40})"( .*)?\nverified = true\nseries = "(.+)"\nfiles = \[', sample.lock.read_text()
    )
    assert found is not None
    assert (found[2] or "").strip() == "# the commit of the report", "the comment stays"
    assert found[3] == "demo-1.0-1.1"
    return found[1]


def test_complete_fills_in_an_abbreviated_commit(sample: Sample) -> None:
    checkout = sample.checkouts / "demo-1.0"
    before = snapshot(checkout)
    whole = sample.lock.read_text()
    assert completed(sample, checkout) == git("rev-parse", "HEAD", folder=checkout)
    assert snapshot(checkout) == before
    text = sample.lock.read_text()
    assert text.replace(
        git("rev-parse", "HEAD", folder=checkout), git("rev-parse", "HEAD", folder=checkout)[:9]
    ).startswith(whole[: whole.index("verified")])
    before_and_after = "573ad40373dcc9ef5d6baadf8bb9cd54853a0c0d", "89300767ea1763623b0088f9c23fc9583d665aa3"
    core = '{{path = "demo/core.py", before = "{}", after = "{}"}}'.format(*before_and_after)
    assert text.count(core) == 2, "the commit's blobs are those of the release"
    assert completed(sample, checkout) == git("rev-parse", "HEAD", folder=checkout), "twice is as once"


def test_complete_reads_the_commit_and_not_what_is_checked_out(sample: Sample) -> None:
    checkout = sample.checkouts / "demo-1.0"
    pinned = git("rev-parse", "HEAD", folder=checkout)
    commit(checkout, "Later", {"src/demo/core.py": b"nothing\n"})
    (checkout / "src/demo/layers/block.py").write_text("not committed\n")
    git("branch", pinned[:9], folder=checkout)  # git would take the branch for the commit
    assert completed(sample, checkout) == pinned


def test_complete_from_a_folder_inside_the_checkout(sample: Sample) -> None:
    completed(sample, sample.checkouts / "demo-1.0" / "src")


def test_complete_wants_the_commit(sample: Sample) -> None:
    before = sample.lock.read_bytes()
    sample.overlay("lock", "complete", "--checkout", sample.checkouts / "demo-2.0").fails(
        "expected the commit", "found no such commit: fetch it first"
    )
    assert sample.lock.read_bytes() == before


def test_complete_wants_a_checkout_of_the_project(sample: Sample) -> None:
    before = sample.lock.read_bytes()
    other = sample.folder / "other"
    other.mkdir()
    sample.overlay("lock", "complete", "--checkout", other).fails(f"expected a git checkout at {other}, found none")
    sample.overlay("lock", "complete", "--checkout", other / "missing").fails(
        "expected a git checkout at", "found no folder"
    )
    git("init", "--quiet", folder=other)
    sample.overlay("lock", "complete", "--checkout", other).fails("expected the commit HEAD, found no such commit")
    commit(other, "Nothing of demo", {"README": b"\n"})
    sample.overlay("lock", "complete", "--checkout", other).fails(
        "expected a checkout of one of demo, plain, found none of src/demo, plain"
    )
    sample.overlay("lock", "complete", "--checkout", sample.checkouts / "plain-3.0").fails(
        "expected a commit pin under packages.plain, found none"
    )
    assert sample.lock.read_bytes() == before


def test_complete_wants_one_series_that_fits(sample: Sample) -> None:
    checkout = sample.checkouts / "demo-1.0"
    patches = sample.root / "patches"
    shutil.copytree(patches / "demo-1.0-1.1", patches / "demo-1.5")
    sample.overlay("lock", "complete", "--checkout", checkout).fails(
        "expected one series that fits, found demo-1.0-1.1, demo-1.5: narrow one of them"
    )
    shutil.rmtree(patches / "demo-1.5")
    third = commit(
        checkout,
        "Neither",
        {"src/demo/core.py": upstream("demo", "1.0")["demo/core.py"].replace(b"value + 30", b"value + 31")},
    )
    sample.lock.write_text(re.sub(r'id = "[0-9a-f]+"', f'id = "{third}"', sample.lock.read_text()))
    said = sample.overlay("lock", "complete", "--checkout", checkout).fails(
        "expected one series that fits, found none: ", "does not fit", "does not fit"
    )
    assert "demo-1.0-1.1" in said
    assert "demo-2.0" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository to somebody else")
def test_complete_says_that_git_distrusts_a_checkout(sample: Sample) -> None:
    checkout = sample.checkouts / "demo-1.0"
    os.chown(checkout, 1234, 1234)
    sample.overlay("lock", "complete", "--checkout", checkout).fails(
        "belongs to another user", f"git config --global --add safe.directory {checkout}"
    )
