"""Series and patches: what is refused, and that git applies them the same wherever it runs."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from overlay.errors import OverlayError
from overlay.manifest import Fault
from overlay.queue import git as program
from overlay.queue import series
from tests.sample import PRODUCTS, Sample, git, overlay_wheel_in, snapshot, upstream

CORE = "src/demo/core.py"
BLOCK = "src/demo/layers/block.py"


@pytest.fixture
def first(template: Sample) -> str:
    """A patch with nothing wrong with it."""
    return template.patch(1).read_text()


@pytest.fixture
def pre_images() -> dict[str, bytes]:
    files = upstream("demo", "1.0")
    return {path: files[path.removeprefix("src/")] for path in (CORE, BLOCK)}


@pytest.fixture
def patches(template: Sample) -> tuple[series.Patch, ...]:
    return series.read(template.root / "patches" / "demo-1.0-1.1").for_delivery("wheel")


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[str], str]:
    def refused(text: str) -> str:
        file = tmp_path / "0001-x.patch"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(OverlayError) as caught:
            series.read_patch(file)
        said = str(caught.value)
        assert said.startswith(str(file))
        assert "\n" not in said
        return said

    return refused


def test_a_patch_is_read(template: Sample) -> None:
    found = series.read_patch(template.patch(2))
    assert found.subject == "Multiply in the block and the core"
    assert found.reason == "The sample is wrong there, and this mends it."
    assert found.trailers["Bug"] == "https://bugs.example/1"
    assert found.delivery == {"wheel", "overlay"}
    assert found.paths == (CORE, BLOCK)
    assert [(hunk.path, hunk.start) for hunk in found.hunks] == [(CORE, 202), (BLOCK, 30)]
    assert series.read_patch(template.patch(3)).created == {"tests/test_core.py"}


def test_a_delivery_is_all_where_none_is_named(tmp_path: Path, first: str) -> None:
    file = tmp_path / "0001-x.patch"
    file.write_text(first.replace("Delivery: wheel, overlay, pull-request\n", ""))
    assert series.read_patch(file).delivery == {"wheel", "overlay", "pull-request"}


def test_faults_are_read(sample: Sample) -> None:
    sample.rewrite(1, "Bug: https", "Fault: lost: gradients, without an error\nFault: late: nothing\nBug: https")
    sample.rewrite(3, "Bug: https", "Fault: untested: nobody sees it\nBug: https")
    found = series.read(sample.root / "patches" / "demo-1.0-1.1")
    lost, late = Fault("lost", "gradients, without an error"), Fault("late", "nothing")
    assert [patch.faults for patch in found.patches] == [(lost, late), (), (Fault("untested", "nobody sees it"),)]
    assert found.faults("overlay") == (lost, late)
    sample.rewrite(2, "Bug: https", "Fault: late: once more\nBug: https")
    sample.overlay("lock", "check").fails("0002-", "Fault: late is that of 0001-", "already: keep one of the two")


def test_words_of_the_reason_are_no_part_of_the_diff(tmp_path: Path, first: str) -> None:
    reason = "copy and\nrename are words, and so are\nindex of it,\nnew mode and\nBinary files too.\n"
    file = tmp_path / "0001-x.patch"
    file.write_text(first.replace("The sample is wrong there, and this mends it.\n", reason))
    assert series.read_patch(file).reason == reason.strip()


DIFF = f"diff --git a/{CORE} b/{CORE}"
SIDES = f"--- a/{CORE}\n+++ b/{CORE}\n"
CHANGE = "\ndiff --git a/{0} b/{0}\nindex 573ad40..573ad41 100644\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(CORE, "/etc/passwd", "expected a relative path without '..'", id="absolute"),
        pytest.param(CORE, "../core.py", "expected a relative path without '..'", id="parent"),
        pytest.param(CORE, "src/../../core.py", "expected a relative path without '..'", id="parent inside"),
        pytest.param(CORE, ".git/config", "expected a relative path without '..', '.git'", id="git folder"),
        pytest.param(
            CORE, "src/.GIT/hooks/x", "expected a relative path without '..', '.git'", id="git folder in capitals"
        ),
        pytest.param(CORE, "src\\demo", "a backslash", id="backslash"),
        pytest.param(CORE, "c:/demo", "':'", id="drive"),
        pytest.param(DIFF, "diff --git a//x b//x", "expected a relative path", id="absolute in diff --git"),
        pytest.param(DIFF, f"diff --git a/{CORE} b/other.py", "may only change files in their place", id="two paths"),
        pytest.param(DIFF, f"diff --git {CORE} {CORE}", "may only change files in their place", id="no prefix"),
        pytest.param(
            DIFF, 'diff --git "a/\\303\\244.py" "b/\\303\\244.py"', "with the same plain path twice", id="quoted"
        ),
        pytest.param(f"--- a/{CORE}", '--- "a/src/demo/core.py"', "expected '--- a/PATH'", id="quoted side"),
        pytest.param(f"--- a/{CORE}", '--- "a/..\\057x"', "expected '--- a/PATH'", id="quoted slash"),
        pytest.param(f"--- a/{CORE}", "--- /etc/passwd", "expected '--- a/PATH'", id="absolute side"),
        pytest.param(f"+++ b/{CORE}", "+++ b/../x", "expected a relative path", id="parent in a side"),
        pytest.param(
            f"+++ b/{CORE}", "+++ b/other", "that 'diff --git' names, found 'other'", id="side of another file"
        ),
        pytest.param(f"--- a/{CORE}", "--- /dev/null", "expected '--- a/PATH'", id="new file without saying so"),
        pytest.param(f"+++ b/{CORE}", "+++ /dev/null", "expected '+++ b/PATH'", id="deleted without saying so"),
        pytest.param(" 100644\n", " 120000\n", "found a symbolic link", id="symbolic link"),
        pytest.param(
            " 100644\n", "  120000\n", "expected 'index BLOB..BLOB MODE'", id="symbolic link after two spaces"
        ),
        pytest.param(" 100644\n", " 160000\n", "found a submodule", id="submodule"),
        pytest.param(SIDES, f"new file mode 120000\n{SIDES}", "found a symbolic link", id="new symbolic link"),
        pytest.param(
            SIDES, f"new file mode  120000\n{SIDES}", "found a symbolic link", id="new symbolic link after two spaces"
        ),
        pytest.param(SIDES, f"deleted file mode 100644\n{SIDES}", "may neither delete a file", id="deleted file"),
        pytest.param(
            SIDES,
            f"deleted file mode  100644\n{SIDES}",
            "may neither delete a file",
            id="deleted file after two spaces",
        ),
        pytest.param(SIDES, f"old mode 100644\nnew mode 100755\n{SIDES}", "nor change its mode", id="mode"),
        pytest.param(SIDES, f"rename from a\nrename to b\n{SIDES}", "may not rename", id="rename"),
        pytest.param(SIDES, f"similarity index 90%\n{SIDES}", "may not rename", id="similarity"),
        pytest.param(SIDES, f"copy from a\ncopy to b\n{SIDES}", "may not rename, copy", id="copy"),
        pytest.param(SIDES, "GIT binary patch\nliteral 1\nIcmZ\n\n" + SIDES, "binary", id="binary"),
        pytest.param(SIDES, f"Binary files a/{CORE} and b/{CORE} differ\n", "binary", id="binary files"),
        pytest.param(
            "Bug: https://bugs.example/1\n", "", "expected the trailer Bug: at the end of the message", id="no Bug"
        ),
        pytest.param(
            "Last-Update: 2026-11-28\n", "Last-Update:\n", "expected the trailer Last-Update:", id="empty trailer"
        ),
        pytest.param(
            "Bug: https://bugs.example/1\nOrigin: this project\n",
            "",
            "expected the trailers Bug:, Origin: at the end of the message",
            id="no Bug and no Origin",
        ),
        pytest.param("Applied-Upstream: no\n", "", "expected the trailer Applied-Upstream:", id="no Applied-Upstream"),
        pytest.param(
            "Last-Update: 2026-11-28\n", "Last-Update: yesterday\n", "Last-Update: expected a day", id="no day"
        ),
        pytest.param(
            "Applied-Upstream: no\n",
            "Applied-Upstream: perhaps\n",
            "Applied-Upstream: expected a release such as 2.16.0, or no, found 'perhaps'",
            id="no release",
        ),
        pytest.param("Bug: https", "Delivry: wheel\nBug: https", "found 'Delivry'", id="misspelt trailer"),
        pytest.param("Bug: https", "delivery: wheel\nBug: https", "found 'delivery'", id="trailer in lower case"),
        pytest.param(
            "wheel, overlay, pull",
            "wheels, pull",
            "Delivery: expected some of wheel, overlay, pull-request, found 'wheels'",
            id="Delivery",
        ),
        pytest.param(
            "wheel, overlay, pull-request",
            "wheel, ",
            "Delivery: expected some of",
            id="Delivery with nothing after the comma",
        ),
        pytest.param(
            "Bug: https", "Fault: Lost: a line\nBug: https", "Fault: expected a code of a-z", id="code in capitals"
        ),
        pytest.param("Bug: https", "Fault: a line\nBug: https", "found 'Fault: a line'", id="no code"),
        pytest.param("Bug: https", "Fault: lost:\nBug: https", "found 'Fault: lost:'", id="nothing that is seen"),
        pytest.param(
            "Bug: https",
            "Fault: lost: a line\n and another\nBug: https",
            "one line of what the user sees, found 'Fault: lost: a line and another'",
            id="two lines that are seen",
        ),
        pytest.param("The sample is wrong there, and this mends it.\n\n", "", "expected the reason", id="no reason"),
        pytest.param(
            "Subject: [PATCH 1/3] Subtract in the core", "Subject: [PATCH]", "From and Subject", id="no subject"
        ),
        pytest.param("From 0000", "From: 0000", "From and Subject", id="no From line"),
        pytest.param("\n---\n", "\n\n", "found no line '---'", id="no end of the message"),
        pytest.param(
            "value - 30",
            "value\t\x1b[31m- 30",
            "found the control character '\\x1b' in line 26",
            id="control character",
        ),
        pytest.param("value - 30", "value\r - 30", "found the control character '\\r'", id="carriage return"),
        pytest.param("value - 30", "value \0 - 30", "found the control character '\\x00'", id="null byte"),
        pytest.param("value - 30", "value \udcff- 30", "expected UTF-8, found the byte 0xff", id="no text"),
        pytest.param(
            "this mends it.\n",
            f"this mends it.\n{CHANGE.format('../x')}",
            "expected a relative path",
            id="smuggled into the message",
        ),
        pytest.param(
            "this mends it.\n",
            "this mends it.\n\n--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n",
            "expected a relative path",
            id="smuggled without diff --git",
        ),
        pytest.param(
            "this mends it.\n",
            "this mends it.\n\n--- ../x\n+++ ../x\n@@ -1 +1 @@\n-a\n+b\n",
            "expected '--- a/PATH'",
            id="smuggled without prefix",
        ),
        pytest.param(
            "this mends it.\n",
            "this mends it.\n\n--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\n",
            "expected 'diff --git' before the first hunk",
            id="smuggled without folder",
        ),
        pytest.param(
            "-- \n",
            f"-- \n{CHANGE.format('.git/config')}",
            "expected a relative path",
            id="smuggled into the signature",
        ),
        pytest.param("\n@@ ", "\n@ ", "expected at least one hunk, found none", id="no hunk"),
    ],
)
def test_a_patch_is_refused(first: str, refused: Callable[[str], str], old: str, new: str, said: str) -> None:
    assert old in first
    assert said in refused(first.replace(old, new))


def test_a_patch_with_other_line_ends_is_refused(first: str, refused: Callable[[str], str]) -> None:
    assert "line '---'" in refused(first.replace("\n", "\r\n"))


def test_a_reason_may_hold_a_whole_diff_if_it_is_safe(tmp_path: Path, first: str) -> None:
    """git apply takes a diff wherever it stands, so what stands in the message counts as changed."""
    file = tmp_path / "0001-x.patch"
    file.write_text(first.replace("this mends it.\n", f"this mends it.\n{CHANGE.format('src/other.py')}"))
    assert series.read_patch(file).paths == ("src/other.py", CORE)


@pytest.mark.parametrize(
    ("listing", "said"),
    [
        ("", "expected the name of a patch on each line, found none"),
        ("# nothing\n\n", "expected the name of a patch on each line, found none"),
        ("{1}\n{2}\n{1}\n{3}\n", "{1} is named twice"),
        ("{1}\n{2}\n", "{3} is not named in"),
        ("{1}\n{2}\n{3}\n0004-missing.patch\n", "found '0004-missing.patch'"),
        ("../demo-2.0/{1}\n", "expected the name of a patch in the same folder"),
        ("{1} -p1\n{2}\n{3}\n", "expected the name of a patch in the same folder"),
        ("series\n", "expected the name of a patch in the same folder"),
    ],
)
def test_a_list_of_patches_is_refused(sample: Sample, listing: str, said: str) -> None:
    names = {str(number): sample.patch(number).name for number in (1, 2, 3)}
    for number, name in names.items():
        listing, said = listing.replace(f"{{{number}}}", name), said.replace(f"{{{number}}}", name)
    folder = sample.root / "patches" / "demo-1.0-1.1"
    (folder / "series").write_text(listing)
    with pytest.raises(OverlayError) as caught:
        series.read(folder)
    assert said in str(caught.value)


def test_a_list_that_is_no_text_is_refused(sample: Sample) -> None:
    (sample.root / "patches" / "demo-2.0" / "series").write_bytes(b"\xff\n")
    sample.overlay("lock", "check").fails("demo-2.0/series", "expected UTF-8")


def test_a_file_is_not_half_delivered(sample: Sample) -> None:
    """The wheel and the overlay hold the same post-image, so neither may take a part of the patches of a file."""
    sample.rewrite(2, "Delivery: wheel, overlay", "Delivery: wheel")
    sample.overlay("lock", "check").fails(
        "0002-", "Delivery: expected overlay too, because other patches of src/demo/core.py have it"
    )
    sample.rewrite(2, "Delivery: wheel", "Delivery: overlay")
    sample.overlay("lock", "check").fails("0002-", "Delivery: expected wheel beside overlay")


def test_the_patches_are_applied(patches: tuple[series.Patch, ...], pre_images: dict[str, bytes]) -> None:
    found = series.apply(patches, pre_images)
    assert b"value - 30" in found[CORE]
    assert b"value * 50" in found[CORE]
    assert found[BLOCK] == pre_images[BLOCK].replace(b"value + 7\n", b"value * 7\n")
    assert series.apply([], pre_images) == pre_images


def test_a_hunk_may_move_and_its_context_may_not_change(
    patches: tuple[series.Patch, ...], pre_images: dict[str, bytes]
) -> None:
    moved = pre_images | {CORE: b"# one line more\n" * 9 + pre_images[CORE]}
    assert b"value * 50" in series.apply(patches, moved)[CORE]
    changed = pre_images | {CORE: pre_images[CORE].replace(b"def core_30(value):", b"def core_30(value) :")}
    with pytest.raises(OverlayError, match="does not fit"):
        series.apply(patches, changed)


def test_a_hunk_that_fits_in_two_places_is_refused(
    patches: tuple[series.Patch, ...], pre_images: dict[str, bytes]
) -> None:
    """Whichever is nearer to the line in its header: in another release that may be the wrong one."""
    twice = pre_images[CORE] + b"# more\n" + pre_images[CORE]
    with pytest.raises(
        OverlayError, match=r"expected one place for hunk @@ -\S+ \S+ @@.*, found two, at lines \d+ and \d+"
    ):
        series.apply(patches, pre_images | {CORE: twice})
    lines = pre_images[CORE].splitlines(keepends=True)
    hunk = patches[0].hunks[0]
    beside = b"".join(lines[hunk.start - 1 : hunk.start + 3]) + b"# something else\n"
    assert b"value * 50" in series.apply(patches, pre_images | {CORE: pre_images[CORE] + beside})[CORE]


def test_a_patch_that_does_not_fit_is_explained(
    patches: tuple[series.Patch, ...], pre_images: dict[str, bytes]
) -> None:
    other = pre_images[CORE].replace(b"value + 50\n", b"value + 51\n")
    with pytest.raises(OverlayError) as caught:
        series.apply(patches, pre_images | {CORE: other})
    after_the_first = other.replace(
        b"def core_30(value):\n    return value + 30", b"def core_30(value):\n    return value - 30"
    )
    said = str(caught.value)
    assert said.startswith(f"{patches[1].file} does not fit {CORE}: hunk @@ -202,7 +202,7 @@")
    assert (
        f"expected the blob {patches[1].before[CORE]} or the same context, found {program.blob_id(after_the_first)}"
        in said
    )


def test_a_patch_that_is_applied_already_is_named(
    patches: tuple[series.Patch, ...], pre_images: dict[str, bytes]
) -> None:
    post_images = series.apply(patches, pre_images)
    with pytest.raises(OverlayError) as caught:
        series.apply(patches, post_images)
    assert str(caught.value).startswith(f"{patches[0].file} is applied already to {CORE}")


def test_a_patch_of_a_file_that_is_not_there(patches: tuple[series.Patch, ...], pre_images: dict[str, bytes]) -> None:
    with pytest.raises(OverlayError, match=f"changes {BLOCK}, which is not there: expected it among {CORE}"):
        series.apply(patches, {CORE: pre_images[CORE]})


def test_a_corrupt_patch_is_named(sample: Sample, pre_images: dict[str, bytes]) -> None:
    file = sample.rewrite(1, " def core_30", "def core_30")
    with pytest.raises(OverlayError) as caught:
        series.apply([series.read_patch(file)], pre_images)
    assert str(caught.value).startswith(f"{file}: git apply failed: error: ")


@pytest.mark.parametrize("content", [b"a\r\nb\r\nc\r\n", b"a  \n\tb\n \t c\n", b"a\nb", b"a\r\nb\nc\r\n\n\n\n"])
def test_white_space_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git("init", "--quiet", folder=repository)
    (repository / "file").write_bytes(content)
    git("add", "file", folder=repository)
    after = content.replace(b"b", b"B \t")
    (repository / "file").write_bytes(after)
    diff = subprocess.run(["git", "diff"], cwd=repository, capture_output=True, check=True).stdout
    trailers = b"Bug: x\nOrigin: x\nApplied-Upstream: no\nLast-Update: 2026-11-29\n"
    head = b"From 0\nFrom: a\nSubject: x\n\nWhy.\n\n" + trailers + b"---\n\n"
    file = tmp_path / "0001-x.patch"
    file.write_bytes(head + diff)
    assert series.apply([series.read_patch(file)], {"file": content}) == {"file": after}


def hostile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with files of the same names, and every setting that could change what git apply does."""
    repository = folder / "a repository, of the user's"
    work = repository / CORE
    work.parent.mkdir(parents=True)
    git("init", "--quiet", folder=repository)
    work.write_text("the user's\n")
    git("add", ".", folder=repository)
    for name, value in (("core.autocrlf", "true"), ("apply.whitespace", "fix"), ("apply.ignoreWhitespace", "change")):
        git("config", name, value, folder=repository)
    home = folder / "home"
    home.mkdir()
    (home / "attributes").write_text("* text eol=crlf ident\n")
    settings = f"[core]\n\tautocrlf = true\n\teol = crlf\n\tattributesFile = {home}/attributes\n\tsymlinks = false\n"
    (home / ".gitconfig").write_text(
        f"{settings}[apply]\n\twhitespace = fix\n[diff]\n\tnoprefix = true\n[alias]\n\tapply = !false\n"
    )
    variables = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "GIT_DIR": str(repository / ".git"),
        "GIT_WORK_TREE": str(repository),
        "GIT_INDEX_FILE": str(repository / ".git" / "index"),
        "GIT_PREFIX": "src/",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "apply.whitespace",
        "GIT_CONFIG_VALUE_0": "error-all",
        "GIT_EXTERNAL_DIFF": "false",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(repository / "src")
    return repository


