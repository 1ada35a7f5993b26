"""Wheels: which stock ones are refused, and what is in a patched one."""

import io
import os
import stat
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path

import pytest
from installer.sources import WheelFile
from packaging.utils import parse_wheel_filename

from overlay.deliver import archive, wheel
from overlay.errors import OverlayError
from tests import sample as make
from tests.sample import PRODUCTS, Sample, members, record

NAME = "demo-1.0-py3-none-any.whl"
INFO = "demo-1.0.dist-info"
Files = dict[str, bytes]


def without_record() -> Files:
    return {path: content for path, content in members("demo", "1.0").items() if path != f"{INFO}/RECORD"}


def with_record(files: Files) -> Files:
    return files | {f"{INFO}/RECORD": record(files, INFO)}


def changed_record(old: bytes, new: bytes) -> Files:
    files = members("demo", "1.0")
    assert old in files[f"{INFO}/RECORD"]
    return files | {f"{INFO}/RECORD": files[f"{INFO}/RECORD"].replace(old, new, 1)}


def refused(content: bytes) -> str:
    with pytest.raises(OverlayError) as caught:
        wheel.audit(wheel.Wheel.read(content, NAME), content, make.digest(content))
    said = str(caught.value)
    assert said.startswith(f"{NAME}: ")
    assert "\n" not in said
    return said


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def special(name: str, kind: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o777) << 16
    return info


def test_the_sample_is_sound() -> None:
    content = make.archive(members("demo", "1.0"))
    wheel.audit(wheel.Wheel.read(content, NAME), content, make.digest(content))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../demo.py", "expected a relative path without '..'"),
        ("demo/../../x.py", "expected a relative path without '..'"),
        ("/etc/passwd", "expected a relative path"),
        ("demo//x.py", "expected a relative path"),
        ("./demo/x.py", "expected a relative path"),
        ("demo\\x.py", "a backslash"),
        ("c:/x.py", "':'"),
        ("demo/.git/config", "'.git'"),
        ("demo/a\nb.py", "expected a relative path"),
        ("demo/a\x1b[2J.py", "'demo/a\\x1b[2J.py'"),
        ("demo/CORE.py", "demo/CORE.py is the same as demo/core.py but for case"),
    ],
)
def test_the_name_of_a_member(name: str, said: str) -> None:
    files = with_record(without_record() | {name: b"x"})
    found = refused(make.archive(files))
    assert said in found
    assert "do not use this file" in found


