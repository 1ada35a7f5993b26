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


def test_a_patch_that_upstream_has_everywhere(sample: Sample) -> None:
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 1.0")
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 2.1", "demo-2.0")
    assert sample.overlay("retire").succeeds().stdout.splitlines() == [
        "every series is needed",
        "demo-1.0-1.1/0001-Subtract-in-the-core.patch: upstream has it since 1.0, and so has every release that the "
        "series serves (1.0 and later): drop its commit (overlay edit, overlay refresh)",
    ]


def test_a_patch_for_wheels_where_none_is_delivered(sample: Sample) -> None:
    patches = [
        sample.rewrite(number, f"Delivery: {delivery}\n", "Delivery: wheel\n", "plain-3.0")
        for number, delivery in ((1, "wheel, overlay, pull-request"), (2, "wheel, overlay"))
    ]
    assert sample.overlay("retire").succeeds().stdout == "every series is needed\n"
    entry = r'version = "3\.0"\nuse = )"deliver"\n(.*\n)revision = 1\n((?:.+\n)*?)built = .*\n'
    text, number = re.subn(f"({entry}", r'\1"test"\n\2\3', sample.lock.read_text())
    assert number == 1
    sample.lock.write_text(text)
    assert sample.overlay("retire").succeeds().stdout.splitlines()[1:] == [
        f"plain-3.0/{patch.name}: it is for wheels alone, and no release of the series is delivered: drop its commit"
        for patch in patches
    ]


def test_the_command_that_it_gives_works(sample: Sample) -> None:
    shutil.copytree(sample.root / "patches" / "demo-2.0", sample.root / "patches" / "demo-9.0")
    subprocess.run(["git", "init", "--quiet"], cwd=sample.root, check=True)
    subprocess.run(["git", "add", "patches"], cwd=sample.root, check=True)
    said = sample.overlay("retire").succeeds().stdout
    command = said.strip().partition(": git ")[2].split()
    subprocess.run(["git", command[0], "--force", "--quiet", *command[1:]], cwd=sample.root, check=True)
    assert sample.overlay("retire").succeeds().stdout == "every series is needed\n"
