"""A small upstream of the tests' own, with everything around it: git checkout, wheels, package index, lock and patches.

Project `demo` has a prefix in git and a version file, as transformers has; `plain` has neither, as TransformerEngine.
The whole of it is made once (`make`) and copied for each test (`Sample`), which may then break what it likes.
"""

import base64
import csv
import hashlib
import importlib
import io
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from overlay import cli
from overlay.deliver import overlay_wheel
from tests import signals

PROJECT = Path(__file__).resolve().parents[1]
WHEELS = ("demo-1.0", "demo-1.1", "demo-2.0", "plain-3.0")
PRODUCTS = (
    "demo-1.0+overlay.1-py3-none-any.whl",
    "demo-2.0+overlay.1-py3-none-any.whl",
    "plain-3.0+overlay.1-py3-none-any.whl",
)

VERBS = (
    "apply",
    "publish",
    "verify-wheel",
    "explain",
    "edit",
    "refresh",
    "add-release",
    "retire",
    "pr",
    "drift",
    "lock",
    "check",
    "update",
    "complete",
)
"""Words of a command line that its options come after."""

_LOCK = """\
# The pins of a small upstream.

version = 1

[packages.demo]
repository = "https://git.example/demo"
prefix = "src/"                     # as transformers has it
version-file = "demo/__init__.py"

[packages.demo.commit]
id = "{commit}"                    # the commit of the report
verified = false

[[packages.demo.releases]]
version = "1.0"
use = "deliver"
series = "demo-1.0-1.1"
revision = 1
wheel = {demo-1.0}

# Only for the tests.
[[packages.demo.releases]]
version = "1.1"
use = "test"
series = "demo-1.0-1.1"
wheel = {demo-1.1}

[[packages.demo.releases]]
version = "2.0"
use = "deliver"
series = "demo-2.0"
revision = 1
wheel = {demo-2.0}

[packages.plain]
repository = "https://git.example/plain"

[[packages.plain.releases]]
version = "3.0"
use = "deliver"
series = "plain-3.0"
revision = 1
wheel = {plain-3.0}
"""

_SOURCES = {
    "LICENSE": b"Do what you like.\n",
    "NOTICE": b"Of the sample.\n",
    "README.md": b"# The sample\n",
    "overlay/__init__.py": b'"""In the place of the import package."""\n\n__version__ = "1.0"\n',
}
"""What the overlay wheel is built from, beside the files of this project that say how."""

_TRAILERS = """\
Bug: https://bugs.example/1
Origin: this project
Applied-Upstream: {applied}
Delivery: {delivery}
Last-Update: 2026-11-28"""


def overlay_wheel_in(folder: Path) -> str:
    """The name of the overlay wheel in `folder`: its version has a label of its content."""
    (file,) = folder.glob("modeling_overlay-1.0+g*-py3-none-any.whl")
    return file.name


def digest(content: bytes) -> str:
    """The sha256 of `content`, as the lock writes it."""
    return hashlib.sha256(content).hexdigest()


def module(name: str, lines: int = 60) -> bytes:
    """A Python module of functions, with enough text around each for a hunk to find its place."""
    rows = [f'"""The module {name}."""', ""]
    for number in range(lines):
        rows += ["", f"def {name}_{number}(value):", f"    return value + {number}", ""]
    return "\n".join(rows).encode() + b"\n"


def upstream(project: str, version: str) -> dict[str, bytes]:
    """The files of a release, by their path in its wheel, without the metadata."""
    noise = b"".join(hashlib.sha256(f"{version} {number}".encode()).digest() for number in range(2000))
    files = {
        f"{project}/__init__.py": f'"""The package {project}."""\n\n__version__ = "{version}"\n'.encode(),
        f"{project}/core.py": module("core"),
        f"{project}/layers/__init__.py": b"",
        f"{project}/layers/block.py": module("block", 20),
        f"{project}/table.bin": noise,
        f"{project}/größe.txt": "größe\n".encode(),
    }
    if version.startswith("2."):
        files[f"{project}/core.py"] = module("kernel")
    if version == "1.1":
        files[f"{project}/core.py"] += b"\nNEW = True\n"
    return files


def metadata(project: str, version: str) -> dict[str, bytes]:
    """The members of a wheel's metadata folder, without RECORD."""
    folder = f"{project}-{version}.dist-info"
    described = (
        f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\nSummary: A sample\n"
        "Requires-Python: >=3.9\nLicense-File: LICENSE\n\nVersion: is also a word of the description\n"
    )
    return {
        f"{folder}/METADATA": described.encode(),
        f"{folder}/WHEEL": b"Wheel-Version: 1.0\nGenerator: sample\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{folder}/licenses/LICENSE": b"Do what you like.\n",
        f"{folder}/top_level.txt": f"{project}\n".encode(),
    }


