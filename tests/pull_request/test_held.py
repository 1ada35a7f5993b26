"""What upstream has already is said, with since when, and what is left is offered."""

from pathlib import Path

import pytest

from tests.pull_request.user import known, left
from tests.sample import Done, Sample, commit, git, upstream

CORE = "plain/core.py"
MENDED = upstream("plain", "3.0")[CORE].replace(b"return value + 30\n", b"return value - 30  # as upstream has it\n")


@pytest.fixture
def checkout(sample: Sample) -> Path:
    """The history of a project whose main branch has the change, and whose release branch has not."""
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 3.1", series="plain-3.0")
    sample.rewrite(1, "this project", "backport, https://git.example/plain/pull/7", series="plain-3.0")
    checkout = known(sample).checkouts / "plain-3.0"
    git("branch", "release_v3.0", folder=checkout)
    git("branch", "release_v2.9", folder=checkout)
    git("tag", "v3.0", folder=checkout)
    commit(checkout, "Talk of (#7) alone", {CORE: b"# nothing\n" + MENDED.replace(b" - 30", b" + 30")})
    commit(checkout, "Subtract (#7)", {CORE: MENDED})
    git("tag", "v3.1", folder=checkout)
    commit(checkout, "Something else", {"plain/other.py": b"x = 1\n"})
    git("tag", "v3.10", folder=checkout)
    return checkout


def asked(sample: Sample, checkout: Path, *arguments: str | Path) -> Done:
    return sample.overlay("pr", "plain", "--checkout", checkout, "--python", "false", *arguments)


def test_since_when_and_where_it_is_lacking(sample: Sample, checkout: Path) -> None:
    brought = git("log", "-1", "--format=%h", "HEAD^", folder=checkout)
    done = asked(sample, checkout).succeeds()
    assert (
        "upstream has: Subtract in the core (since 3.1, commit "
        f"{brought} of 2026-11-01, 'Subtract (#7)', first in v3.1)\n"
    ) in done.stdout
    assert "Nothing is left for a pull request here, and nothing was made." in done.stdout
    commands = [line.split() for line in done.stdout.splitlines() if line.startswith("  overlay pr ")]
    assert commands == [["overlay", "pr", "plain", "--checkout", str(checkout), "--base", "release_v3.0"]]
    assert left(sample) == ["release_v2.9", "release_v3.0"]
    done = sample.overlay(*commands[0][1:], "--python", "false").succeeds()
    assert "later, upstream has: Subtract in the core (since 3.1)" in done.stdout
    assert b"value - 30\n" in (sample.checkouts / "plain-3.0-pull-request-release-v3.0" / CORE).read_bytes()


def test_a_shallow_clone_says_what_the_patch_knows(sample: Sample, checkout: Path) -> None:
    clone = sample.folder / "clone"
    git("clone", "--quiet", "--depth=1", "--no-tags", checkout.as_uri(), str(clone), folder=sample.folder)
    git("tag", "v3.2", folder=clone)
    done = asked(sample, clone).succeeds()
    assert "upstream has: Subtract in the core (since 3.1)\n" in done.stdout
    assert "fetch one for a backport of it" in done.stdout


def test_by_the_content_that_the_lock_names(sample: Sample, checkout: Path) -> None:
    blob = git("rev-parse", f"HEAD:{CORE}", folder=checkout)
    with sample.lock.open("a", encoding="utf-8") as file:
        file.write(f'\n[[packages.plain.fixed]]\nversion = "3.1"\nfiles = [{{path = "{CORE}", blob = "{blob}"}}]\n')
    fresh = sample.folder / "fresh"
    fresh.mkdir()
    git("init", "--quiet", "--template=", folder=fresh)
    commit(fresh, "A release", {f"plain/{name}": b"" for name in ("__init__.py", "x.py")} | {CORE: MENDED})
    done = asked(sample, fresh).succeeds()
    assert "upstream has: Subtract in the core (since 3.1)\n" in done.stdout


def test_one_of_several_that_is_applied_already(sample: Sample) -> None:
    """The others are made a pull request."""
    checkout = known(sample).checkouts / "demo-1.0"
    files = {"tests/test_core.py": b"def test_core():\n    pass\n"}
    core = upstream("demo", "1.0")["demo/core.py"].replace(b"def core_31(value):", b"def core_31(value, more=0):")
    commit(checkout, "Upstream's own test", files | {"src/demo/core.py": core})
    done = sample.overlay("pr", "demo", "--checkout", checkout, "--python", "false").succeeds()
    assert "upstream has: Test it (since a release that is not known)\n" in done.stdout
    (subject,) = git("log", "--format=%s", "main..Subtract-in-the-core", folder=checkout).splitlines()
    assert subject == "Subtract in the core"


def test_faults_that_later_series_do_not_have(sample: Sample) -> None:
    fault = "Fault: minus: it adds\nDelivery: wheel, overlay, pull-request"
    sample.rewrite(1, "Delivery: wheel, overlay, pull-request", fault)
    known(sample)
    done = sample.overlay("pr", "demo", "--checkout", sample.checkouts / "demo-1.0", "--python", "false").succeeds()
    assert "later, upstream has: a fix of minus, it adds (since 2.0)\n" in done.stdout
    done = sample.overlay("pr", "demo", "--checkout", sample.checkouts / "demo-2.0", "--python", "false").succeeds()
    assert "upstream has: a fix of minus, it adds (since 2.0)\n" in done.stdout
    text = (sample.checkouts / "demo-2.0-pull-request.md").read_text("utf-8")
    assert "Not in here, because it is there already:\n\n- a fix of this: it adds (since 2.0)\n" in text
