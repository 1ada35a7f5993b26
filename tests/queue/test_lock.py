"""The lock: what is refused, with the key and the line; what is kept when it is written."""

import re
import stat
from pathlib import Path

import pytest

from overlay.errors import OverlayError
from overlay.queue import lock
from tests.sample import Sample

FIRST = 'version = "1.0"\n'
WHEEL = 'file = "demo-1.0-py3-none-any.whl"'

COMPANIONS = f"""
[[packages.plain.companions]]
project = "native"
version = "3.1"
use = "test"
wheels = [
  {{ file = "native-3.1-py3-none-win_amd64.whl", size = 1, sha256 = "{"1" * 64}" }},
  {{ file = "native-3.1-py3-none-any.whl", size = 2, sha256 = "{"2" * 64}" }},
]

[[packages.plain.companions]]
project = "framework"
version = "3.1"
use = "test"
sdist = {{ file = "framework-3.1.tar.gz", size = 3, sha256 = "{"3" * 64}" }}

[[packages.plain.companions]]
project = "framework"
version = "3.2"
use = "test"
sdist = {{ file = "framework-3.2.tar.gz", size = 4, sha256 = "{"4" * 64}" }}
"""

FIXED = f"""
[[packages.plain.fixed]]
version = "3.1"
files = [
  {{ path = "plain/core.py", blob = "{"1" * 40}" }},
  {{ path = "plain/layers/block.py", blob = "{"2" * 40}" }},
]

[[packages.plain.fixed]]
version = "3.2"
files = [{{ path = "plain/core.py", blob = "{"3" * 40}" }}]
"""


@pytest.fixture
def text(template: Sample) -> str:
    """A lock with nothing wrong with it."""
    return template.lock.read_text()


def refused(text: str) -> str:
    with pytest.raises(OverlayError) as caught:
        lock.parse(text)
    said = str(caught.value)
    assert "\n" not in said
    return said


