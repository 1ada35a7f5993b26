"""The attacks that nothing else here tries: what a wheel, a patch, a lock or a list of patches may do to its reader.

What is in tests/deliver/test_wheel.py, tests/queue/test_lock.py and tests/queue/test_series.py is not here again.
"""

import io
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from overlay.deliver.wheel import Wheel, audit
from overlay.errors import LONGEST, OverlayError, plain
from overlay.queue import lock, series
from tests import sample as make
from tests.deliver.test_wheel import NAME, changed_record, overwritten, with_record, without_record
from tests.queue.test_lock import refused as refused_lock
from tests.sample import Sample, members

FILES = members("demo", "1.0")
SOUND = make.archive(FILES)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def end(content: bytes, **changes: int) -> bytes:
    """The archive with other values in the record at its end."""
    at = len(content) - 22
    places = {"here": (8, "<H"), "members": (10, "<H"), "size": (12, "<L"), "start": (16, "<L"), "comment": (20, "<H")}
    for name, value in changes.items():
        content = overwritten(content, at + places[name][0], places[name][1], value)
    return content


def between(content: bytes, hidden: bytes, before: str = "demo/core.py") -> bytes:
    """The archive with bytes between two members that no directory names."""
    at = content.index(before.encode()) - 30
    made = content[:at] + hidden + content[at:]
    start = struct.unpack_from("<L", content, len(content) - 6)[0] + len(hidden)
    made = end(made, start=start)
    place = start
    while made[place : place + 4] == b"PK\1\2":
        offset = struct.unpack_from("<L", made, place + 42)[0]
        if offset >= at:
            made = overwritten(made, place + 42, "<L", offset + len(hidden))
        lengths = struct.unpack_from("<3H", made, place + 28)
        place += 46 + sum(lengths)
    return made


def overlapping() -> bytes:
    """Members that share their bytes, as in the bombs of Fifield (WOOT 2019)."""
    files = without_record() | {f"demo/z{number}": bytes(9000) for number in range(9)}
    content = make.archive(with_record(files))
    first = content.index(b"demo/z0") - 30
    for number in range(1, 9):
        content = overwritten(content, content.rindex(f"demo/z{number}".encode()) - 4, "<L", first)
    return content


def both(content: bytes, name: str, field: int, form: str, value: int) -> bytes:
    """The archive with another value in both headers of a member, at `field` of the local one."""
    content = overwritten(content, content.index(name.encode()) - 30 + field, form, value)
    return overwritten(content, content.rindex(name.encode()) - 46 + field + 2, form, value)


def listed(**names: bytes) -> bytes:
    return make.archive(with_record(without_record() | names))


def added(*names: str) -> bytes:
    return make.archive(with_record(without_record() | dict.fromkeys(names, b"x")))


def folder(name: str, kind: int = stat.S_IFDIR, content: bytes = b"") -> bytes:
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o755) << 16
    return make.archive([*FILES.items(), (info, content)])


