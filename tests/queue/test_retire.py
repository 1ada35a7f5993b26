"""`overlay retire`."""

import re
import shutil
import subprocess

from tests.sample import Sample


def test_everything_is_needed(sample: Sample) -> None:
    assert sample.overlay("retire").succeeds().stdout == "every series is needed\n"


def test_a_series_that_no_release_needs(sample: Sample) -> None:
    text = sample.lock.read_text()
    sample.lock.write_text(
        re.sub(r'\[\[packages\.demo\.releases\]\]\nversion = "2\.0"\n(.+\n)+?\]\nbuilt.*\n', "", text)
    )
    said = sample.overlay("retire").succeeds().stdout
    assert said == "demo-2.0: no pinned release needs it: git rm -r patches/demo-2.0\n"
    before = sample.lock.read_bytes()
    shutil.rmtree(sample.root / "patches" / "demo-2.0")
    assert sample.overlay("retire").succeeds().stdout == "every series is needed\n"
    assert sample.lock.read_bytes() == before


def test_a_commit_pin_needs_its_series(sample: Sample) -> None:
    sample.overlay("lock", "complete", "--checkout", sample.checkouts / "demo-1.0").succeeds()
    text = sample.lock.read_text()
    for version in ("1.0", "1.1"):
        text = re.sub(
            rf'(# .*\n)?\[\[packages\.demo\.releases\]\]\nversion = "{re.escape(version)}"\n(.+\n)+?\](\nbuilt.*)?\n',
            "",
            text,
        )
    sample.lock.write_text(text)
    assert sample.overlay("retire").succeeds().stdout == "every series is needed\n"


def test_a_pin_for_the_tests_with_the_files_of_another(sample: Sample) -> None:
    text = sample.lock.read_text()
    first = re.search(r'\n  \{path = "demo/core\.py".*', text)
    assert first is not None
    sample.lock.write_text(re.sub(r'\n  \{path = "demo/core\.py".*', lambda _: first[0], text, count=2))
    assert sample.overlay("retire").succeeds().stdout.splitlines()[1:] == [
        "demo 1.1: it is pinned for the tests alone, and the files that demo-1.0-1.1 changes are those of 1.0: take "
        "its entry out of upstream.lock"
    ]


def test_patches_that_upstream_has_everywhere_and_that_nobody_takes(sample: Sample) -> None:
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 1.0")
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 2.1", "demo-2.0")
    assert sample.overlay("retire").succeeds().stdout.splitlines() == [
        "every series is needed",
        "demo-1.0-1.1/0001-Subtract-in-the-core.patch: upstream has it since 1.0, and so has every release that the "
        "series serves (1.0 and later): drop its commit (overlay edit, overlay refresh)",
    ]


def test_the_command_that_it_gives_works(sample: Sample) -> None:
    shutil.copytree(sample.root / "patches" / "demo-2.0", sample.root / "patches" / "demo-9.0")
    subprocess.run(["git", "init", "--quiet"], cwd=sample.root, check=True)
    subprocess.run(["git", "add", "patches"], cwd=sample.root, check=True)
    said = sample.overlay("retire").succeeds().stdout
    command = said.strip().partition(": git ")[2].split()
    subprocess.run(["git", command[0], "--force", "--quiet", *command[1:]], cwd=sample.root, check=True)
    assert sample.overlay("retire").succeeds().stdout == "every series is needed\n"