def test_a_name_with_a_null_byte() -> None:
    content = make.archive(with_record(without_record() | {"demo/a_b.py": b"x"}))
    assert "expected a relative path" in refused(content.replace(b"demo/a_b.py", b"demo/a\0b.py"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_doubled_member() -> None:
    files = [*members("demo", "1.0").items(), ("demo/core.py", b"another\n")]
    assert "member demo/core.py is doubled" in refused(make.archive(files))


@pytest.mark.parametrize(
    ("kind", "said"),
    [(stat.S_IFLNK, "found a symbolic link"), (stat.S_IFIFO, "special file"), (stat.S_IFDIR, "special file")],
)
def test_a_member_that_is_no_file(kind: int, said: str) -> None:
    files = with_record(without_record() | {"demo/link": b"/etc/passwd"})
    pairs = [(special(name, kind) if name == "demo/link" else name, content) for name, content in files.items()]
    assert said in refused(make.archive(pairs))


def test_no_record() -> None:
    assert f"expected {INFO}/RECORD, found no such member" in refused(make.archive(without_record()))


@pytest.mark.parametrize("needed", ["METADATA", "WHEEL"])
def test_no_metadata(needed: str) -> None:
    files = without_record()
    del files[f"{INFO}/{needed}"]
    assert f"expected {INFO}/{needed}, found no such member" in refused(make.archive(with_record(files)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"demo/core.py,sha256=", b"demo/core.py,sha256=A", "expected RECORD to tell the truth"),
        (
            b"demo/layers/__init__.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0",
            b"demo/layers/__init__.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,1",
            "expected RECORD to tell the truth",
        ),
        (
            b"demo/layers/__init__.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0",
            b"demo/layers/__init__.py,,",
            "expected a hash of demo/layers/__init__.py by sha256 or better",
        ),
        (
            b"demo/layers/__init__.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0",
            b"demo/layers/__init__.py,md5=1B2M2Y8AsgTpgAmY7PhCfg,0",
            "expected a hash of demo/layers/__init__.py by sha256 or better",
        ),
        (b"demo/core.py,", b"demo/other.py,", "RECORD names demo/other.py, which is not there"),
        (b"demo/core.py,", b"demo/__init__.py,", "RECORD names demo/__init__.py, which is doubled"),
        (b"demo/core.py,", b"demo/core.py,x,", "expected three fields in each row"),
        (b"demo/core.py,", b"demo/core.py\xff,", "RECORD"),
    ],
)
def test_a_record_that_lies(old: bytes, new: bytes, said: str) -> None:
    assert said in refused(make.archive(changed_record(old, new)))


def test_a_member_that_is_not_in_the_record() -> None:
    files = members("demo", "1.0") | {"demo/extra.py": b"x"}
    assert "member demo/extra.py is not in RECORD" in refused(make.archive(files))


def test_two_metadata_folders() -> None:
    files = with_record(without_record() | {"other-1.0.dist-info/METADATA": b"x"})
    assert "expected one .dist-info folder, found demo-1.0.dist-info, other-1.0.dist-info" in refused(
        make.archive(files)
    )
    assert "expected one .dist-info folder, found none" in refused(make.archive({"demo.py": b""}))


@pytest.mark.parametrize("signature", ["RECORD.jws", "RECORD.p7s"])
def test_a_signature(signature: str) -> None:
    files = with_record(without_record() | {f"{INFO}/{signature}": b"x"})
    assert f"found the signature {signature}" in refused(make.archive(files))


@pytest.mark.parametrize("cut", [1, 10, 1000, 40000])
def test_a_truncated_archive(cut: int) -> None:
    content = make.archive(members("demo", "1.0"))
    assert "expected a wheel, found no zip file" in refused(content[:-cut])


def test_no_archive() -> None:
    for content in (b"", b"nothing", b"PK\5\6" + bytes(10)):
        assert "expected a wheel, found no zip file" in refused(content)


def central(content: bytes, name: str) -> int:
    """Where the entry of `name` in the central directory begins."""
    at = content.rindex(name.encode()) - 46
    assert content[at : at + 4] == b"PK\1\2"
    return at


def overwritten(content: bytes, at: int, form: str, value: int) -> bytes:
    packed = struct.pack(form, value)
    return content[:at] + packed + content[at + len(packed) :]


def test_an_encrypted_member() -> None:
    content = make.archive(members("demo", "1.0"))
    assert "expected it stored or deflated and not encrypted" in refused(
        overwritten(content, central(content, "demo/core.py") + 8, "<H", 1)
    )


def test_another_compression() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_LZMA) as target:
        target.writestr("demo/core.py", "x")
    assert "expected it stored or deflated" in refused(content.getvalue())


def test_another_name_in_the_local_header() -> None:
    content = make.archive(members("demo", "1.0"))
    said = refused(content.replace(b"demo/core.py", b"demo/evil.py", 1))
    assert "expected the same name, method, sizes and checksum in both of its headers, found b'demo/evil.py'" in said


def test_a_header_that_is_not_there() -> None:
    content = make.archive(members("demo", "1.0"))
    assert "expected a" in refused(overwritten(content, central(content, "demo/core.py") + 42, "<L", len(content) - 5))


def test_a_damaged_member() -> None:
    files = with_record(without_record())
    content = make.archive(files)
    at = content.index(b"demo/table.bin") + 200
    assert "expected" in refused(overwritten(content, at, "<Q", 0))