def line_of(text: str, needle: str) -> int:
    assert needle in text, needle
    return text[: text.index(needle)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "key", "there"),
    [
        pytest.param("version = 1\n", "version = 1\nextra = 2\n", "extra", "extra = 2", id="unknown key at the top"),
        pytest.param(FIRST, f"{FIRST}wheels = 1\n", "packages.demo.releases[0].wheels", "wheels = 1", id="unknown key"),
        pytest.param("prefix =", "prefx =", "packages.demo.prefx", "prefx =", id="misspelt key"),
        pytest.param("version-file", "version_file", "packages.demo.version_file", "version_file", id="underscore"),
        pytest.param(
            "{ " + WHEEL,
            "{ url = 1, " + WHEEL,
            "packages.demo.releases[0].wheel.url",
            "url = 1",
            id="unknown key of a file",
        ),
        pytest.param(
            "[packages.plain]", "[packages.Plain]", "packages.Plain", "[packages.Plain]", id="name of a project"
        ),
        pytest.param(
            FIRST, 'version = "1.0.00.1.x"\n', "packages.demo.releases[0].version", "1.0.00.1.x", id="no version"
        ),
        pytest.param(
            FIRST, 'version = "1.0+local"\n', "packages.demo.releases[0].version", "1.0+local", id="local version"
        ),
        pytest.param(
            FIRST, 'version = "v1.0"\n', "packages.demo.releases[0].version", "v1.0", id="version not in normal form"
        ),
        pytest.param(
            FIRST, "version = 1.0\n", "packages.demo.releases[0].version", "version = 1.0\n", id="version is a number"
        ),
        pytest.param('version = "1.1"\n', FIRST, "packages.demo.releases[1].version", None, id="release pinned twice"),
        pytest.param(
            ', before = "573ad',
            ', before = "573aG',
            "packages.demo.releases[0].files[0].before",
            "573aG",
            id="no blob id",
        ),
        pytest.param(
            'path = "demo/layers/block.py", before',
            'path = "demo/core.py", before',
            "packages.demo.releases[0].files[1].path",
            None,
            id="file named twice",
        ),
        pytest.param(
            'path = "demo/core.py", before',
            'path = "../core.py", before',
            "packages.demo.releases[0].files[0].path",
            "../core.py",
            id="path leads out",
        ),
        pytest.param(
            'path = "demo/core.py", before',
            'path = "/core.py", before',
            "packages.demo.releases[0].files[0].path",
            '"/core.py',
            id="absolute path",
        ),
        pytest.param(
            'path = "demo/core.py", before',
            'path = "demo/.git/x", before',
            "packages.demo.releases[0].files[0].path",
            ".git/x",
            id="path into .git",
        ),
        pytest.param('use = "test"', 'use = "tset"', "packages.demo.releases[1].use", "tset", id="use"),
        pytest.param(
            'use = "test"\n',
            'use = "test"\nrevision = 1\n',
            "packages.demo.releases[1].use",
            'use = "test"',
            id="revision of a release for tests",
        ),
        pytest.param(
            "revision = 1\n", "revision = 0\n", "packages.demo.releases[0].revision", "revision = 0", id="revision 0"
        ),
        pytest.param(
            "revision = 1\n",
            'revision = "1"\n',
            "packages.demo.releases[0].revision",
            'revision = "1"',
            id="revision is text",
        ),
        pytest.param(
            "revision = 1\n",
            "revision = true\n",
            "packages.demo.releases[0].revision",
            "revision = true",
            id="revision is a truth value",
        ),
        pytest.param(
            'series = "demo-1.0-1.1"',
            'series = "demo-2.0-2.9"',
            "packages.demo.releases[0].series",
            'series = "demo-2.0-2.9"',
            id="series of another range",
        ),
        pytest.param(
            'file = "demo-1.0+overlay.1-py3-none-any.whl"',
            'file = "demo-1.0+overlay.1-py2.py3-none-any.whl"',
            "packages.demo.releases[0].built.file",
            "built = ",
            id="built wheel with other tags",
        ),
        pytest.param(
            'file = "demo-1.0-py3-none-any.whl"',
            'file = "Demo-1.0-py3-none-any.whl"',
            "packages.demo.releases[0].wheel.file",
            "wheel = ",
            id="wheel in another spelling",
        ),
        pytest.param(
            "revision = 1\n", "", "packages.demo.releases[0].revision", "[[packages.demo.releases]]", id="no revision"
        ),
        pytest.param(
            'series = "demo-1.0-1.1"\n',
            "",
            "packages.demo.releases[0].series",
            "[[packages.demo.releases]]",
            id="no series",
        ),
        pytest.param(
            'series = "demo-1.0-1.1"\n',
            'series = "../x"\n',
            "packages.demo.releases[0].series",
            "../x",
            id="series leads out",
        ),
        pytest.param("size = ", "size = -", "packages.demo.releases[0].wheel.size", "size = -", id="negative size"),
        pytest.param("size = ", 'size = "', "line 19: wheel", None, id="no TOML"),
        pytest.param(
            WHEEL,
            'file = "demo-1.1-py3-none-any.whl"',
            "packages.demo.releases[0].wheel.file",
            None,
            id="wheel of another version",
        ),
        pytest.param(
            WHEEL,
            'file = "domo-1.0-py3-none-any.whl"',
            "packages.demo.releases[0].wheel.file",
            "domo",
            id="wheel of another project",
        ),
        pytest.param(
            WHEEL,
            'file = "a/demo-1.0-py3-none-any.whl"',
            "packages.demo.releases[0].wheel.file",
            "a/demo",
            id="file in a folder",
        ),
        pytest.param(
            WHEEL,
            'file = "demo-1.0.whl"',
            "packages.demo.releases[0].wheel.file",
            "demo-1.0.whl",
            id="no name of a wheel",
        ),
        pytest.param(
            'built = {file = "demo-1.0+overlay.1-',
            'built = {file = "demo-1.0+overlay.2-',
            "packages.demo.releases[0].built.file",
            "overlay.2",
            id="built wheel of another revision",
        ),
        pytest.param("version = 1\n", "version = 2\n", "version", "version = 2", id="newer format"),
        pytest.param("version = 1\n", "version = 0\n", "version", "version = 0", id="no such format"),
        pytest.param("version = 1\n", "version = true\n", "version", "version = true", id="format is a truth value"),
        pytest.param("version = 1\n", "version = 1.0\n", "version", "version = 1.0", id="format is a fraction"),
        pytest.param("version = 1\n", "", "version", "#", id="no format"),
        pytest.param(
            '"https://git.example/demo"',
            '"http://git.example/demo"',
            "packages.demo.repository",
            "http:",
            id="repository",
        ),
        pytest.param('prefix = "src/"', 'prefix = "src"', "packages.demo.prefix", 'prefix = "src"', id="prefix"),
        pytest.param(
            'prefix = "src/"', 'prefix = "../"', "packages.demo.prefix", 'prefix = "../"', id="prefix leads out"
        ),
        pytest.param(
            "verified = false",
            'verified = "no"',
            "packages.demo.commit.verified",
            'verified = "no"',
            id="verified is text",
        ),
        pytest.param(
            "verified = false", "verified = true", "packages.demo.commit.id", "80e72bd7c", id="verified and abbreviated"
        ),
        pytest.param(
            'id = "80e72bd7c"', 'id = "80e72b"', "packages.demo.commit.id", '"80e72b"', id="commit id too short"
        ),
        pytest.param("[packages.plain]", "[packages.demo]", "line ", None, id="table twice"),
        pytest.param(FIRST, f"{FIRST}{FIRST}", "line 16: version", None, id="key twice"),
        pytest.param("[packages.plain]", "[packages.plain", "line ", None, id="no TOML in a header"),
    ],
)
def test_an_error_names_the_key_and_the_line(text: str, old: str, new: str, key: str, there: str | None) -> None:
    assert old in text
    broken = text.replace(old, new, 1)
    said = refused(broken)
    assert key in said
    if there is not None:
        assert said.startswith(f"upstream.lock:{line_of(broken, there)}: {key}: ")


