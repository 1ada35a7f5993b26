"""All or nothing: `dist/` and `overlay/patched/` are each as before or as after, and what is not ours stays."""

import importlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlay import cli
from overlay.deliver import output, overlay_wheel
from overlay.errors import OverlayError
from tests.queue.server import Handler, serving
from tests.sample import PRODUCTS, Entry, Sample, overlay_wheel_in, snapshot

State = dict[str, Entry] | None
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root can mount a file system or make a file immutable")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def foreign(folder: Path) -> dict[str, tuple[object, ...]]:
    """Puts things of the user's into `folder`, and says what about them must not change."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo-1.0-py3-none-any.whl").write_bytes(b"the user's")
    (folder / "größe und mehr").mkdir()
    (folder / "größe und mehr" / "notes.txt").write_text("notes")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("größe und mehr")
    (folder / "broken").symlink_to("/nowhere")
    (folder / "simple" / "other").mkdir(parents=True)
    (folder / "simple" / "other" / "index.html").write_text("another project")
    (folder / "simple" / "demo").mkdir(exist_ok=True)
    (folder / "simple" / "demo" / "notes.txt").write_text("notes")
    (folder / "simple" / "link").symlink_to("other")
    os.link(folder / "größe und mehr" / "notes.txt", folder / "simple" / "hard link")
    (folder / "secret").write_text("x")
    (folder / "secret").chmod(0o600)
    (folder / "empty").chmod(0o2750)
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (1_000_000_000, 1_100_000_000), follow_symlinks=False)
    return untouched(folder)


def untouched(folder: Path) -> dict[str, tuple[object, ...]]:
    """What is not this project's in `folder`: mode, owner, time and content; of what is no folder the inode too."""
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        ours = re.fullmatch(
            r"([^/]+\+|modeling_)overlay[^/]+|constraints\.txt|simple(/(demo|plain|modeling-overlay))?|"
            r"simple/((demo|plain|modeling-overlay)/)?index\.html",
            name,
        )
        if ours:
            continue
        status = path.lstat()
        kept: tuple[object, ...] = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)
        if path.is_symlink():
            kept = (*kept, status.st_ino, path.readlink())
        elif path.is_file():
            kept = (*kept, status.st_ino, path.read_bytes())
        found[name] = kept
    return found


def siblings(sample: Sample) -> set[str]:
    """What lies beside the two folders."""
    return {
        f"{folder.name}/{path.name}"
        for folder in (sample.out.parent, sample.patched.parent)
        if folder.exists()
        for path in folder.iterdir()
        if path
        not in (sample.root / "overlay" / name for name in ("__init__.py", "modeling_overlay.pth", "startup.py"))
    }


def states(sample: Sample) -> tuple[State, State]:
    return snapshot(sample.out), snapshot(sample.patched)


def shape(state: State) -> set[str]:
    return set() if state is None else set(state)


