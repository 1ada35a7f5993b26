"""`overlay add-release`."""

import re
import socket
import subprocess

import pytest

from overlay.queue import lock
from tests.sample import Sample, archive, digest, lay, members, record


def offered(
    sample: Sample, version: str, *changes: tuple[str, str], attributes: str = "", project: str = "demo"
) -> str:
    """Puts another release on the index; its name."""
    files = members(project, version)
    for old, new in changes:
        content = files[f"{project}/core.py"]
        assert content.count(old.encode()) == 1
        files[f"{project}/core.py"] = content.replace(old.encode(), new.encode())
    folder = f"{project}-{version}.dist-info"
    del files[f"{folder}/RECORD"]
    content = archive(files | {f"{folder}/RECORD": record(files, folder)})
    name = f"{project}-{version}-py3-none-any.whl"
    lay(sample.index / project, {name: content})
    sample.list_page(project)
    page = sample.index / project / "index.html"
    page.write_text(page.read_text().replace(f'">{name}', f'"{attributes}>{name}'))
    return f"{project}=={version}"


def test_a_release_is_pinned_in_its_place(sample: Sample) -> None:
    requirement = offered(sample, "1.0.5")
    before = sample.lock.read_text()
    done = sample.overlay("add-release", requirement).succeeds()
    assert "pinned demo 1.0.5, for the tests, with demo-1.0-1.1" in done.stderr
    content = (sample.index / "demo" / "demo-1.0.5-py3-none-any.whl").read_bytes()
    block = (
        '[[packages.demo.releases]]\nversion = "1.0.5"\nuse = "test"\nseries = "demo-1.0-1.1"\n'
        f'wheel = {{ file = "demo-1.0.5-py3-none-any.whl", size = {len(content)}, sha256 = "{digest(content)}" }}\n'
        "files = [\n"
    )
    after = sample.lock.read_text()
    at = after.index(block)
    end = after.index("]\n\n", at + len(block)) + 3
    assert after[:at] + after[end:] == before, "nothing else has changed"
    pins = lock.read(sample.lock).packages["demo"].releases
    assert [pin.version for pin in pins] == ["1.0", "1.1", "1.0.5", "2.0"], "behind the last one for the tests"
    assert pins[2].files == pins[0].files[:2]
    sample.overlay("lock", "check").succeeds()
    sample.overlay("lock", "update").succeeds()
    assert sample.lock.read_text() == after
    said = sample.overlay("add-release", requirement, "--use", "test").succeeds().stderr
    assert "demo 1.0.5 is pinned already, for the tests, with demo-1.0-1.1" in said
    assert sample.lock.read_text() == after


def test_a_release_is_delivered(sample: Sample) -> None:
    requirement = offered(sample, "1.0.5")
    text = sample.lock.read_text()
    sample.lock.write_text(text.replace("[packages.plain]", "# Of the other one.\n[packages.plain]"))
    sample.overlay("add-release", "Demo==1.0.5", "--use", "deliver").succeeds()
    assert "\n\n# Of the other one.\n[packages.plain]\n" in sample.lock.read_text()
    pin = next(pin for pin in lock.read(sample.lock).packages["demo"].releases if pin.version == "1.0.5")
    assert (pin.use, pin.revision) == ("deliver", 1)
    sample.overlay("lock", "check").succeeds()
    sample.apply(requirement).succeeds()
    assert (sample.out / "demo-1.0.5+overlay.1-py3-none-any.whl").is_file()
    before = sample.lock.read_bytes()
    sample.overlay("add-release", requirement, "--use", "test").fails("found revision 1 of it", "by hand")
    assert sample.lock.read_bytes() == before


def test_one_that_is_pinned_for_the_tests_is_delivered(sample: Sample) -> None:
    assert "is pinned already, for the tests" in sample.overlay("add-release", "demo==1.1").succeeds().stderr
    sample.overlay("add-release", "demo==1.1", "--use", "deliver").succeeds()
    assert "# Only for the tests.\n" in sample.lock.read_text()
    sample.overlay("lock", "check").succeeds()
    sample.apply().succeeds()
    assert (sample.out / "demo-1.1+overlay.1-py3-none-any.whl").is_file()