def test_the_line_is_that_of_the_second_of_two(text: str) -> None:
    doubled = text.replace('version = "1.1"\n', FIRST, 1)
    number = [index for index, row in enumerate(doubled.splitlines(), 1) if row == FIRST.strip()][1]
    assert refused(doubled).startswith(
        f"upstream.lock:{number}: packages.demo.releases[1].version: 1.0 is pinned twice"
    )


def test_a_missing_hash_is_named_with_its_line(text: str) -> None:
    text = re.sub(r', sha256 = "[0-9a-f]{64}"', "", text, count=1)
    said = refused(text)
    assert said.startswith(f"upstream.lock:{line_of(text, WHEEL)}: packages.demo.releases[0].wheel.sha256: missing")


@pytest.mark.parametrize("change", ["flipped", "short", "upper"])
def test_an_ill_formed_hash_is_named_with_its_line(text: str, change: str) -> None:
    found = re.search(r'sha256 = "([0-9a-f]{64})"', text)
    assert found is not None
    wrong = {"flipped": f"g{found[1][1:]}", "short": found[1][1:], "upper": found[1].upper()}[change]
    said = refused(text.replace(found[1], wrong))
    assert said.startswith(
        f"upstream.lock:{line_of(text, WHEEL)}: packages.demo.releases[0].wheel.sha256: "
        "expected a sha256 of 64 hex digits"
    )


def test_sdist_of_another_version(text: str) -> None:
    sdist = f'sdist = {{ file = "demo-1.2.tar.gz", size = 1, sha256 = "{"0" * 64}" }}\n'
    said = refused(text.replace(FIRST, f"{FIRST}{sdist}"))
    assert said.startswith("upstream.lock:16: packages.demo.releases[0].sdist.file: expected the sdist of demo 1.0")
    lock.parse(text.replace(FIRST, f"{FIRST}{sdist}".replace("1.2.tar", "1.0.tar")))


