"""The readers of the lock, the series, the patches and the wheels, with inputs that nobody thought of.

The same inputs in every run, and as many: what is new is looked for by hand (docs/security.md).
"""

import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import sample as make
from tests.sample import Sample, members, upstream
from tests.security import harness

MAXIMUM_TIME = 2.0
"""Seconds that a reader may take for one input, none of which has more than 100 kB."""
MAXIMUM_MEMORY = 64 << 20
"""Bytes that it may take."""


def budget(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def read(reader: Callable[..., object], content: bytes, *further: Any) -> None:
    started, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader(content, *further)
    assert time.process_time() - started < MAXIMUM_TIME
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < MAXIMUM_MEMORY


def pieces(*tokens: str) -> st.SearchStrategy[bytes]:
    """What a mutation puts in: words of the format, numbers at its limits, and anything."""
    numbers = [struct.pack(form, value) for form in ("<H", "<L") for value in (0, 1, 0x7FFF, 0xFFFF)]
    words = [token.encode("utf-8", "surrogateescape") for token in tokens]
    return st.sampled_from([*words, *numbers, b"\xff\xff\xff\xff", b"9" * 5000, b""]) | st.binary(max_size=8)


def mutated(content: bytes, piece: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """`content` with up to six cuts, each with a piece in its place."""
    cut = st.tuples(st.integers(0, len(content)), st.sampled_from([0, 1, 2, 4, 30, 400, 5000]), piece)

    def apply(cuts: list[tuple[int, int, bytes]]) -> bytes:
        found = content
        for at, length, new in cuts:
            found = found[:at] + new + found[at + length :]
        return found

    return st.lists(cut, min_size=1, max_size=6).map(apply)


LOCK = (
    "[",
    "]",
    "{",
    "}",
    "=",
    '"',
    "'",
    '"""',
    "\n",
    "#",
    ".",
    "1979-05-27",
    "nan",
    "0x",
    "\\u0000",
    "\0",
    "a.b.c = 1\n",
)
PATCH = (
    "diff --git a/../x b/../x\n",
    "diff --git a/src/demo/core.py b/src/demo/core.py\n",
    "--- a/x\n+++ b/x\n",
    "--- /dev/null\n",
    "---  a/x\n+++  b/x\n@@ -1 +1 @@\n-a\n+b\n",
    "@@ -1 +1 @@\n-a\n+b\n",
    "@@ -0,0 +1,3 @@",
    "index 0..1 120000\n",
    "rename from a\nrename to b\n",
    "new file mode 100644\n",
    "GIT binary patch\n",
    "\n---\n",
    "\r\n",
    "\u202e",
    "\x1b[2J",
    "\\ No newline at end of file\n",
    '"a/\\056\\056"',
)
WHEEL = make.archive(members("demo", "1.0"))
SMALL = make.archive({path: content for path, content in members("demo", "1.0").items() if "table" not in path})


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def lock_text(template: Sample) -> bytes:
    return template.lock.read_bytes()


@pytest.fixture(scope="module")
def patch_texts(template: Sample) -> list[bytes]:
    return [template.patch(number).read_bytes() for number in (1, 2, 3)]


@pytest.mark.parametrize("reader", sorted(harness.READERS))
@budget(150)
@given(st.binary(max_size=2000) | st.text(max_size=500).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_anything(reader: str, content: bytes) -> None:
    read(harness.READERS[reader], content)


@budget(150)
@given(st.data())
def test_a_lock_that_is_nearly_one(lock_text: bytes, data: st.DataObject) -> None:
    read(harness.read_lock, data.draw(mutated(lock_text, pieces(*LOCK))))


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates() | st.just(""),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _leaves(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inside: Mapping[Any, Any] = (
        value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    )
    return [*([at] if at else []), *(leaf for key in inside for leaf in _leaves(inside[key], (*at, key)))]


@budget(60)
@given(st.data())
def test_a_lock_with_another_value(lock_text: bytes, data: st.DataObject) -> None:
    document = tomlkit.parse(lock_text.decode("utf-8")).unwrap()
    where = data.draw(st.sampled_from(_leaves(document)))
    table: Any = document
    for part in where[:-1]:
        table = table[part]
    table[where[-1]] = data.draw(VALUES)
    try:
        text = tomlkit.dumps(document).encode("utf-8")
    except Exception:
        return  # tomlkit cannot write all of it
    read(harness.read_lock, text)


@budget(100)
@given(
    st.lists(
        st.sampled_from(["0001-x.patch", "../x.patch", "#", " ", "\0", "\udcff", "x" * 300, "/", "\r"]), max_size=8
    )
)
def test_a_list_of_patches(names: list[str]) -> None:
    read(harness.read_series, "\n".join(names).encode("utf-8", "surrogateescape"))


@budget(300)
@given(st.data())
def test_a_patch_that_is_nearly_one(patch_texts: list[bytes], data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(patch_texts))
    read(harness.read_patch, data.draw(mutated(text, pieces(*PATCH))))


@budget(60)
@given(st.data())
def test_what_git_takes_out_of_a_patch(patch_texts: list[bytes], data: st.DataObject) -> None:
    """With git itself: a few, for each takes three processes."""
    text = data.draw(st.sampled_from(patch_texts))
    rows = text.split(b"\n")
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(rows)))
        new = data.draw(st.sampled_from([row for token in PATCH for row in token.encode().split(b"\n")] + rows))
        rows[at : at + data.draw(st.integers(0, 1))] = [new]
    pre_images = {f"src/{path}": content for path, content in upstream("demo", "1.0").items()}
    read(harness.apply_patch, b"\n".join(rows), pre_images)


@pytest.mark.parametrize("reader", ["members", "wheel"])
@budget(250)
@given(st.data())
def test_a_wheel_that_is_nearly_one(reader: str, data: st.DataObject) -> None:
    tokens = ("PK\3\4", "PK\1\2", "PK\5\6", "PK\6\6", "PK\6\7", "PK\7\10", "../", "demo/core.py", "\0")
    read(harness.READERS[reader], data.draw(mutated(SMALL, pieces(*tokens))))


NAMES = st.sampled_from(
    [
        "demo/a.py",
        "demo/A.py",
        "demo/a.py/b",
        "demo/",
        "demo/é",
        "demo/e\u0301",
        "../a",
        "/a",
        "con",
        "a\x1b",
        "a." * 9,
        "",
    ]
) | st.text(max_size=6)
HALF, FULL = st.sampled_from([0, 1, 8, 0x800, 0xFFFF]), st.sampled_from([0, 1, 22, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF])


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """An archive made field by field, each of which may lie."""

    def lies(form: str, right: int) -> int:
        return draw(HALF if form == "H" else FULL) if draw(st.integers(0, 30)) == 0 else right

    body, directory = bytearray(), bytearray()
    files = draw(st.lists(st.tuples(NAMES, st.binary(max_size=60) | st.just(bytes(5000)), st.booleans()), max_size=5))
    if draw(st.booleans()):
        files += [(name, content, True) for name, content in members("demo", "1.0").items() if len(content) < 5000]
    for name, content, deflated in files:
        text = name.encode("utf-8", "replace")
        engine = zlib.compressobj(9, zlib.DEFLATED, -15)
        raw = engine.compress(content) + engine.flush() if deflated else content
        flags = lies("H", 0 if text.isascii() else 0x800)
        sizes = (zlib.crc32(content), len(raw), len(content))
        method = lies("H", 8 if deflated else 0)
        extra = draw(st.binary(max_size=12)) if draw(st.integers(0, 30)) == 0 else b""
        start = lies("L", len(body))
        for target, head, tail, form in (
            (body, (20,), (), "<4s5H3L2H"),
            (directory, (20, 20), (0, 0, lies("H", 0), lies("L", 0o100644 << 16), start), "<4s6H3L5H2L"),
        ):
            said = tuple(lies("L", size) for size in sizes)
            fields = (*head, flags, method, lies("H", 0), lies("H", 33), *said, lies("H", len(text)), len(extra), *tail)
            target += struct.pack(form, b"PK\3\4" if target is body else b"PK\1\2", *fields) + text + extra
        body += raw
    count = lies("H", len(files))
    end = struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, count, count, lies("L", len(directory)), lies("L", len(body)), lies("H", 0)
    )
    return bytes(body + directory) + end


@budget(250)
@given(archives())
def test_an_archive_made_of_lies(content: bytes) -> None:
    read(harness.read_wheel, content)
    read(harness.read_members, content)


def inside(name: str, new: bytes) -> bytes:
    """The small wheel with other bytes in the middle of a member's."""
    at = SMALL.index(name.encode()) + len(name) + 30
    return SMALL[:at] + new + SMALL[at + len(new) :]


NUMBER = b"9" * 5000
HEAD = b"From 0\nSubject: x\n\nWhy.\n\nBug: x\nOrigin: x\nApplied-Upstream: no\nLast-Update: 2026-11-29\n---\n"
FOUND = [
    pytest.param("lock", b"version = " + NUMBER, id="a lock's integer of many digits"),
    pytest.param("patch", HEAD + b"diff --git a/x b/x\n@@ -" + NUMBER + b" +1 @@\n", id="a hunk's, too"),
    pytest.param("wheel", SMALL[:26] + b"\xff\x10" + SMALL[28:], id="a name of thousands of bytes"),
    pytest.param("wheel", inside("demo/core.py", b"\xff" * 8), id="deflated data that is none"),
]
"""Inputs that came to something else once, by reader."""


@pytest.mark.parametrize(("reader", "content"), FOUND)
def test_what_was_found(reader: str, content: bytes) -> None:
    read(harness.READERS[reader], content)


def test_the_samples_are_sound(template: Sample, lock_text: bytes, tmp_path: Path) -> None:
    """What is mutated is no mere refusal before that."""
    assert harness.read_patch(template.patch(2).read_bytes()) is not None
    harness.read_wheel(SMALL[:-1])
    for reader, content in (("lock", lock_text), ("wheel", WHEEL)):
        read(harness.READERS[reader], content)
