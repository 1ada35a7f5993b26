"""`overlay verify-wheel`: what is as the lock says is identical, and of all else it says what differs."""

import io
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from overlay.deliver import sbom
from tests import sample as make
from tests.sample import PRODUCTS, Done, Sample, overlay_wheel_in

INFO = "demo-1.0+overlay.1.dist-info"
Members = dict[str, bytes]


@pytest.fixture(scope="module")
def built(template: Sample, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A sample with its products, which no test here changes."""
    sample = make.copy(template, tmp_path_factory.mktemp("verified") / "sample")
    sample.apply().succeeds()
    return sample


def members_of(file: Path) -> Members:
    with zipfile.ZipFile(file) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def zipped(members: Iterable[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as wheel:
        for name, data in members:
            wheel.writestr(name, data)
    return content.getvalue()


def verified(sample: Sample, content: bytes, folder: Path, name: str = "handed.whl") -> Done:
    file = folder / name
    file.write_bytes(content)
    return sample.overlay("verify-wheel", file)


def differs(sample: Sample, content: bytes, folder: Path) -> list[str]:
    """The lines that say what differs."""
    done = verified(sample, content, folder)
    assert done.code == 1, done.stdout + done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.startswith(f"{folder}/handed.whl: not {PRODUCTS[0]} as it is made here, do not use it")
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def test_each_product_is_identical(built: Sample, tmp_path: Path) -> None:
    for name in (*PRODUCTS, overlay_wheel_in(built.out)):
        done = built.overlay("verify-wheel", built.out / name).succeeds()
        assert done.stdout == (f"{built.out / name}: identical to what the lock and upstream's artefact give: {name}\n")
        content = (built.out / name).read_bytes()
        done = verified(built, content, tmp_path, "any name").succeeds()
        assert done.stdout.endswith(f"{name}; it is to be called {name}\n")


def with_line(members: Members) -> Members:
    return members | {"demo/core.py": members["demo/core.py"].replace(b"value + 3\n", b"value + 3  # \x1b[2J\n")}


def without_table(members: Members) -> Members:
    return {name: content for name, content in members.items() if name != "demo/table.bin"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_line, r"changed: demo/core\.py: line 17: expected '    return value \+ 3', found '.*# \\x1b\[2J'"),
        (
            lambda old: old | {"demo/core.py": old["demo/core.py"] + b"import os\n"},
            r"demo/core.py: line 24\d is too much: 'import os'",
        ),
        (
            lambda old: old | {"demo/core.py": old["demo/core.py"].replace(b"\n", b"\r\n")},
            "demo/core.py: the ends of its lines differ",
        ),
        (without_table, "missing: demo/table.bin"),
        (lambda old: old | {"demo/evil.py": b"x"}, r"extra: demo/evil\.py \(1 bytes\)"),
        (
            lambda old: old | {"demo/table.bin": old["demo/table.bin"][:70] + b"\0" + old["demo/table.bin"][71:]},
            r"changed: demo/table.bin: binary content: expected 64000 bytes, found 64000, the first other one at 70",
        ),
        (
            lambda old: old | {f"{INFO}/METADATA": old[f"{INFO}/METADATA"] + b"\nmore\n"},
            f"changed: {INFO}/METADATA: line ".replace("+", r"\+"),
        ),
        (
            lambda old: old | {f"{INFO}/RECORD": old[f"{INFO}/RECORD"].replace(b"sha256=", b"sha256=A", 1)},
            f"changed: {INFO}/RECORD: line 1: expected ".replace("+", r"\+"),
        ),
        (
            lambda old: old | {f"{INFO}/{sbom.MEMBER}": old[f"{INFO}/{sbom.MEMBER}"].replace(b"Subtract", b"Add", 1)},
            f"changed: {INFO}/{sbom.MEMBER}: line ".replace("+", r"\+"),
        ),
    ],
    ids=["line", "added", "line-ends", "missing", "extra", "binary", "metadata", "record", "sbom"],
)
def test_what_was_changed_is_named(
    built: Sample, tmp_path: Path, change: Callable[[Members], Members], said: str
) -> None:
    tampered = zipped(change(members_of(built.out / PRODUCTS[0])).items())
    found = [line for line in differs(built, tampered, tmp_path) if not line.startswith("same content, ")]
    assert len(found) == 1, found
    assert re.search(said, found[0]), found


def test_the_archive_alone_differs(built: Sample, tmp_path: Path) -> None:
    members = members_of(built.out / PRODUCTS[0])
    with zipfile.ZipFile(built.out / PRODUCTS[0]) as wheel:
        entries = wheel.infolist()
    next(entry for entry in entries if entry.compress_type == zipfile.ZIP_DEFLATED).compress_type = zipfile.ZIP_STORED
    (said,) = differs(built, zipped(zip(entries, members.values(), strict=True)), tmp_path)
    assert re.fullmatch(r"same content, compressed in another way: [^ ]+", said)
    with zipfile.ZipFile(built.out / PRODUCTS[0]) as wheel:
        entries = wheel.infolist()
    for entry in entries[:5]:
        entry.external_attr |= 0o111 << 16
    (said,) = differs(built, zipped(zip(entries, members.values(), strict=True)), tmp_path)
    assert re.fullmatch(
        r"same content, other dates, modes or systems in the headers: [^ ]+, [^ ]+, [^ ]+ and 2 more", said
    )
    with zipfile.ZipFile(built.out / PRODUCTS[0]) as wheel:
        entries = wheel.infolist()
    entries[0].extra = b"UT\5\0\1\0\0\0\0"  # a time, as Info-ZIP has it
    (said,) = differs(built, zipped(zip(entries, members.values(), strict=True)), tmp_path)
    assert said == "the members are the same: the archive has other bytes beside them, as an extra field or a comment"


def test_members_in_another_order(built: Sample, tmp_path: Path) -> None:
    members = members_of(built.out / PRODUCTS[0])
    said = differs(built, zipped(reversed(list(members.items()))), tmp_path)
    assert "the members stand in another order" in said


def test_a_wheel_of_everything_else(built: Sample, tmp_path: Path) -> None:
    members = {f"demo/{number}.py": b"" for number in range(100)}
    metadata = members_of(built.out / PRODUCTS[0])[f"{INFO}/METADATA"]
    said = differs(built, zipped([*members.items(), (f"{INFO}/METADATA", metadata)]), tmp_path)
    assert len(said) == 41
    assert said[-1].startswith("and ")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../x.py": b"x"}, "expected a relative path without '..'"),
        ({"demo.py": b"x"}, "expected one METADATA in a .dist-info folder, found 0: this is no wheel"),
        ({"x-1.dist-info/METADATA": b"Name: x\nVersion: 1\n\n"}, "demo, plain, modeling-overlay, found one of x"),
        ({"x-1.dist-info/METADATA": b"Name: demo\nVersion: one\n\n"}, "expected a version (PEP 440) in METADATA"),
        (
            {"x-1.dist-info/METADATA": b"Name: demo\nVersion: 1.0+overlay." + b"1" * 5000 + b"\n\n"},
            "expected a version (PEP 440) in METADATA",
        ),
        (
            {"x-1.dist-info/METADATA": b"Name: demo\nVersion: 1.0\n\n"},
            "expected a version such as 1.0+overlay.1, found 1.0, upstream's own version: only wheels that",
        ),
        (
            {"x-1.dist-info/METADATA": b"Name: demo\nVersion: 1.0+overlay.g0123abcd\n\n"},
            "a wheel of apply --from-git, which no lock names",
        ),
        ({"x-1.dist-info/METADATA": b"Name: demo\nVersion: 1.0+evil.1\n\n"}, "the label of a wheel that no lock"),
        ({"x-1.dist-info/METADATA": b"Name: demo\nVersion: 9.9+overlay.1\n\n"}, "expected one of the pinned releases"),
        ({"x-1.dist-info/METADATA": b"Name: demo\nVersion: 1.1+overlay.1\n\n"}, "is pinned for the tests alone"),
    ],
)
def test_what_cannot_be_made_again(built: Sample, tmp_path: Path, files: Members, said: str) -> None:
    verified(built, zipped(files.items()), tmp_path).fails(said)


def test_no_archive(built: Sample, tmp_path: Path) -> None:
    verified(built, b"nothing", tmp_path).fails("handed.whl: expected a wheel, found no zip file")
    built.overlay("verify-wheel", tmp_path / "nowhere.whl").fails(
        f"{tmp_path}/nowhere.whl: expected a wheel, found no such file: name one"
    )
    built.overlay("verify-wheel", tmp_path).fails(f"{tmp_path}: expected a wheel, found a folder")


def test_another_revision(sample: Sample, tmp_path: Path) -> None:
    sample.apply("demo==1.0").succeeds()
    older = tmp_path / PRODUCTS[0]
    shutil.copyfile(sample.out / PRODUCTS[0], older)
    sample.rewrite(1, "+    return value - 30", "+    return value - 31")
    sample.overlay("lock", "update").succeeds()
    done = sample.overlay("verify-wheel", older)
    assert done.code == 1
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    assert lines[0] == (
        "this is revision 1, and the lock is at 2: an older one: to make it again, use the commit whose upstream.lock "
        f"has it (git log -S '{PRODUCTS[0]}' upstream.lock)"
    )
    assert any(
        line.endswith("expected '    return value - 31', found '    return value - 30'") for line in lines[1:]
    ), lines
    assert not any("METADATA" in line for line in lines), "what the label alone changes is no difference"
    sample.rewrite(1, "+    return value - 31", "+    return value - 30")
    sample.edit("revision = 2", "revision = 1")
    sample.lock.write_text(re.sub(r"built = .*\n", "", sample.lock.read_text(), count=1))
    sample.overlay("lock", "update").succeeds()
    sample.overlay("verify-wheel", older).succeeds()
    newer = members_of(older)
    renamed = {
        name.replace("overlay.1", "overlay.7"): content.replace(b"overlay.1", b"overlay.7")
        for name, content in newer.items()
    }
    done = verified(sample, zipped(renamed.items()), tmp_path)
    assert done.code == 1
    assert "this is revision 7, and the lock is at 1: one that this checkout does not know" in done.stdout


def test_a_lock_that_is_not_of_these_patches(sample: Sample) -> None:
    sample.apply("demo==1.0").succeeds()
    sample.rewrite(1, "Subtract in the core", "Take away in the core")
    sample.overlay("verify-wheel", sample.out / PRODUCTS[0]).fails(
        f"{PRODUCTS[0]}: expected sha256", "the lock is not of these patches, run overlay lock update"
    )


def test_the_overlay_wheel_of_another_state(sample: Sample, tmp_path: Path) -> None:
    sample.apply().succeeds()
    older = tmp_path / overlay_wheel_in(sample.out)
    shutil.copyfile(sample.out / older.name, older)
    (sample.root / "overlay" / "new.py").write_text("NEW = True\n")
    done = sample.overlay("verify-wheel", older)
    assert done.code == 1
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    assert lines[0].startswith("it is of another state of this project: its version is 1.0+g")
    assert "missing: overlay/new.py" in lines
    assert lines[-1] == "the patched files in it are those that the lock names"
    members = members_of(older)
    place = "overlay/patched/demo/1.0/demo/core.py"
    (sample.root / "overlay" / "new.py").unlink()
    tampered = members | {place: members[place] + b"import os\n"}
    done = verified(sample, zipped(tampered.items()), tmp_path)
    assert done.code == 1
    assert re.search(rf"changed: {place}: line 24\d is too much: 'import os'\n", done.stdout)
    assert "those that the lock names" not in done.stdout


def test_nothing_is_written(built: Sample) -> None:
    before = make.snapshot(built.root), make.snapshot(built.out)
    built.overlay("verify-wheel", built.out / overlay_wheel_in(built.out)).succeeds()
    assert (make.snapshot(built.root), make.snapshot(built.out)) == before


def test_a_name_that_turns_the_line_around_is_escaped(built: Sample, tmp_path: Path) -> None:
    wheel = built.out / make.PRODUCTS[0]
    hidden = {**members_of(wheel), "demo/\u202eyp.x": b"1"}
    done = verified(built, zipped(hidden.items()), tmp_path)
    assert "\u202e" not in done.stdout + done.stderr
    assert r"demo/\u202eyp.x" in done.stdout + done.stderr