@pytest.mark.parametrize(
    ("old", "new", "key", "there"),
    [
        pytest.param('"3.1"\nuse', '"3.1"\nurl = 1\nuse', "[0].url", "url = 1", id="unknown key"),
        pytest.param("size = 1,", "size = 1, url = 1,", "[0].wheels[0].url", "size = 1,", id="unknown key of a wheel"),
        pytest.param('use = "test"', 'use = "deliver"', "[0].use", 'use = "deliver"', id="to be delivered"),
        pytest.param('use = "test"\n', "", "[0].use", "[[packages.plain.companions]]", id="no use"),
        pytest.param('project = "native"', 'project = "Native"', "[0].project", '"Native"', id="name of a project"),
        pytest.param('version = "3.1"', 'version = "v3.1"', "[0].version", '"v3.1"', id="version not in normal form"),
        pytest.param('version = "3.2"', 'version = "3.1"', "[2].version", None, id="pinned twice"),
        pytest.param("2" * 64, "2" * 63, "[0].wheels[1].sha256", "2" * 63, id="ill-formed hash"),
        pytest.param("size = 1", "size = 0", "[0].wheels[0].size", "size = 0", id="empty wheel"),
        pytest.param(
            "native-3.1-py3", "native-3.2-py3", "[0].wheels[0].file", "-3.2-py3", id="wheel of another version"
        ),
        pytest.param("-win_amd64", "-any", "[0].wheels[1].file", None, id="wheel named twice"),
        pytest.param("framework-3.1", "frame-3.1", "[1].sdist.file", "frame-3.1", id="sdist of another project"),
        pytest.param(".tar.gz", ".zip", "[1].sdist.file", ".zip", id="sdist in another format"),
    ],
)
def test_an_error_in_a_companion_names_the_key_and_the_line(
    text: str, old: str, new: str, key: str, there: str | None
) -> None:
    assert old in COMPANIONS
    broken = COMPANIONS.replace(old, new, 1)
    said = refused(text + broken)
    assert f"packages.plain.companions{key}: " in said
    if there is not None:
        number = text.count("\n") + line_of(broken, there)
        assert said.startswith(f"upstream.lock:{number}: packages.plain.companions{key}: ")


def test_a_key_twice_in_a_companion(text: str) -> None:
    doubled = text + COMPANIONS.replace('use = "test"\n', 'use = "test"\nuse = "test"\n', 1)
    assert refused(doubled).startswith(f"upstream.lock: line {text.count(chr(10)) + 6}: use: a key or table that is")


@pytest.mark.parametrize(
    ("old", "new", "key", "there", "what"),
    [
        pytest.param(
            'version = "3.1"\n', 'version = "3.1"\nuse = 1\n', "[0].use", "use = 1", "unknown key", id="unknown key"
        ),
        pytest.param(
            "{ path", "{ after = 1, path", "[0].files[0].after", "after = 1", "unknown key", id="unknown key of a file"
        ),
        pytest.param('version = "3.1"\n', "", "[0].version", "[[packages.plain.fixed]]", "missing", id="no version"),
        pytest.param(
            'version = "3.1"', 'version = "v3.1"', "[0].version", '"v3.1"', "in its normal form", id="normal form"
        ),
        pytest.param('"3.2"', '"3.1"', "[1].version", None, "3.1 is named twice: keep one", id="release twice"),
        pytest.param(
            '"3.1"', '"3.0"', "[0].version", '"3.0"', "expected a release without a series, found 3.0", id="patched"
        ),
        pytest.param(
            "layers/block.py", "core.py", "[0].files[1].path", None, "plain/core.py is named twice", id="file twice"
        ),
        pytest.param(
            "layers/block.py", "layers.py", "[0].files[1].path", None, "expected a file that a series", id="other file"
        ),
        pytest.param("plain/core.py", "../core.py", "[0].files[0].path", None, "without '..'", id="path leads out"),
        pytest.param("1" * 40, "1" * 39, "[0].files[0].blob", None, "a git blob id of 40 hex digits", id="no blob id"),
        pytest.param("3" * 40, "1" * 40, "[1].files[0].blob", None, "is that of 3.1 already: keep", id="content twice"),
        pytest.param(
            'files = [{ path = "plain/core.py", blob = "' + "3" * 40 + '" }]',
            "files = []",
            "[1].files",
            "files = []",
            "at least 1",
            id="no files",
        ),
    ],
)
def test_an_error_in_what_is_fixed_names_the_key_and_the_line(
    text: str, old: str, new: str, key: str, there: str | None, what: str
) -> None:
    assert lock.parse(text + FIXED).packages["plain"].fixed[1].files[0].blob == "3" * 40
    assert old in FIXED
    broken = FIXED.replace(old, new, 1)
    said = refused(text + broken)
    assert f"packages.plain.fixed{key}: " in said
    assert what in said
    if there is not None:
        number = text.count("\n") + line_of(broken, there)
        assert said.startswith(f"upstream.lock:{number}: packages.plain.fixed{key}: ")