@pytest.mark.parametrize("place", ["tmp", "src", "a:b/c", "größe und mehr"])
def test_the_bytes_are_the_same_in_a_hostile_place(
    patches: tuple[series.Patch, ...],
    pre_images: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    expected = series.apply(patches, pre_images)
    repository = hostile(tmp_path, monkeypatch)
    before = snapshot(repository)
    temporary = repository / place
    temporary.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert series.apply(patches, pre_images) == expected
    assert list(temporary.rglob("overlay-*")) == []
    found = snapshot(repository)
    assert found is not None
    assert {name: entry for name, entry in found.items() if entry[0] != "folder"} == {
        name: entry for name, entry in (before or {}).items() if entry[0] != "folder"
    }


def test_apply_from_inside_a_hostile_repository(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hostile(tmp_path / "hostile", monkeypatch)
    before = snapshot(repository)
    for name in (
        "HOME",
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_CONFIG_COUNT",
        "GIT_CONFIG_KEY_0",
        "GIT_CONFIG_VALUE_0",
    ):
        sample.variables[name] = os.environ[name]
    temporary = repository / ".git" / "tmp"
    temporary.mkdir()
    sample.variables["TMPDIR"] = str(temporary)
    sample.overlay("apply", "--out", "dist", cwd=repository / "src").succeeds()
    dist = repository / "src" / "dist"
    assert {file.name for file in dist.glob("*.whl")} == {*PRODUCTS, overlay_wheel_in(dist)}
    assert list(temporary.iterdir()) == []
    temporary.rmdir()
    found = snapshot(repository)
    assert found is not None
    assert {name: entry for name, entry in found.items() if not name.startswith("src/dist")} == before


def test_without_git(sample: Sample, tmp_path: Path) -> None:
    sample.variables["PATH"] = str(tmp_path)
    sample.apply().fails("expected git on PATH, found none: install git")
    assert not sample.out.exists()
    assert not sample.patched.exists()
    del sample.variables["PATH"]
    sample.apply().succeeds()


def test_a_git_that_cannot_be_run(sample: Sample, tmp_path: Path) -> None:
    wrong = tmp_path / "git"
    wrong.write_text("no program\n")
    wrong.chmod(wrong.stat().st_mode | stat.S_IXUSR)
    sample.variables["PATH"] = str(tmp_path)
    sample.apply().fails("git")