def test_a_bomb() -> None:
    """What is inflated is never more than the archive said, and what it says has a limit."""
    files = with_record(without_record() | {f"demo/bomb{number}": bytes(1 << 20) for number in range(3)})
    content = make.archive(files)
    lying = overwritten(content, central(content, "demo/bomb1") + 24, "<L", 10)
    lying = overwritten(lying, lying.index(b"demo/bomb1") - 8, "<L", 10)  # in its own header, too
    member = next(member for member in archive.read(lying, NAME) if member.name == "demo/bomb1")
    with pytest.raises(OverlayError, match="expected 10 bytes"):
        member.content()
    refused(lying)
    for number in range(3):
        content = overwritten(content, central(content, f"demo/bomb{number}") + 24, "<L", 0xFFFF_FFF0)
    assert "expected at most 65535 members of at most 8 GiB together" in refused(content)


def test_a_zip64_entry() -> None:
    content = make.archive(members("demo", "1.0"))
    assert "zip64" in refused(overwritten(content, central(content, "demo/core.py") + 20, "<L", 0xFFFF_FFFF))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\nVersion: 1.0\n", b"\nVersion: 1.1\n"),
        (b"\nVersion: 1.0\n", b"\n"),
        (b"\nVersion: 1.0\n", b"\nVersion: 1.0\nVersion: 1.0\n"),
        (b"\nName: demo\n", b"\nName: other\n"),
    ],
)
def test_metadata_of_another_release(sample: Sample, old: bytes, new: bytes) -> None:
    files = without_record()
    files[f"{INFO}/METADATA"] = files[f"{INFO}/METADATA"].replace(old, new, 1)
    sample.offer(make.archive(with_record(files)))
    sample.apply("demo==1.0").fails(f"{NAME}: expected", f"in {INFO}/METADATA, found", "this wheel is of another")
    assert not sample.out.exists()


def test_a_metadata_folder_of_another_release(sample: Sample) -> None:
    files = {path.replace(INFO, "demo-1.1.dist-info"): content for path, content in without_record().items()}
    sample.offer(make.archive(files | {"demo-1.1.dist-info/RECORD": record(files, "demo-1.1.dist-info")}))
    sample.apply("demo==1.0").fails(f"{NAME}: expected")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (lambda: with_record(without_record() | {"../demo.py": b"x"}), "expected a relative path without '..'"),
        (without_record, "RECORD, found no such member"),
        (
            lambda: changed_record(b"demo/table.bin,sha256=", b"demo/table.bin,sha256=A"),
            "expected RECORD to tell the truth",
        ),
        (
            lambda: {path: content for path, content in members("demo", "1.0").items() if path != "demo/core.py"},
            "RECORD names demo/core.py, which is not there",
        ),
        (
            lambda: with_record(
                {path: content for path, content in without_record().items() if path != "demo/core.py"}
            ),
            "expected demo/core.py, found no such member",
        ),
        (lambda: with_record(without_record() | {"demo/core.py": b"another\n"}), "does not fit src/demo/core.py"),
        (
            lambda: with_record(without_record() | {"demo/__init__.py": b'__version__ = "1.2"\n'}),
            "expected one line __version__",
        ),
        (
            lambda: with_record(without_record() | {"demo/__init__.py": b'__version__ = "1.0"\n' * 2}),
            "expected one line __version__",
        ),
    ],
)
def test_a_wheel_that_is_pinned_and_wrong(sample: Sample, files: Callable[[], Files], said: str) -> None:
    """The whole command, where somebody pinned the sha256 of what should not be used."""
    sample.offer(make.archive(files()))
    for _ in range(2):
        sample.apply().fails(said)
    assert not sample.out.exists()
    assert not sample.patched.exists()


def test_another_wheel_of_the_same_release_is_not_what_the_lock_says(sample: Sample) -> None:
    """Its files fit and RECORD tells the truth, but the built wheel would have other bytes."""
    sample.offer(make.archive(with_record(without_record() | {"demo/extra.py": b"x"})))
    sample.apply().fails("demo-1.0+overlay.1-py3-none-any.whl: expected sha256", "run overlay lock update")
    assert not sample.out.exists()