def descriptor(lie: bool) -> bytes:
    """As a build that writes into a pipe leaves it, with the sizes behind the content."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    made = Pipe()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in FILES.items():
            target.writestr(name, content)
    content = made.getvalue()
    return content.replace(b"PK\7\10", b"PK\7\11", 1) if lie else content


def with_commented_end() -> bytes:
    made = io.BytesIO(SOUND)
    with zipfile.ZipFile(made, "a") as target:
        target.comment = b"PK\5\6" + bytes(18)
    return made.getvalue()


WHEELS: list[tuple[str, Callable[[], bytes], str]] = [
    ("bytes before the first member", lambda: b"#!/bin/sh\n" + SOUND, "does not end at"),
    ("another archive before it", lambda: SOUND + SOUND, "does not end at"),
    ("bytes behind the end", lambda: SOUND + b"\n", "found 1 bytes behind it"),
    ("a second end in the comment", with_commented_end, "does not end at"),
    ("a comment that the end hides", lambda: end(SOUND, comment=5), "does not end at"),
    ("a directory that begins earlier", lambda: end(SOUND, start=9), "does not end at"),
    ("a directory of more than it may", lambda: end(SOUND, size=1 << 30), "expected a directory of at most"),
    (
        "fewer members than there are",
        lambda: end(SOUND, here=3, members=3),
        "expected the 3 members that its end names",
    ),
    ("more members than there are", lambda: end(SOUND, here=30, members=30), "expected the 30 members"),
    ("two counts of members", lambda: end(SOUND, here=3), "does not end at"),
    ("a zip64 archive", lambda: end(SOUND, start=0xFFFF_FFFF), "found a zip64 archive"),
    ("a member that no directory names", lambda: between(SOUND, make.archive({"x": b"y"})), "behind the one before"),
    ("members that share their bytes", overlapping, "in both of its headers"),
    ("more than a hundred times its size", lambda: listed(zeros=bytes(20 << 20)), "at most 100 times the size"),
    ("another size in the local header", lambda: overwritten(SOUND, 22, "<L", 1), "sizes and checksum in both"),
    ("another checksum in the local header", lambda: overwritten(SOUND, 14, "<L", 1), "sizes and checksum in both"),
    ("another flag in the local header", lambda: overwritten(SOUND, 6, "<H", 0x800), "in both of its headers"),
    ("a descriptor that lies", lambda: descriptor(lie=True), "expected its size and checksum behind it"),
    ("strong encryption", lambda: both(SOUND, "demo/core.py", 6, "<H", 0x41), "not encrypted"),
    ("a name that is no UTF-8", lambda: added("demo/\u00e9").replace("\u00e9".encode(), b"\xff\xff"), "no zip file"),
    ("composed and decomposed letters", lambda: added("demo/\u00e9", "demo/e\u0301"), "Unicode normalization"),
    ("letters that fold to two", lambda: added("demo/stra\u00dfe", "demo/STRASSE"), "but for case"),
    ("a member in another", lambda: added("demo/a", "demo/a/b"), "lies in demo/a, which is a file"),
    ("a member in another but for case", lambda: added("demo/A/b", "demo/a"), "lies in demo/a, which is a file"),
    ("a folder that is a member", lambda: folder("demo/core.py/"), "is the same as demo/core.py"),
    ("a folder that leads out", lambda: folder("../"), "expected a relative path"),
    ("a folder with content", lambda: folder("demo/x/", content=b"x"), "expected a folder, found 1 bytes"),
    ("a folder that is a link", lambda: folder("demo/x/", stat.S_IFLNK), "found a symbolic link"),
    ("a character device", lambda: folder("demo/x", stat.S_IFCHR), "special file"),
    ("a block device", lambda: folder("demo/x", stat.S_IFBLK), "special file"),
    ("a socket", lambda: folder("demo/x", stat.S_IFSOCK), "special file"),
    ("a device of Windows", lambda: added("demo/aux.py"), "expected a relative path"),
    ("a device of Windows in capitals", lambda: added("demo/COM1"), "expected a relative path"),
    ("a name that ends in a dot", lambda: added("demo/core.py."), "expected a relative path"),
    ("a folder that ends in a space", lambda: added("demo /core.py"), "expected a relative path"),
    ("a short name of .git", lambda: added("GIT~1/hooks/x"), "expected a relative path"),
    ("a .git with a dot behind it", lambda: added(".git./x"), "expected a relative path"),
    ("a .git with what nobody sees in it", lambda: added(".g\u200cit/x"), "'.g\\u200cit/x'"),
    ("a name that turns around", lambda: added("demo/\u202eyp.exe"), "'demo/\\u202eyp.exe'"),
    ("a name with an escape of eight bits", lambda: added("demo/\x9b2J"), "'demo/\\x9b2J'"),
    ("a long name", lambda: added("demo/" + "x\n" * 20000), "expected a relative path"),
    (
        "an absolute path in RECORD",
        lambda: make.archive(changed_record(b"demo/core.py,", b"/demo/core.py,")),
        "not there",
    ),
    ("a path out in RECORD", lambda: make.archive(changed_record(b"demo/core.py,", b"../demo/core.py,")), "not there"),
    ("a line end in RECORD", lambda: make.archive(changed_record(b"demo/core.py,", b'"demo/\ncore.py",')), "not there"),
    ("a RECORD with a null byte", lambda: make.archive(changed_record(b"demo/core.py,", b"\0,")), "RECORD"),
    ("a long field in RECORD", lambda: make.archive(changed_record(b"demo/core.py,", b"x" * 200000 + b",")), "RECORD"),
]


@pytest.mark.parametrize(("content", "said"), [pytest.param(*row[1:], id=row[0]) for row in WHEELS])
def test_a_wheel(content: Callable[[], bytes], said: str) -> None:
    made = content()
    with pytest.raises(OverlayError) as caught:
        audit(Wheel.read(made, NAME), made, make.digest(made))
    found = str(caught.value)
    assert said in found
    assert found.startswith(f"{NAME}: ")
    assert found.isprintable()
    assert len(found) <= LONGEST + 3


def test_a_streamed_wheel_is_sound() -> None:
    content = descriptor(lie=False)
    audit(Wheel.read(content, NAME), content, make.digest(content))


@pytest.mark.parametrize(
    ("character", "kind"),
    [
        pytest.param("\u202e", "invisible", id="right-to-left override"),
        pytest.param("\u2066", "invisible", id="isolate"),
        pytest.param("\u200b", "invisible", id="zero-width space"),
        pytest.param("\ufeff", "invisible", id="byte order mark"),
        pytest.param("\u3164", "invisible", id="Hangul filler"),
        pytest.param("\U000e0041", "invisible", id="tag"),
        pytest.param("\U000e0101", "invisible", id="variation selector"),
        pytest.param("\u2028", "invisible", id="line separator"),
        pytest.param("\x85", "invisible", id="next line"),
        pytest.param("\x9b", "invisible", id="control sequence"),
        pytest.param("\x7f", "control", id="delete"),
        pytest.param("\x0b", "control", id="vertical tab"),
    ],
)
@pytest.mark.parametrize("place", ["value - 30", "return value + 29", "this mends it", "Subtract in the core"])
def test_a_patch_with_what_nobody_sees(template: Sample, tmp_path: Path, character: str, kind: str, place: str) -> None:
    """What is added, what is around it, the reason and the subject are read before a patch is taken."""
    text = template.patch(1).read_text()
    place = place if place in text else "def core_30"
    file = tmp_path / "0001-x.patch"
    file.write_text(text.replace(place, place[:3] + character + place[3:], 1), newline="")
    with pytest.raises(OverlayError) as caught:
        series.read_patch(file)
    number = text[: text.index(place)].count("\n") + 1
    assert f"found the {kind} character {character!a} in line {number}: " in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param("\n@@ -", "\n@@ -" + "9" * 5000, "expected '@@ -FIRST,LINES", id="a number of many digits"),
        pytest.param("\n@@ -", "\n@@ -\u0661", "expected '@@ -FIRST,LINES", id="digits of another script"),
        pytest.param("--- a/", "---  a/", "expected '--- a/PATH'", id="two spaces"),
    ],
)
def test_a_patch(template: Sample, tmp_path: Path, old: str, new: str, said: str) -> None:
    text = template.patch(1).read_text()
    assert old in text
    file = tmp_path / "0001-x.patch"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(OverlayError) as caught:
        series.read_patch(file)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param("version = 1\n", "version = 99\n", "from a newer modeling-overlay, update this one", id="newer"),
        pytest.param("version = 1\n", f"version = {'9' * 5000}\n", "digit", id="a number of many digits"),
        pytest.param("version = 1\n", "version = 1\n\0", "no TOML", id="null byte"),
        pytest.param("version = 1\n", "version = 1\n# \u202e\x1b[2J\n", "no TOML", id="escape in a comment"),
        pytest.param("version = 1\n", f"version = {'[' * 5000}\n", "a few levels deep", id="deep"),
        pytest.param("version = 1\n", f"{'a.' * 400}b = 1\nversion = 1\n", "unknown key", id="long dotted key"),
        pytest.param("version = 1\n", f'version = "{"x" * 100000}"\n', "expected", id="long"),
        pytest.param('prefix = "src/"', 'prefix = "src/\\u202e/"', "expected a relative path", id="path turns around"),
        pytest.param('path = "demo/core.py"', 'path = "demo/aux.py"', "expected a relative path", id="device"),
    ],
)
def test_a_lock(template: Sample, old: str, new: str, said: str) -> None:
    text = template.lock.read_text()
    assert old in text
    found = refused_lock(text.replace(old, new, 1))
    assert said in found
    assert found.isprintable()
    assert len(found) < 1500


def test_a_lock_that_is_too_large(tmp_path: Path) -> None:
    endless = tmp_path / "upstream.lock"
    endless.symlink_to("/dev/zero")
    with pytest.raises(OverlayError, match="expected a lock of at most 1048576 bytes, found more"):
        lock.read(endless)


def test_what_is_printed_is_one_line(sample: Sample) -> None:
    """Whatever a name holds, an error is a line that a terminal shows as it is."""
    assert plain("a\nb\r\nc\x1b[2J\u202e\x9b\udcff größe") == "a b c\\x1b[2J\\u202e\\x9b\\udcff größe"
    assert len(plain("x" * 99999)) == LONGEST + 3
    hostile = sample.folder / "a\x1b]0;x\x07\u202e"
    hostile.mkdir()
    for option in ("--from-tree", "--from-git"):
        said = sample.apply(option, hostile).fails("a\\x1b]0;x\\x07\\u202e")
        assert said.isprintable()