def record(files: Mapping[str, bytes], folder: str) -> bytes:
    """RECORD over `files` and itself (PEP 376)."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for path, content in files.items():
        hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={hashed}", len(content)])
    rows.writerow([f"{folder}/RECORD", "", ""])
    return text.getvalue().encode()


def members(project: str, version: str) -> dict[str, bytes]:
    """All members of a release's wheel, RECORD last."""
    files = upstream(project, version) | metadata(project, version)
    folder = f"{project}-{version}.dist-info"
    return files | {f"{folder}/RECORD": record(files, folder)}


def archive(files: Mapping[str, bytes] | Sequence[tuple[str | zipfile.ZipInfo, bytes]]) -> bytes:
    """A deflated zip file of `files`; as pairs they may be doubled, or have attributes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in files.items() if isinstance(files, Mapping) else files:
            info = name if isinstance(name, zipfile.ZipInfo) else zipfile.ZipInfo(name, (2026, 7, 16, 12, 30, 58))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = info.external_attr or (stat.S_IFREG | 0o644) << 16
            target.writestr(info, data)
    return content.getvalue()


def git(*arguments: str, folder: Path, check: bool = True) -> str:
    """What git prints, run with an author and a date of its own and without the configuration of this machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "A U Thor", f"GIT_{who}_EMAIL": "author@mail.example"}
        environment[f"GIT_{who}_DATE"] = "2026-11-01T12:00:00Z"
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=check, capture_output=True, encoding="utf-8"
    )
    return done.stdout.strip()


