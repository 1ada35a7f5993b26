"""What a reader may do with any bytes: give back something sound, or raise OverlayError with one line.

One function a reader, from bytes to nothing; anything that comes out of it but a return is a fault. test_fuzz.py feeds
them with hypothesis, and `python -m tests.security.harness READER` with atheris, which has to be installed beside.
"""

import hashlib
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomlkit

from overlay.deliver import archive, record
from overlay.deliver.wheel import Wheel, audit
from overlay.errors import LONGEST, OverlayError
from overlay.queue import git, lock, members, series

NAME = "demo-1.0-py3-none-any.whl"


def _refused(read: Callable[[], Any]) -> Any:
    """What `read` gives, or None where it refuses in one line that can be printed."""
    try:
        return read()
    except OverlayError as error:
        said = str(error)
        assert said, "an error that says nothing"
        assert said.isprintable(), said
        assert len(said) <= LONGEST + 3, said
        return None


def read_lock(content: bytes) -> None:
    """A lock is refused, or is the same after it was written without a change."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "upstream.lock"
        file.write_bytes(content)
        found = _refused(lambda: lock.read(file))
        if found is not None:
            assert lock.write(file, {}) == found
            assert file.read_bytes() == content
            tomllib.loads(tomlkit.dumps(tomlkit.parse(content.decode("utf-8"))))


def read_patch(content: bytes) -> series.Patch | None:
    """A patch is refused, or read."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "0001-x.patch"
        file.write_bytes(content)
        found: series.Patch | None = _refused(lambda: series.read_patch(file))
        return found


def apply_patch(content: bytes, pre_images: Mapping[str, bytes]) -> None:
    """As `read_patch`; and git takes no path out of a patch that the reader did not see."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "0001-x.patch"
        file.write_bytes(content)
        patch = _refused(lambda: series.read_patch(file))
        if patch is None:
            return
        done = git.run("apply", "--numstat", "-z", str(file), folder=Path(folder), isolated=True)
        if done.returncode == 0:
            seen = {row.split(b"\t")[2].decode("utf-8") for row in done.stdout.split(b"\0") if row}
            assert seen <= set(patch.paths), (seen, patch.paths)
        found = _refused(lambda: series.apply([patch], pre_images))
        if found is not None:
            changed = {path for path in found if found[path] != pre_images.get(path)}
            assert changed <= set(patch.paths), (changed, patch.paths)
        assert [path.name for path in Path(folder).iterdir()] == [file.name]


def read_series(content: bytes) -> None:
    """A list of patches is refused, or names those that are there."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "series").write_bytes(content)
        (Path(folder) / "0001-x.patch").write_bytes(b"")
        assert _refused(lambda: series.read(Path(folder))) is None  # the patch is none


def read_wheel(content: bytes) -> None:
    """A wheel is refused, or the same after it was written again. In it are only the members that its RECORD names."""
    found = _refused(lambda: Wheel.read(content, NAME))
    if found is None:
        return
    contents = {member.name: _refused(member.content) for member in found.members}
    _refused(lambda: audit(found, content, hashlib.sha256(content).hexdigest()))
    again = Wheel.read(b"".join(archive.write(found.members)), NAME)
    assert again.members == found.members
    assert {member.name: _refused(member.content) for member in again.members} == contents
    rows = found.record()
    assert record.parse(record.write(rows), NAME) == rows


def read_members(content: bytes) -> None:
    """A wheel that no lock names is refused, or a member of it has at most the size that it may."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / NAME
        file.write_bytes(content)
        found = _refused(lambda: members.of_file(file, NAME, ["demo/core.py", "demo/layers/block.py"]))
        assert all(len(member or b"") <= members.MAXIMUM_MEMBER for member in (found or {}).values())


READERS: Mapping[str, Callable[[bytes], Any]] = {
    "lock": read_lock,
    "series": read_series,
    "patch": read_patch,
    "wheel": read_wheel,
    "members": read_members,
}


def main(arguments: list[str]) -> None:
    """Feeds one reader with what atheris makes: `READER [CORPUS...] [OPTION OF LIBFUZZER...]`."""
    import atheris

    reader = READERS[arguments[1]]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        atheris.instrument_all()
        atheris.Setup([arguments[0], *arguments[2:]], lambda content: reader(bytes(content)))
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