class Killed:
    """Kills this process before its n-th step that touches a folder, or opens a file to write, in `place`."""

    STEPS = frozenset(
        (
            "os.rename",
            "os.link",
            "os.remove",
            "os.rmdir",
            "os.mkdir",
            "os.scandir",
            "os.chmod",
            "os.chown",
            "os.utime",
            "tempfile.mkdtemp",
            "shutil.copymode",
            "shutil.copystat",
            "ctypes.dlsym",
        )
    )

    def __init__(self, place: Path, at: int) -> None:
        self.place = str(place)
        self.left = at

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        written = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in self.STEPS or written) and (event == "ctypes.dlsym" or str(arguments[0]).startswith(self.place)):
            self.left -= 1
            if self.left == 0:
                self.end()

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def forked(sample: Sample, arguments: list[str], killed_at: int = 0, how: type[Killed] = Killed) -> int:
    """Runs `overlay` in a fork of this process, which has everything imported; how it ended, as os.waitpid says."""
    importlib.import_module("overlay.deliver.apply")
    importlib.import_module("overlay.deliver.index")
    importlib.import_module(overlay_wheel.LIBRARY)
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.environ.clear()
            os.environ.update(sample.environment())
            if killed_at:
                sys.addaudithook(how(sample.folder, killed_at))
            cli.main(arguments)
        except SystemExit as ended:
            os._exit(int(ended.code or 0))
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("there", ["nothing there", "older products and foreign files there"])
def test_a_kill_before_every_step(sample: Sample, there: str) -> None:
    everything = ["apply", "--root", str(sample.root), "--out", str(sample.out)]
    kept: dict[str, tuple[object, ...]] = {}
    if there != "nothing there":
        sample.apply("demo==1.0").succeeds()
        kept = foreign(sample.out)
    before = states(sample)
    store = sample.folder / "before"
    for name, folder in (("out", sample.out), ("patched", sample.patched)):
        if folder.exists():
            shutil.copytree(folder, store / name, symlinks=True)
    assert forked(sample, everything) == 0
    after = states(sample)
    assert before[0] != after[0]
    assert before[1] != after[1]
    seen: set[tuple[bool, bool]] = set()
    step = 0
    while True:
        step += 1
        for name, folder in (("out", sample.out), ("patched", sample.patched)):
            for left in (folder, *folder.parent.glob(".*")):  # or the next run's first steps would be to clean up
                shutil.rmtree(left, ignore_errors=True)
            if (store / name).exists():
                shutil.copytree(store / name, folder, symlinks=True)
        kept = untouched(sample.out) if kept else {}
        ended = forked(sample, everything, killed_at=step)
        found = states(sample)
        assert found[0] in (before[0], after[0]), f"dist/ is in between after a kill at step {step}"
        assert found[1] in (before[1], after[1]), f"overlay/patched/ is in between after a kill at step {step}"
        assert {name: untouched(sample.out)[name] for name in kept} == kept, f"step {step}"
        seen.add((found[0] == after[0], found[1] == after[1]))
        if ended == 0:
            break
        assert os.WTERMSIG(ended) == signal.SIGKILL, f"ended with {ended} at step {step}"
        if step % 3 == 0:
            assert forked(sample, everything) == 0
            assert states(sample) == after
            assert siblings(sample) == {"out/dist", "overlay/patched"}, f"step {step}"
    assert step > 30
    assert seen == {(False, False), (True, False), (True, True)}
    assert siblings(sample) == {"out/dist", "overlay/patched"}