def test_which_hunks_do_not_fit(sample: Sample) -> None:
    changes = (("return value + 30\n", "return 30\n"), ("return value + 50\n", "return 50\n"))
    requirement = offered(sample, "1.0.5", *changes)
    before = sample.lock.read_bytes()
    done = sample.overlay("add-release", requirement)
    done.fails("expected a series that fits, found none: of the nearest, demo-1.0-1.1, 2 hunks do not", "nothing was")
    rows = [row for row in done.stderr.splitlines() if " hunk " in row]
    assert [re.sub(r"@@ .* @@", "@@", row) for row in rows] == [
        "overlay: demo-1.0-1.1/0001-Subtract-in-the-core.patch: src/demo/core.py: hunk @@ def core_29(value): does not "
        "fit near line 122",
        "overlay: demo-1.0-1.1/0002-Multiply-in-the-block-and-the-core.patch: src/demo/core.py: hunk @@ def "
        "core_49(value): does not fit near line 202",
    ]
    assert sample.lock.read_bytes() == before


def test_a_series_of_another_range_is_no_match_until_it_is_renamed(sample: Sample) -> None:
    requirement = offered(sample, "1.2")
    before = sample.lock.read_bytes()
    said = sample.overlay("add-release", requirement).fails(
        "found that demo-1.0-1.1 applies, whose range does not: rename it"
    )
    assert sample.lock.read_bytes() == before
    command = re.search(r"git (mv patches/\S+ patches/\S+ && sed -i \S+ upstream\.lock)\)", said)
    assert command is not None
    assert "patches/demo-1.0-1.2 " in command[1]
    subprocess.run(["sh", "-c", command[1]], cwd=sample.root, check=True)
    sample.overlay("add-release", requirement).succeeds()
    sample.overlay("lock", "check").succeeds()


def test_a_release_that_upstream_has_mended(sample: Sample) -> None:
    requirement = offered(sample, "3.0", ("return value + 30\n", "return value - 30\n"))
    for series in ("demo-1.0-1.1", "demo-2.0"):
        sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 3.0", series)
    said = sample.overlay("add-release", requirement).fails("found that it is fixed upstream since 3.0: nothing to pin")
    table = re.search(r"name it as fixed in upstream\.lock: (version = .*), (files = .*)$", said)
    assert table is not None
    entry = f"\n[[packages.demo.fixed]]\n{table[1]}\n{table[2]}\n"
    sample.lock.write_text(sample.lock.read_text() + entry)
    sample.overlay("lock", "check").succeeds()
    sample.overlay("add-release", requirement).fails("its files are those of 3.0, which upstream.lock names as fixed")


def test_a_release_with_a_fault_that_is_left_is_not_mended(sample: Sample) -> None:
    """Upstream has one patch of an older series, and not what the nearest one mends."""
    requirement = offered(sample, "2.1", ("def kernel_1(", "def kernel_one("))
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 2.0")
    sample.overlay("add-release", requirement).fails("found that demo-2.0 applies, whose range does not: rename it")
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 2.1\nFault: one: the first", "demo-2.0")
    sample.rewrite(2, "Applied-Upstream: no", "Applied-Upstream: no\nFault: two: the second", "demo-2.0")
    sample.overlay("add-release", requirement).fails("found that demo-2.0 applies, whose range does not: rename it")
    sample.rewrite(2, "Applied-Upstream: no", "Applied-Upstream: 2.1", "demo-2.0")
    sample.overlay("add-release", requirement).fails("found that it is fixed upstream since 2.1")