@pytest.mark.parametrize("side", ["before", "after"])
def test_what_is_fixed_is_no_file_of_a_series(text: str, side: str) -> None:
    found = re.search(rf'path = "plain/core.py", .*{side} = "([0-9a-f]+)"', text)
    assert found is not None
    said = refused(text + FIXED.replace("1" * 40, found[1]))
    assert "packages.plain.fixed[0].files[0].blob: expected a file that upstream has mended, found one of a" in said


def test_a_companion_is_an_sdist_or_wheels(text: str) -> None:
    wheels = 'wheels = [{ file = "framework-3.2-py3-none-any.whl", size = 1, sha256 = "%s" }]\n' % ("5" * 64)
    assert "companions[2].sdist: expected an sdist or wheels, found both" in refused(text + COMPANIONS + wheels)
    without = COMPANIONS[: COMPANIONS.rindex("sdist = ")]
    assert "companions[2].wheels: missing: expected an sdist or wheels" in refused(text + without)


def test_a_companion_is_found_by_its_name_and_version(text: str) -> None:
    package = lock.parse(text + COMPANIONS).packages["plain"]
    assert package.companion("Framework", "3.2").artefact.size == 4
    assert package.companion("native").artefact.size == 2, "the wheel that this machine takes"
    for wanted in (("framework",), ("framework", "3.3"), ("other",)):
        with pytest.raises(OverlayError) as caught:
            package.companion(*wanted)
        listed = "native==3.1, " * (wanted == ("other",)) + "framework==3.1, framework==3.2"
        assert str(caught.value) == (
            f"expected one companion {'=='.join(wanted)} in upstream.lock, found {listed}: name one of these, or pin it"
        )


def test_a_companion_without_a_wheel_for_this_machine(text: str) -> None:
    package = lock.parse(text + COMPANIONS.replace("none-any", "none-win_arm64")).packages["plain"]
    with pytest.raises(
        OverlayError, match=r"^expected a wheel of native 3\.1 for this machine, found native-3\.1-py3-"
    ):
        _ = package.companion("native").artefact


def test_a_release_for_tests_needs_no_series(text: str) -> None:
    last = text.rindex('series = "demo-1.0-1.1"\n')
    without = text[:last] + text[last:].replace('series = "demo-1.0-1.1"\n', "", 1)
    said = refused(without)
    assert said.startswith(f"upstream.lock:{line_of(without, '# Only for the tests') + 1}: ")
    assert "packages.demo.releases[1].series: missing: expected the series that changes the files" in said
    at = without.index("files = [", last)
    bare = without[:at] + without[without.index("]\n", at) + 2 :]
    assert lock.parse(bare).packages["demo"].releases[1].series is None


def test_bytes_that_are_no_text(sample: Sample) -> None:
    content = sample.lock.read_bytes()
    sample.lock.write_bytes(content.replace(b"small", b"sm\xe4ll"))
    sample.overlay("lock", "check").fails(str(sample.lock), "expected UTF-8, found the byte 0xe4 at offset")