def test_a_kill_at_any_time(sample: Sample) -> None:
    """From outside, as a command of its own, with signals that may hit anything, imports too."""
    sample.apply("demo==1.0").succeeds()
    kept = foreign(sample.out)
    before = states(sample)
    begun = time.monotonic()
    sample.overlay("apply", "--out", sample.folder / "other").succeeds()
    took = time.monotonic() - begun
    sample.apply("demo==1.0").succeeds()
    assert states(sample) == before
    after: tuple[State, State] | None = None
    for number in range(12):
        running = sample.start("apply")
        time.sleep(took * (0.3 + number / 15))
        running.kill()
        running.communicate()
        found = states(sample)
        for one, old in zip(found, before, strict=True):
            assert one == old or (one is not None and len(one) > len(old or {}))
        assert untouched(sample.out) == kept
    sample.apply().succeeds()
    after = states(sample)
    sample.apply().succeeds()
    assert states(sample) == after
    assert untouched(sample.out) == kept
    assert siblings(sample) == {"out/dist", "overlay/patched"}


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("which", [1, 2])
def test_a_kill_at_the_exchange_itself(sample: Sample, which: int) -> None:
    sample.apply("demo==1.0").succeeds()
    before = states(sample)
    trace = [
        "strace",
        "-f",
        "-qq",
        "-o",
        os.devnull,
        "-e",
        "trace=renameat2",
        "-e",
        f"inject=renameat2:signal=KILL:when={which}",
    ]
    probe = subprocess.run([*trace[:7], "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"strace cannot trace here: {probe.stderr.decode()}")
    done = sample.overlay("apply", prefix=trace)
    assert done.code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    found = states(sample)
    sample.apply().succeeds()
    after = states(sample)
    assert found[0] in (before[0], after[0])
    assert found[1] in (before[1], after[1])
    assert siblings(sample) == {"out/dist", "overlay/patched"}


def test_what_is_not_ours_stays(sample: Sample) -> None:
    kept = foreign(sample.out)
    sample.apply("demo==1.0").succeeds()
    assert untouched(sample.out) == kept
    sample.apply().succeeds()
    assert untouched(sample.out) == kept
    assert {*PRODUCTS, overlay_wheel_in(sample.out)} <= shape(snapshot(sample.out))
    sample.apply("plain==3.0").succeeds()
    assert untouched(sample.out) == kept
    assert {name for name in shape(snapshot(sample.out)) if "overlay" in name and name.endswith(".whl")} == {
        PRODUCTS[2]
    }
    assert not (sample.out / "simple" / "demo" / "index.html").exists(), "its wheel is gone"
    assert (sample.out / "simple" / "hard link").stat().st_nlink == 2


@needs_root
def test_owners_stay(sample: Sample) -> None:
    foreign(sample.out)
    for path in (sample.out, sample.out / "empty", sample.out / "link", sample.out / "secret"):
        os.chown(path, 1234, 2345, follow_symlinks=False)
    sample.out.chmod(0o2775)
    kept = untouched(sample.out)
    sample.apply().succeeds()
    assert untouched(sample.out) == kept
    status = sample.out.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 2345, 0o2775)


@pytest.mark.parametrize("name", ["simple", "simple/demo", "constraints.txt"])
@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_something_of_the_users_where_a_product_goes(sample: Sample, name: str, kind: str) -> None:
    place = sample.out / name
    place.parent.mkdir(parents=True)
    if kind == "link":
        (sample.folder / "elsewhere").mkdir()
        place.symlink_to(sample.folder / "elsewhere")
    elif kind == "file":
        place.write_text("the user's")
    else:
        place.mkdir()
        (place / "notes.txt").write_text("notes")
    before = states(sample)
    done = sample.apply()
    if name != "constraints.txt" and kind == "folder":
        done.succeeds()
        assert snapshot(sample.folder / "elsewhere") in (None, {})
        return
    done.fails(f"{place} stands where a product goes, and is not this project's: move it away")
    assert states(sample) == before
    assert siblings(sample) <= {"out/dist"}


def test_what_a_killed_run_had_half_written_goes(sample: Sample) -> None:
    """Of another command, too: it is no file of the user's that came late, and must not move into the products."""
    sample.apply().succeeds()
    before = snapshot(sample.out)
    new = sample.out.with_name(".dist.overlay-new")
    new.mkdir()
    (new / "demo-1.0+overlay.gabcdef123456-py3-none-any.whl").write_text("half of it")
    (new / "stray").write_text("a link to something of the user's")
    new.rename(new.with_name(f".dist.overlay-{new.stat().st_ino}"))
    sample.apply().succeeds()
    assert snapshot(sample.out) == before
    assert siblings(sample) == {"out/dist", "overlay/patched"}


def test_what_came_late_into_the_old_folder_of_a_killed_run_is_kept(sample: Sample) -> None:
    sample.apply().succeeds()
    old = sample.out.with_name(f".dist.overlay-{sample.out.stat().st_ino}")
    old.mkdir()
    (old / "late.txt").write_text("the user's")
    (old / PRODUCTS[0]).write_text("old")
    sample.apply().succeeds()
    assert (sample.out / "late.txt").read_text() == "the user's"
    assert (sample.out / PRODUCTS[0]).read_bytes() != b"old"
    assert siblings(sample) == {"out/dist", "overlay/patched"}


def test_out_is_a_link(sample: Sample) -> None:
    elsewhere = sample.folder / "elsewhere" / "dist"
    elsewhere.mkdir(parents=True)
    sample.out.parent.mkdir()
    sample.out.symlink_to(elsewhere)
    sample.apply().succeeds()
    assert sample.out.is_symlink()
    assert {*PRODUCTS, overlay_wheel_in(elsewhere)} <= shape(snapshot(elsewhere))


@pytest.mark.parametrize(
    "name",
    [
        "dist",
        "with a  few spaces",
        "größe, 大きさ",
        "a[b]*?",
        "-rf",
        "quote'\"\\",
        "deep/" * 40 + "dist",
        "x" * 200,
        "a\udcff",
    ],
)
def test_the_name_of_out(sample: Sample, name: str) -> None:
    out = sample.folder / "out" / name
    sample.overlay("apply", "--out", f"{sample.folder}/out/{name}").succeeds()
    assert {*PRODUCTS, overlay_wheel_in(out)} <= shape(snapshot(out))
    left = out.parent / f".{out.name}.overlay-{out.stat().st_ino + 1}"  # as a killed run leaves it
    left.mkdir()
    (left / PRODUCTS[0]).write_text("half of it")
    sample.overlay("apply", f"--out={out}").succeeds()
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_another_out_of_a_similar_name_is_not_taken_for_what_is_left(sample: Sample) -> None:
    sample.out.parent.mkdir()
    similar = sample.out.parent / ".dist.overlay-of-the-user's"
    similar.mkdir()
    (similar / PRODUCTS[0]).write_text("x")
    sample.apply().succeeds()
    assert (similar / PRODUCTS[0]).read_text() == "x"


def test_a_root_with_spaces_and_other_letters(sample: Sample) -> None:
    moved = Sample(sample.folder.with_name("größe  mit 大きさ '\" [x]"))
    sample.folder.rename(moved.folder)
    moved.apply().succeeds()
    moved.overlay("lock", "check").succeeds()
    moved.overlay("lock", "update").succeeds()
    assert (
        moved.overlay("apply", "--out", "dist").succeeds().stderr.splitlines()[-2]
        == f"overlay: wrote dist/{overlay_wheel_in(moved.folder / 'dist')}"
    )


def test_out_is_a_file(sample: Sample) -> None:
    sample.out.parent.mkdir()
    sample.out.write_text("the user's")
    sample.apply().fails(f"expected a folder at {sample.out}, found a file")
    assert sample.out.read_text() == "the user's"
    sample.overlay("apply", "--out", sample.out / "inside").fails(str(sample.out), "expected a folder")
    sample.out.unlink()
    sample.apply().succeeds()


def test_out_holds_the_project(sample: Sample) -> None:
    before = snapshot(sample.root)
    places = [sample.root, sample.folder, Path("/"), sample.root / "overlay", sample.patched, sample.patched / "inside"]
    for place in places:
        sample.overlay("apply", "--out", place).fails("holds this project itself", "--out")
    assert snapshot(sample.root) == before


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system at `folder`; skips where this machine does not let root mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """`folder` through a read-only mount of itself."""
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


@needs_root
@pytest.mark.parametrize("what", ["out", "parent", "patched", "overlay", "cache"])
def test_a_read_only_place(sample: Sample, what: str) -> None:
    sample.apply("demo==1.0").succeeds()
    kept = foreign(sample.out)
    before = states(sample)
    place = {
        "out": sample.out,
        "parent": sample.out.parent,
        "patched": sample.patched,
        "overlay": sample.patched.parent,
        "cache": sample.cache,
    }[what]
    with read_only(place):
        sample.apply().fails(str(place))
        assert states(sample) == before
        assert untouched(sample.out) == kept
    sample.apply().succeeds()
    assert untouched(sample.out) == kept
    assert siblings(sample) == {"out/dist", "overlay/patched"}


@needs_root
def test_out_is_a_mount_point(sample: Sample) -> None:
    with mounted(sample.out, "-t", "tmpfs", "tmpfs"):
        sample.apply().fails(f"{sample.out} is a mount point", "name a folder inside it with --out")
        assert snapshot(sample.out) == {}
        sample.overlay("apply", "--out", sample.out / "inside").succeeds()


@needs_root
def test_a_mount_point_inside_out(sample: Sample) -> None:
    with mounted(sample.out / "mount", "-t", "tmpfs", "tmpfs") as mount:
        sample.apply().fails(f"{mount} is a mount point", "--out")
        assert shape(snapshot(sample.out)) == {"mount"}
        assert siblings(sample) == {"out/dist"}
    sample.apply().succeeds()


@needs_root
@pytest.mark.parametrize("what", [".", "größe und mehr", "secret", ".."])
def test_something_is_immutable(sample: Sample, what: str) -> None:
    sample.apply("demo==1.0").succeeds()
    kept = foreign(sample.out)
    before = states(sample)
    place = Path(os.path.normpath(sample.out / what))
    done = subprocess.run(["chattr", "+i", str(place)], capture_output=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        pytest.skip(f"chattr: {done.stderr.strip()}")
    try:
        sample.apply().fails(place.name)
        assert states(sample) == before
        assert untouched(sample.out) == kept
    finally:
        subprocess.run(["chattr", "-i", str(place)], check=True)
    sample.apply().succeeds()
    assert untouched(sample.out) == kept
    assert siblings(sample) == {"out/dist", "overlay/patched"}


@needs_root
def test_an_old_product_is_immutable(sample: Sample) -> None:
    """The folders are exchanged, and the old one stays beside the new one until it can be removed."""
    sample.apply("demo==1.0").succeeds()
    done = subprocess.run(
        ["chattr", "+i", str(sample.out / PRODUCTS[0])], capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode != 0:
        pytest.skip(f"chattr: {done.stderr.strip()}")
    try:
        for _ in range(2):
            assert f"{PRODUCTS[0]} cannot be removed" in sample.apply().succeeds().stderr
            assert {*PRODUCTS, overlay_wheel_in(sample.out)} <= shape(snapshot(sample.out))
    finally:
        for file in sample.out.parent.glob(f"*/{PRODUCTS[0]}"):
            subprocess.run(["chattr", "-i", str(file)], check=True)
    assert "cannot be removed" not in sample.apply().succeeds().stderr
    assert siblings(sample) == {"out/dist", "overlay/patched"}


@needs_root
@pytest.mark.parametrize("size", [40, 100, 200])
def test_a_full_disk_for_out(sample: Sample, size: int) -> None:
    with mounted(sample.out.parent, "-t", "tmpfs", "-o", f"size={size}k", "tmpfs"):
        (sample.out / "notes").mkdir(parents=True)
        before = states(sample)
        sample.apply().fails(
            str(sample.out), "no space left on the disk", "bytes are free there: free some and run this again"
        )
        assert states(sample) == before
        assert siblings(sample) <= {"out/dist"}
        subprocess.run(["mount", "-o", "remount,size=2m", str(sample.out.parent)], check=True)
        sample.apply().succeeds()
        assert siblings(sample) == {"out/dist", "overlay/patched"}


@needs_root
@pytest.mark.parametrize("size", [16, 40])
def test_a_full_disk_for_the_cache(sample: Sample, size: int) -> None:
    shutil.rmtree(sample.cache)
    with mounted(sample.cache, "-t", "tmpfs", "-o", f"size={size}k", "tmpfs"):
        sample.apply().fails(
            f"{sample.cache}/modeling-overlay/", "no space left on the disk", "free some and run this again"
        )
        assert states(sample) == (None, None)
        subprocess.run(["mount", "-o", "remount,size=2m", str(sample.cache)], check=True)
        sample.apply().succeeds()


@needs_root
def test_a_full_disk_for_temporary_files(sample: Sample) -> None:
    with mounted(sample.folder / "tmp", "-t", "tmpfs", "-o", "size=4k", "tmpfs") as temporary:
        sample.variables["TMPDIR"] = str(temporary)
        sample.apply().fails(f"{temporary}/", "no space left on the disk")
        assert list(temporary.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=2m", str(temporary)], check=True)
        sample.apply().succeeds()
        assert list(temporary.iterdir()) == []


def test_several_runs_at_once(sample: Sample) -> None:
    foreign(sample.out)
    kept = untouched(sample.out)
    other = sample.folder / "other" / "dist"
    shutil.rmtree(sample.cache)
    running = [sample.start("apply", *where) for where in ([], ["--out", str(other)], [], ["--out", str(other)])]
    for one in running:
        _, said = one.communicate(timeout=600)
        assert one.returncode == 0, said
    assert untouched(sample.out) == kept
    assert siblings(sample) == {"out/dist", "overlay/patched"}
    assert [path.name for path in other.parent.iterdir()] == ["dist"]
    for folder in (sample.out, other):
        assert {*PRODUCTS, overlay_wheel_in(folder)} <= shape(snapshot(folder))


def test_runs_of_users_who_share_no_cache(sample: Sample) -> None:
    """Two containers with one workspace have not the same locks, and still neither breaks what the other makes."""
    sample.apply("demo==1.0").succeeds()
    running = []
    for number in range(4):
        shutil.copytree(sample.cache, sample.folder / f"cache {number}")
        sample.variables["XDG_CACHE_HOME"] = str(sample.folder / f"cache {number}")
        running.append(sample.start("apply"))
    for one in running:
        _, said = one.communicate(timeout=600)
        assert one.returncode == 0, said
    after = states(sample)
    sample.apply().succeeds()
    assert states(sample) == after
    assert siblings(sample) == {"out/dist", "overlay/patched"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupt_while_a_server_stalls(sample: Sample, number: signal.Signals) -> None:
    sample.apply("demo==1.0").succeeds()
    before = states(sample)
    shutil.rmtree(sample.cache)
    content = sample.wheel().read_bytes()
    asked: list[str] = []

    def stall(handler: Handler) -> None:
        handler.answer(content[:1000], length=len(content))
        handler.wfile.flush()
        asked.append(handler.path)
        time.sleep(3600)  # in a thread that ends with this process

    with serving(sample.index) as server:
        sample.variables.update({"PIP_INDEX_URL": server.url, "PIP_TIMEOUT": "3600"})
        server.answers["/demo/demo-1.0-py3-none-any.whl"] = stall
        running = sample.start("apply")
        while not asked:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(number)
        _, said = running.communicate(timeout=600)
    assert running.returncode == 130, said
    assert said.splitlines()[-1].startswith("overlay: interrupted")
    assert "Traceback" not in said
    assert states(sample) == before
    assert siblings(sample) == {"out/dist", "overlay/patched"}
    assert [file for file in (sample.cache / "modeling-overlay" / "artefacts").rglob("*") if file.is_file()] == []
    del sample.variables["PIP_INDEX_URL"]
    sample.apply().succeeds()


class Interrupted(Killed):
    """As Killed, but interrupts, as Ctrl-C does."""

    def end(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_an_interrupt_before_every_second_step(sample: Sample) -> None:
    everything = ["apply", "--root", str(sample.root), "--out", str(sample.out)]
    sample.apply("demo==1.0").succeeds()
    before = states(sample)
    assert forked(sample, everything) == 0
    after = states(sample)
    step = -1
    ended = 130
    while ended:
        step += 2
        forked(sample, [*everything, "demo==1.0"])
        assert states(sample) == before
        ended = os.waitstatus_to_exitcode(forked(sample, everything, killed_at=step, how=Interrupted))
        assert ended in (0, 130), f"step {step}"
        found = states(sample)
        assert found[0] in (before[0], after[0])
        assert found[1] in (before[1], after[1])
    assert step > 20


def test_a_failure_inside_leaves_everything(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "ours").write_text("before")

    def fail() -> None:
        with output.replaced(target, lambda _: True) as staging:
            (staging / "ours").write_text("after")
            raise OverlayError("x")

    with pytest.raises(OverlayError, match="x"):
        fail()
    assert snapshot(tmp_path) == {"target": ("folder", b""), "target/ours": ("file", b"before")}


def test_a_staging_folder_in_use_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers with one workspace: their caches, and so their locks, are not the same."""
    target = tmp_path / "target"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    with output.replaced(target, lambda _: True) as staging:
        (staging / "ours").write_text("one")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        with output.replaced(target, lambda _: True) as another:
            (another / "ours").write_text("other")
        assert (staging / "ours").read_text() == "one"
    assert snapshot(target) == {"ours": ("file", b"one")}


def test_what_others_put_there_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with output.replaced(target, lambda path: path == "ours") as staging:
        (staging / "ours").write_text("after")
        (target / "new").write_text("new")
    assert snapshot(tmp_path) == {
        "target": ("folder", b""),
        "target/ours": ("file", b"after"),
        "target/new": ("file", b"new"),
    }


def test_a_file_system_that_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()

    class Library:
        def renameat2(self, *_arguments: object) -> int:
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_a, **_k: Library())
    monkeypatch.setattr("ctypes.get_errno", lambda: 22)
    with (
        pytest.raises(OverlayError, match="exchange two folders at once, found one that cannot"),
        output.replaced(target, lambda _: True),
    ):
        pass
    assert snapshot(tmp_path) == {"target": ("folder", b"")}