def test_a_patched_wheel(sample: Sample) -> None:
    sample.apply().succeeds()
    for stock, product in zip(("demo-1.0", "demo-2.0", "plain-3.0"), PRODUCTS, strict=True):
        project, _, version = stock.partition("-")
        local = f"{version}+overlay.1"
        assert str(parse_wheel_filename(product)[1]) == local
        with zipfile.ZipFile(sample.wheel(stock)) as before, zipfile.ZipFile(sample.out / product) as after:
            assert after.testzip() is None
            WheelFile(after).validate_record(validate_contents=True)
            old, new = f"{stock}.dist-info", f"{project}-{local}.dist-info"
            sbom = f"{new}/sboms/modeling-overlay.cdx.json"
            assert [*(name.replace(old, new) for name in before.namelist()), sbom] == after.namelist()
            exchanged = {f"{project}/core.py", f"{project}/layers/block.py", f"{new}/METADATA", f"{new}/RECORD"}
            exchanged |= {f"{project}/__init__.py"} if project == "demo" else set()
            for one, other in zip(before.infolist(), after.infolist()[:-1], strict=True):
                assert (one.date_time, one.external_attr, one.create_system) == (
                    other.date_time,
                    other.external_attr,
                    other.create_system,
                )
                assert (before.read(one) == after.read(other)) is (other.filename not in exchanged)
                assert other.compress_type == (
                    zipfile.ZIP_STORED if other.filename in exchanged else zipfile.ZIP_DEFLATED
                )
            said = after.read(f"{new}/METADATA").decode()
            assert said == before.read(f"{old}/METADATA").decode().replace(
                f"\nVersion: {version}\n", f"\nVersion: {local}\n"
            )
            assert HeaderParser().parsestr(said)["Version"] == local
            assert (sample.out / f"{product}.metadata").read_text() == said
            expected = f'__version__ = "{local}"  #' if project == "demo" else f'__version__ = "{version}"\n'
            assert expected in after.read(f"{project}/__init__.py").decode()


def test_the_same_bytes_from_another_folder_time_umask_and_hash_seed(sample: Sample) -> None:
    sample.apply().succeeds()
    first = make.snapshot(sample.out)
    for file in sample.out.rglob("*"):
        os.utime(file, (1, 1))
    sample.variables.update({"PYTHONHASHSEED": "7", "TZ": "Pacific/Auckland", "SOURCE_DATE_EPOCH": "1", "LC_ALL": "C"})
    old = os.umask(0o077)
    try:
        time.sleep(1.1)
        sample.overlay("apply", "--out", sample.folder / "another place" / "größe", own=True).succeeds()
    finally:
        os.umask(old)
    assert make.snapshot(sample.folder / "another place" / "größe") == first


def test_a_streamed_archive_is_copied_without_its_data_descriptors() -> None:
    """As a build that writes into a pipe leaves it: sizes come after the content."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.content = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.content += bytes(data)  # type: ignore[call-overload]
            return len(bytes(data))  # type: ignore[call-overload]

    pipe = Pipe()
    files = members("demo", "1.0")
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in files.items():
            target.writestr(name, content)
    again = b"".join(archive.write(archive.read(bytes(pipe.content), NAME)))
    with zipfile.ZipFile(io.BytesIO(again)) as found:
        assert found.testzip() is None
        assert {entry.flag_bits & 8 for entry in found.infolist()} == {0}
        assert {name: found.read(name) for name in found.namelist()} == files


def test_pip_and_uv_install_it(sample: Sample, tmp_path: Path) -> None:
    sample.apply().succeeds()
    product = sample.out / PRODUCTS[0]
    environment = sample.environment()
    commands = {
        "pip": [sys.executable, "-P", "-m", "pip", "install", "--no-index", "--no-deps", "--target"],
        "uv": [sys.executable, "-P", "-m", "uv", "pip", "install", "--offline", "--no-deps", "--target"],
    }
    for tool, command in commands.items():
        done = subprocess.run(
            [*command, str(tmp_path / tool), str(product)],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, done.stderr
        code = "import demo, importlib.metadata as m; print(demo.__version__, m.version('demo'), demo.__file__)"
        said = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=environment | {"PYTHONPATH": str(tmp_path / tool)},
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
        assert said == f"1.0+overlay.1 1.0+overlay.1 {tmp_path / tool / 'demo' / '__init__.py'}\n"