def lay(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes `files` under `folder`."""
    for path, content in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def commit(checkout: Path, message: str, files: Mapping[str, bytes] = MappingProxyType({})) -> str:
    """Commits everything in the work tree of `checkout`, with `files` in it; returns the commit's id."""
    lay(checkout, files)
    git("add", "--all", "--force", folder=checkout)
    git("commit", "--quiet", "--allow-empty", "--message", message, folder=checkout)
    return git("rev-parse", "HEAD", folder=checkout)


def message(subject: str, delivery: str = "wheel, overlay, pull-request", applied: str = "no") -> str:
    """A commit message that a patch may have."""
    trailers = _TRAILERS.format(applied=applied, delivery=delivery)
    return f"{subject}\n\nThe sample is wrong there, and this mends it.\n\n{trailers}\n"


def _repository(folder: Path, project: str, version: str, prefix: str) -> str:
    folder.mkdir(parents=True)
    git("init", "--quiet", "--template=", "--initial-branch=main", folder=folder)
    lay(folder, {f"{prefix}{path}": content for path, content in upstream(project, version).items()})
    return commit(folder, f"Release {version}", {"tests/test_sample.py": b"def test_sample():\n    pass\n"})


def _series(checkout: Path, folder: Path, changes: Sequence[tuple[str, Mapping[str, bytes]]]) -> None:
    """Makes a series of real `git format-patch` files, one for each change, and puts the checkout back."""
    base = git("rev-parse", "HEAD", folder=checkout)
    for text, files in changes:
        commit(checkout, text, files)
    folder.mkdir(parents=True)
    listed = git("format-patch", "--quiet", "--zero-commit", "--output-directory", str(folder), base, folder=checkout)
    assert listed == ""
    git("reset", "--quiet", "--hard", base, folder=checkout)
    names = sorted(file.name for file in folder.glob("*.patch"))
    (folder / "series").write_text("# in this order\n" + "".join(f"{name}\n" for name in names))


def _changed(content: bytes, old: str, new: str) -> bytes:
    assert content.count(old.encode()) == 1
    return content.replace(old.encode(), new.encode())


def make(folder: Path) -> "Sample":
    """Makes the whole of it in `folder`; the lock is completed by `overlay lock update` itself."""
    sample = Sample(folder)
    ids = {}
    for name in WHEELS:
        project, _, version = name.partition("-")
        content = archive(members(project, version))
        lay(sample.index / project, {f"{name}-py3-none-any.whl": content})
        ids[name] = f'{{ file = "{name}-py3-none-any.whl", size = {len(content)}, sha256 = "{digest(content)}" }}'
    for project in ("demo", "plain"):
        sample.list_page(project)
    commits = {}
    for project, version, prefix in (("demo", "1.0", "src/"), ("demo", "2.0", "src/"), ("plain", "3.0", "")):
        checkout = sample.checkouts / f"{project}-{version}"
        commits[checkout.name] = _repository(checkout, project, version, prefix)
        files = upstream(project, version)
        first = "kernel" if version == "2.0" else "core"
        core = _changed(
            files[f"{project}/core.py"],
            f"def {first}_30(value):\n    return value + 30",
            f"def {first}_30(value):\n    return value - 30",
        )
        block = _changed(files[f"{project}/layers/block.py"], "return value + 7\n", "return value * 7\n")
        again = _changed(core, "return value + 50\n", "return value * 50\n")
        changes = [
            (message("Subtract in the core"), {f"{prefix}{project}/core.py": core}),
            (
                message("Multiply in the block and the core", "wheel, overlay"),
                {f"{prefix}{project}/layers/block.py": block, f"{prefix}{project}/core.py": again},
            ),
            (message("Test it", "pull-request"), {"tests/test_core.py": b"def test_core():\n    pass\n"}),
        ]
        name = "demo-1.0-1.1" if version == "1.0" else checkout.name
        _series(checkout, sample.root / "patches" / name, changes)
    text = _LOCK
    for name, pin in (ids | {"commit": commits["demo-1.0"][:9]}).items():
        text = text.replace(f"{{{name}}}", pin)
    sample.lock.write_text(text, encoding="utf-8")
    lay(sample.root, _SOURCES)
    for name in (
        "hatch_build.py",
        "pyproject.toml",
        ".gitignore",
        "overlay/modeling_overlay.pth",
        "overlay/startup.py",
    ):
        shutil.copyfile(PROJECT / name, sample.root / name)
    sample.overlay("lock", "update").succeeds()
    return sample


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    arguments: Sequence[str]
    code: int
    stdout: str
    stderr: str

    def succeeds(self) -> "Done":
        """Itself, if it exited 0."""
        assert self.code == 0, f"{self.arguments} exited {self.code}:\n{self.stdout}{self.stderr}"
        return self

    def fails(self, *parts: str, code: int = 1) -> str:
        """Its one line of error, which must hold `parts` in this order; lines of progress may come before it."""
        assert self.code == code, f"{self.arguments} exited {self.code}:\n{self.stdout}{self.stderr}"
        lines = self.stderr.splitlines()
        assert lines, f"{self.arguments} said nothing"
        assert all(line.startswith("overlay: ") for line in lines), self.stderr
        said = lines[-1]
        assert "this is a fault of modeling-overlay" not in said, said
        assert re.search(".*".join(map(re.escape, parts)), said), f"expected {parts} in: {said}"
        return said


@dataclass(frozen=True)
class Sample:
    """A copy of the whole. `variables` are added to the environment of its commands; None takes one away."""

    folder: Path
    variables: dict[str, str | None] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """What stands for a checkout of this project: upstream.lock, patches/, overlay/ and what a build reads."""
        return self.folder / "root"

    @property
    def lock(self) -> Path:
        return self.root / "upstream.lock"

    @property
    def index(self) -> Path:
        """A package index, as pages and files in one folder a project."""
        return self.folder / "index"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def checkouts(self) -> Path:
        """Git repositories of the upstream projects: `demo-1.0`, `demo-2.0`, `plain-3.0`."""
        return self.folder / "checkouts"

    @property
    def out(self) -> Path:
        return self.folder / "out" / "dist"

    @property
    def patched(self) -> Path:
        """The post-images for the overlay."""
        return self.root / "overlay" / "patched"

    def environment(self) -> dict[str, str]:
        """The environment of a command: this machine's, without what could change the result, and with own places."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "GIT_", "UV_", "XDG_")) and not name.lower().endswith("_proxy")
        }
        (self.folder / "home").mkdir(exist_ok=True)
        places: dict[str, str | None] = {
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": str(PROJECT),
            "XDG_CACHE_HOME": str(self.cache),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index.as_uri(),
        }
        merged = kept | places | self.variables
        return {name: value for name, value in merged.items() if value is not None}

    def command(self, *arguments: str | Path) -> list[str]:
        """The command line of `overlay` with the sample's root; `apply` gets its --out, if none is given."""
        words = [str(argument) for argument in arguments]
        place = next(
            (index for index, word in enumerate(words) if word not in VERBS),
            len(words),
        )
        options = [] if "--root" in words or words[:1] == ["explain"] else ["--root", str(self.root)]
        if words[:1] == ["apply"] and "--out" not in words:
            options += ["--out", str(self.out)]
        return [sys.executable, "-P", "-m", "overlay", *words[:place], *options, *words[place:]]

    def overlay(
        self, *arguments: str | Path, cwd: Path | None = None, prefix: Sequence[str] = (), own: bool = False
    ) -> Done:
        """Runs `overlay` and waits for it: in a fork of this process, which has everything imported, or, more slowly,
        as a command of its `own`; that goes too where a `prefix` comes before it (`unshare -n`).
        """
        command = [*prefix, *self.command(*arguments)]
        where = cwd or self.folder
        if not prefix and not own:
            return Done(command, *_forked(command[4:], where, self.environment()))
        done = subprocess.run(
            command, cwd=where, env=self.environment(), capture_output=True, encoding="utf-8", timeout=600, check=False
        )
        return Done(command, done.returncode, done.stdout, done.stderr)

    def apply(self, *arguments: str | Path) -> Done:
        """`overlay apply` into `out`."""
        return self.overlay("apply", *arguments)

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Starts `overlay` and does not wait."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            preexec_fn=signals.heard,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    def list_page(self, project: str, hashes: bool = True) -> None:
        """Writes the index page of `project` over the files that are there (PEP 503)."""
        links = [
            f'<a href="{file.name}{f"#sha256={digest(file.read_bytes())}" if hashes else ""}">{file.name}</a><br>'
            for file in sorted((self.index / project).glob("*.whl"))
        ]
        page = "<!DOCTYPE html>\n<html><head></head><body>\n" + "\n".join(links) + "\n</body></html>\n"
        (self.index / project / "index.html").write_text(page, encoding="utf-8")

    def wheel(self, name: str = "demo-1.0") -> Path:
        """The stock wheel on the index."""
        return self.index / name.partition("-")[0] / f"{name}-py3-none-any.whl"

    def cached(self, name: str = "demo-1.0") -> Path:
        """Where the cache keeps that wheel, as the lock pins it."""
        found = re.search(
            rf'"({re.escape(name)}-py3-none-any\.whl)", size = \d+, sha256 = "([0-9a-f]+)"', self.lock.read_text()
        )
        assert found is not None
        return self.cache / "modeling-overlay" / "artefacts" / found[2] / found[1]

    def edit(self, old: str, new: str, count: int = 1) -> None:
        """Exchanges `old`, which must be there `count` times, for `new` in the lock."""
        text = self.lock.read_text(encoding="utf-8")
        assert text.count(old) == count, f"{old!r} is in the lock {text.count(old)} times"
        self.lock.write_text(text.replace(old, new), encoding="utf-8")

    def offer(self, content: bytes, name: str = "demo-1.0") -> None:
        """Puts another wheel in place of a stock one, and pins it: its sha256 is right, whatever else is not."""
        file = self.wheel(name)
        old = file.read_bytes()
        file.write_bytes(content)
        self.list_page(name.partition("-")[0])
        self.edit(
            f'size = {len(old)}, sha256 = "{digest(old)}"', f'size = {len(content)}, sha256 = "{digest(content)}"'
        )

    def patch(self, number: int, series: str = "demo-1.0-1.1") -> Path:
        """A patch of a series, by its number."""
        return next((self.root / "patches" / series).glob(f"{number:04}-*.patch"))

    def rewrite(self, number: int, old: str, new: str, series: str = "demo-1.0-1.1") -> Path:
        """Exchanges `old`, which must be there once, for `new` in a patch."""
        file = self.patch(number, series)
        text = file.read_bytes().decode()
        assert text.count(old) == 1, f"{old!r} is in {file.name} {text.count(old)} times"
        file.write_bytes(text.replace(old, new).encode())
        return file


def _forked(arguments: Sequence[str], where: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line in a fork of this process."""
    for name in (
        "deliver.apply",
        "deliver.index",
        "deliver.publish",
        "deliver.relock",
        "deliver.sbom",
        "deliver.tree",
        "deliver.verify_wheel",
    ):
        importlib.import_module(f"overlay.{name}")
    importlib.import_module(overlay_wheel.LIBRARY)
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            _become(arguments, where, environment, (stdout.fileno(), stderr.fileno()))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = []
        for file in (stdout, stderr):
            file.seek(0)
            said.append(file.read().decode("utf-8", "surrogateescape"))
    return code, said[0], said[1]


def _become(
    arguments: Sequence[str], where: Path, environment: Mapping[str, str], outputs: tuple[int, int]
) -> NoReturn:
    code = 99
    try:
        signal.alarm(600)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
            os.dup2(descriptor, number)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(where)
        tempfile.tempdir = None
        cli.main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def copy(template: Sample, folder: Path) -> Sample:
    """A copy of `template` in `folder`, which a test may break."""
    shutil.copytree(template.folder, folder, symlinks=True, dirs_exist_ok=True)
    return Sample(folder)


Entry = tuple[str, bytes]


def snapshot(folder: Path) -> dict[str, Entry] | None:
    """Everything in `folder`, by path: its kind and its content. None where there is no such folder."""
    if not folder.is_dir():
        return None
    return dict(_entries(folder))


def _entries(folder: Path) -> Iterator[tuple[str, Entry]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield name, ("link", os.fsencode(path.readlink()))
        elif path.is_dir():
            yield name, ("folder", b"")
        else:
            yield name, ("file", path.read_bytes())