def test_another_spelling_of_a_version(sample: Sample) -> None:
    assert "demo 1.1 is pinned already" in sample.overlay("add-release", "demo==1.1.0").succeeds().stderr
    offered(sample, "1.0.5")
    assert "pinned demo 1.0.5, for" in sample.overlay("add-release", "demo==v1.0.5.0").succeeds().stderr
    sample.overlay("lock", "check").succeeds()


def test_the_form_of_the_lock_stays(sample: Sample) -> None:
    """Of indented tables and of line ends as Windows has them."""
    rows = sample.lock.read_text().splitlines()
    before = [f"    {row}" if row else row for row in rows]
    sample.lock.write_bytes("".join(f"{row}\r\n" for row in before).encode())
    sample.overlay("add-release", offered(sample, "1.0.5")).succeeds()
    after = sample.lock.read_bytes().decode().split("\r\n")
    assert not any("\n" in row for row in after)
    at = after.index("[[packages.demo.releases]]")
    end = after.index("", at)
    assert after[: at - 1] + after[end:] == [*before, ""], "nothing else has changed"
    assert [pin.version for pin in lock.read(sample.lock).packages["demo"].releases] == ["1.0", "1.1", "1.0.5", "2.0"]
    sample.rewrite(1, "+    return value - 30", "+    return value - 31")
    sample.lock.write_bytes(sample.lock.read_bytes().replace(b"demo/layers/block.py", b"demo/layers/other.py"))
    sample.overlay("lock", "update").succeeds()
    assert not any("\n" in row for row in sample.lock.read_bytes().decode().split("\r\n"))
    sample.overlay("lock", "check").succeeds()


def test_what_upstream_advises_against_is_said(sample: Sample) -> None:
    done = sample.overlay("add-release", offered(sample, "1.0.5", attributes=' data-yanked=""')).succeeds()
    assert "demo-1.0.5-py3-none-any.whl was yanked" in done.stderr
    done = sample.overlay("add-release", offered(sample, "1.0.6rc1")).succeeds()
    assert "demo-1.0.6rc1-py3-none-any.whl is a pre-release" in done.stderr
    sample.overlay("lock", "check").succeeds()


@pytest.mark.parametrize("requirement", ["demo==9.9", "other==1.0", "demo", "demo==1.0+local", "demo==x"])
def test_what_is_no_release_is_refused(sample: Sample, requirement: str) -> None:
    before = sample.lock.read_bytes()
    said = sample.overlay("add-release", requirement).fails("expected ")
    assert ("the newest is 2.0" in said) == (requirement == "demo==9.9"), said
    assert sample.lock.read_bytes() == before


def test_an_index_of_several_that_gives_no_answer(sample: Sample) -> None:
    """What another one has can be pinned; why a release is not there is said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sample.variables["PIP_EXTRA_INDEX_URL"] = f"http://127.0.0.1:{listening.getsockname()[1]}/simple"
    said = "an index gave no answer, releases may be missing: http://127.0.0.1:"
    done = sample.overlay("add-release", "demo==9.9")
    assert done.code == 1
    assert said in done.stderr
    assert "demo==9.9: expected a wheel for every platform" in done.stderr.splitlines()[-1]
    assert said in sample.overlay("add-release", offered(sample, "1.0.5")).succeeds().stderr


def test_another_file_than_the_index_says(sample: Sample) -> None:
    requirement = offered(sample, "1.0.5")
    file = sample.index / "demo" / "demo-1.0.5-py3-none-any.whl"
    file.write_bytes(file.read_bytes() + b"\0")
    before = sample.lock.read_bytes()
    sample.overlay("add-release", requirement).fails("expected sha256 ", "nothing was kept")
    assert sample.lock.read_bytes() == before
    kept = {path.name for path in (sample.cache / "modeling-overlay" / "artefacts").rglob("*.whl")}
    assert file.name not in kept
    sample.list_page("demo", hashes=False)
    file.write_bytes(file.read_bytes()[:-1])
    done = sample.overlay("add-release", requirement).succeeds()
    assert "the index has no sha256 for it" in done.stderr