def test_an_empty_lock_is_refused() -> None:
    assert "version: missing" in refused("")
    assert "packages: missing" in refused("version = 1\n")


def test_the_command_says_it_in_one_line(sample: Sample) -> None:
    sample.edit("prefix = ", "prefx = ")
    for arguments in (("lock", "check"), ("lock", "update"), ("apply",)):
        sample.overlay(*arguments).fails(f"{sample.lock}:7: packages.demo.prefx: unknown key")
    assert not sample.out.exists()


def test_what_is_written_by_hand_survives(sample: Sample) -> None:
    """Comments, blank lines, spaces, quotes and order; only what is filled in is new."""
    before = sample.lock.read_text()
    bare = re.sub(r"^(files = \[\n(?:  .*\n)*\]|built = .*)\n", "", before, flags=re.MULTILINE)
    bare = bare.replace("revision = 1\n", "revision   =  1   # raised when the bytes change\n")
    bare = bare.replace('version = "1.1"', "version = '1.1'") + "\n# the end"
    sample.lock.write_text(bare)
    sample.overlay("lock", "update").succeeds()
    after = sample.lock.read_text()
    assert re.sub(r"^(files = \[\n(?:  .*\n)*\]|built = .*)\n", "", after, flags=re.MULTILINE) == bare
    assert re.findall(r"^(?:files = \[\n(?:  .*\n)*\]|built = .*)\n", after, re.MULTILINE) == re.findall(
        r"^(?:files = \[\n(?:  .*\n)*\]|built = .*)\n", before, re.MULTILINE
    )
    sample.overlay("lock", "check").succeeds()


def test_line_ends_mode_and_link_survive(sample: Sample) -> None:
    elsewhere = sample.folder / "elsewhere.lock"
    text = (
        sample.lock.read_text()
        .replace("revision = 1\n", "revision = 4\n", 1)
        .replace("demo-1.0+overlay.1", "demo-1.0+overlay.4")
    )
    elsewhere.write_bytes(text.replace("\n", "\r\n").encode())
    elsewhere.chmod(0o640)
    sample.lock.unlink()
    sample.lock.symlink_to(elsewhere)
    sample.rewrite(1, "value - 30", "value - 31")
    there = {path.name for path in sample.root.iterdir()}
    sample.overlay("lock", "update", "demo==1.0").succeeds()
    assert sample.lock.is_symlink()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o640
    content = elsewhere.read_bytes()
    assert b"revision = 5\r\n" in content
    assert content.count(b"\n") - content.count(b"\r\n") <= 5, "only the rows of the exchanged files are new"
    assert {path.name for path in sample.root.iterdir()} == there


def test_a_failed_update_leaves_the_lock(sample: Sample) -> None:
    before = sample.lock.read_bytes()
    there = {path.name for path in sample.root.iterdir()}
    sample.rewrite(1, "    return value + 30", "    return value + 31")
    sample.overlay("lock", "update").fails("does not fit")
    assert sample.lock.read_bytes() == before
    assert {path.name for path in sample.root.iterdir()} == there


def test_a_lock_that_is_up_to_date_is_not_written(sample: Sample) -> None:
    before = sample.lock.stat()
    done = sample.overlay("lock", "update").succeeds()
    assert done.stderr.splitlines()[-1] == "overlay: upstream.lock is up to date"
    after = sample.lock.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_paths_that_are_plain() -> None:
    for text in ("a", "a/b.py", "größe/x y", ".github/x", "a/..b"):
        assert lock.relative_path(text) == text
    for text in ("", "/a", "a/", "a//b", "./a", "a/../b", "..", ".git/x", "a/.GIT", "c:x", "a\\b", "a\nb", "a\0b"):
        with pytest.raises(ValueError, match="expected a relative path"):
            lock.relative_path(text)


def test_missing_lock(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="found no such file"):
        lock.read(tmp_path / "upstream.lock")
