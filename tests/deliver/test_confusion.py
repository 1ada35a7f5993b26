"""Which of two indexes a package comes from (dependency confusion), and what makes it certain.

On one index are the patched wheels; the other is the default one, where anybody may put a file. The blocks that
docs/publishing.md has for requirements, constraints, uv and containers are taken from there and run, on the sample.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from overlay.queue import lock
from tests.queue.server import serving
from tests.sample import Sample, archive, copy, digest, lay, members, record, upstream
from tests.variants import ROOT

PAGE = (ROOT / "docs" / "publishing.md").read_text("utf-8")
PINNED, OLDER, OTHER = "1.0+overlay.2", "1.0+overlay.1", "1.0+overlay.9"

SAMPLE = {
    r"5\.14\.1\+overlay\.\d+": PINNED,
    r"5\.14\.1": "1.0",
    r">=5\.2\b": ">=1.0",
    r"\btransformers\b": "demo",
    r"\bpeft\b": "reader",
}
"""What stands in the place of what the page names."""


def blocks(language: str, about: str) -> str:
    """The block of the page with `about` in it, for the sample."""
    listed: list[str] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = (block for block in listed if about in block)
    for pattern, replacement in SAMPLE.items():
        found = re.sub(pattern, replacement, found)
    return found


def wheel(project: str, version: str, requires: str = "") -> dict[str, bytes]:
    """The wheel of somebody else, as an index has it."""
    files = members(project, version)
    if requires:
        folder = f"{project}-{version}.dist-info"
        metadata = files[f"{folder}/METADATA"].replace(b"\n\n", f"\nRequires-Dist: {requires}\n\n".encode(), 1)
        files = upstream(project, version) | {
            f"{folder}/METADATA": metadata,
            f"{folder}/WHEEL": files[f"{folder}/WHEEL"],
        }
        files[f"{folder}/RECORD"] = record(files, folder)
    return {f"{project}/{project}-{version}-py3-none-any.whl": archive(files)}


@dataclass(frozen=True)
class Setting:
    """The sample, with two revisions published, and the address of a server of the patched index and of the others."""

    sample: Sample
    server: str
    dist: Path

    @property
    def patched(self) -> str:
        return f"{self.server}/patched/simple/"

    def environment(self, public: str) -> dict[str, str]:
        """Of a user whose default index is `public`."""
        return self.sample.environment() | {
            "PIP_INDEX_URL": f"{self.server}/{public}/",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_COMPILE": "1",
            "UV_DEFAULT_INDEX": f"{self.server}/{public}/",
            "UV_CACHE_DIR": str(self.sample.folder / "uv"),
            "UV_PYTHON_DOWNLOADS": "never",
        }


PUBLIC = {
    "stock": {},
    "higher": wheel("demo", "2.0"),
    "same": wheel("demo", PINNED),
    "label": wheel("demo", OTHER),
}
"""What the other index has beside stock 1.0 and `reader`, which requires demo."""


@pytest.fixture(scope="module")
def setting(template: Sample, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    sample = copy(template, tmp_path_factory.mktemp("confusion") / "sample")
    web, dist = sample.folder / "web", sample.folder / "work" / "dist"
    for revision in (1, 2):
        at = ("packages", "demo", "releases", 0)
        lock.write(sample.lock, {(*at, "revision"): revision, (*at, "built"): None})
        sample.overlay("lock", "update", "demo==1.0").succeeds()
        sample.apply("demo==1.0", "--out", dist).succeeds()
        sample.overlay("publish", "--from", dist, "--to", web / "patched").succeeds()
    for name, more in PUBLIC.items():
        others = wheel("demo", "1.0") | wheel("reader", "1.0", "demo>=1.0") | more
        lay(web / name, others)
        for project in ("demo", "reader"):
            links = [f'<a href="{file.name}">{file.name}</a><br>' for file in sorted((web / name / project).glob("*"))]
            (web / name / project / "index.html").write_text("".join(links))
    with serving(web) as server:
        yield Setting(sample, server.url, dist)


class Place:
    """A virtual environment of a user's, in a folder with `dist/`; `before` is installed in it."""

    def __init__(self, setting: Setting, folder: Path, public: str, before: Path | None = None) -> None:
        self.setting, self.folder, self.variables = setting, folder, setting.environment(public)
        folder.mkdir(parents=True)
        (folder / "dist").symlink_to(setting.dist)
        self.uv("venv", "--python", sys.executable, str(folder / ".venv"))
        self.variables |= {"VIRTUAL_ENV": str(folder / ".venv")}
        if before is not None:
            self.uv("pip", "install", "--no-deps", str(before))

    def uv(self, *arguments: str) -> None:
        self.run("uv", *arguments)

    def run(self, *words: str) -> None:
        """Raises AssertionError where it fails."""
        python = Path(sys.executable)
        program = [str(python.with_name("uv")), *words[1:]]  # by `python -m uv` it would mean that Python
        if words[0] == "pip":
            inside = self.folder / ".venv" / "bin" / "python"
            program = [str(python), "-P", "-m", "pip", "--python", str(inside), *words[1:]]
        done = subprocess.run(program, cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def shell(self, commands: str) -> None:
        """Runs the lines of a block, those of pip and uv as above."""
        for line in commands.replace("\\\n", " ").splitlines():
            line = line.replace("https://packages.example/simple/", self.setting.patched)
            if line.startswith(("pip ", "uv ")):
                self.run(*shlex.split(line, comments=True))
            elif line:
                subprocess.run(["bash", "-c", line], cwd=self.folder, env=self.variables, check=True)

    def found(self) -> str:
        """What is installed: `patched` is the pinned revision, by its content."""
        (metadata,) = self.folder.glob(".venv/lib/python*/site-packages/demo-*.dist-info")
        version = metadata.name.removeprefix("demo-").removesuffix(".dist-info")
        right = b"value - 30" in (metadata.parent / "demo" / "core.py").read_bytes()
        if version == PINNED:
            return "patched" if right else "the other file"
        assert right == (version == OLDER)
        return NAMES[version]


NAMES = {"1.0": "stock", "2.0": "5.24.0", OTHER: "the other file", OLDER: "the older revision"}
"""Versions of the sample, as the page calls what they stand for."""


def with_pip(*words: str) -> Callable[[Place], None]:
    return lambda place: place.run("pip", "install", "--extra-index-url", place.setting.patched, *words)


def with_uv(*words: str) -> Callable[[Place], None]:
    return lambda place: place.run("uv", "pip", "install", "--index", place.setting.patched, *words)


def with_hash(place: Place) -> None:
    place.shell("\n".join(blocks("shell", "> pins.txt").splitlines()[:2]))


def with_project(place: Place) -> None:
    place.folder.joinpath("pyproject.toml").write_text(
        blocks("toml", "explicit").replace("https://packages.example/simple/", place.setting.patched)
    )
    place.shell(blocks("shell", "uv lock"))


WAYS: Mapping[str, Callable[[Place], None]] = {
    "pip, `transformers>=5.2`": with_pip("demo>=1.0"),
    "pip, `transformers==5.14.1`": with_pip("demo==1.0"),
    "pip, constraints": with_pip("-c", "dist/constraints.txt", "demo"),
    "pip, version and hash": with_hash,
    "uv pip, `transformers>=5.2`": with_uv("demo>=1.0"),
    "uv pip, constraints": with_uv("-c", "dist/constraints.txt", "demo"),
    "uv, explicit index": with_project,
}

CASES: Mapping[str, tuple[str, str | None]] = {
    "a higher version on the other index": ("higher", None),
    "the same version there": ("same", None),
    "a higher label there": ("label", None),
    "stock is installed": ("stock", "1.0"),
    "an older revision is installed": ("stock", OLDER),
}
"""What the other index has, and what is installed before."""

TABLE: Mapping[str, Sequence[str]] = {
    "a higher version on the other index": ["5.24.0", "patched", "patched", "patched", "patched", "patched", "patched"],
    "the same version there": ["patched"] * 7,
    "a higher label there": ["the other file"] * 2 + ["patched"] * 5,
    "stock is installed": ["stock", "stock", "patched", "patched", "stock", "patched", "patched"],
    "an older revision is installed": ["the older revision"] * 2
    + ["patched"] * 2
    + ["the older revision"]
    + ["patched"] * 2,
}


@pytest.fixture(scope="module")
def measured(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[str]]:
    folder = tmp_path_factory.mktemp("cells")
    wheels = {
        "1.0": setting.sample.wheel(),
        OLDER: setting.sample.folder / "web" / "patched" / f"demo-{OLDER}-py3-none-any.whl",
    }

    def cell(case: str, way: str) -> str:
        public, before = CASES[case]
        place = Place(
            setting,
            folder / str(list(CASES).index(case)) / str(list(WAYS).index(way)),
            public,
            wheels.get(before or ""),
        )
        WAYS[way](place)
        return place.found()

    with ThreadPoolExecutor(2) as pool:
        cells = {(case, way): pool.submit(cell, case, way) for case in CASES for way in WAYS}
        return {case: [cells[case, way].result() for way in WAYS] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_what_is_installed(measured: Mapping[str, Sequence[str]], case: str) -> None:
    assert measured[case] == TABLE[case]


def test_the_page_says_so() -> None:
    rows = [["", *WAYS], ["---"] * (len(WAYS) + 1)]
    rows += [[case, *(cell if cell == "patched" else f"**{cell}**" for cell in TABLE[case])] for case in CASES]
    assert "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("|  |", "| |") in PAGE


def test_the_page_names_the_revision_of_the_lock() -> None:
    release = lock.read(ROOT / "upstream.lock").find("transformers==5.14.1")[2]
    assert set(re.findall(r"5\.14\.1\+overlay\.\d+(?!\d)(?=\s|`|\")", PAGE)) == {release.local_version}


def test_with_pip_no_order_of_the_indexes_helps(setting: Setting, tmp_path: Path) -> None:
    """The other way round than in the table. Of two files of one version, the last index's is taken."""
    for public, words, taken in (
        ("higher", "demo>=1.0", "5.24.0"),
        ("label", "demo==1.0", "the other file"),
        ("same", f"demo=={PINNED}", "the other file"),
    ):
        place = Place(setting, tmp_path / public, public)
        place.run(
            "pip", "install", "--index-url", setting.patched, "--extra-index-url", f"{setting.server}/{public}/", words
        )
        assert place.found() == taken


def test_an_upgrade_leaves_what_is_patched(setting: Setting, tmp_path: Path) -> None:
    """Unless a constraint holds it."""
    patched = setting.dist / f"demo-{PINNED}-py3-none-any.whl"
    for more, left in (((), "5.24.0"), (("-c", "dist/constraints.txt"), "patched")):
        place = Place(setting, tmp_path / left, "higher", patched)
        with_pip("--upgrade", *more, "reader", "demo")(place)
        assert place.found() == left


def test_what_needs_it_comes_after_it(setting: Setting, tmp_path: Path) -> None:
    """The whole block: the patched wheel by its hash, then everything else by the constraints."""
    place = Place(setting, tmp_path / "place", "higher")
    place.shell(blocks("shell", "> pins.txt"))
    assert place.found() == "patched"
    assert list(place.folder.glob(".venv/lib/python*/site-packages/reader-1.0.dist-info"))


def test_uv_takes_another_index_where_the_first_has_nothing(setting: Setting, tmp_path: Path) -> None:
    """And with a strategy that is pip's."""
    empty = Place(setting, tmp_path / "empty", "higher")
    empty.uv("pip", "install", "--index", f"{setting.server}/nothing/", "demo>=1.0")
    assert empty.found() == "5.24.0"
    best = Place(setting, tmp_path / "best", "higher")
    with_uv("--index-strategy", "unsafe-best-match", "demo>=1.0")(best)
    assert best.found() == "5.24.0"


def test_an_explicit_index_is_the_only_one(setting: Setting, tmp_path: Path) -> None:
    place = Place(setting, tmp_path / "place", "same")
    text = blocks("toml", "explicit").replace("https://packages.example/simple/", f"{setting.server}/nothing/")
    (place.folder / "pyproject.toml").write_text(text)
    with pytest.raises(AssertionError, match="demo"):
        place.uv("lock")


def test_a_locked_file_that_is_exchanged_is_refused(setting: Setting, tmp_path: Path) -> None:
    """By pip with the hash, and by uv with its lock."""
    web = tmp_path / "web"
    shutil.copytree(setting.sample.folder / "web", web)
    with serving(web) as server:
        own = Setting(setting.sample, server.url, setting.dist)
        place = Place(own, tmp_path / "place", "stock")
        place.variables["UV_CACHE_DIR"] = str(tmp_path / "cache")
        with_project(place)
        with_hash(place)
        lay(web / "patched", {Path(name).name: content for name, content in PUBLIC["same"].items()})
        page = web / "patched" / "simple" / "demo" / "index.html"
        pinned = digest((setting.dist / f"demo-{PINNED}-py3-none-any.whl").read_bytes())
        assert pinned in page.read_text("utf-8")
        page.write_text(page.read_text("utf-8").replace(pinned, digest(*PUBLIC["same"].values())))
        shutil.rmtree(tmp_path / "cache")
        place.uv("pip", "uninstall", "demo")
        for again in (with_hash, lambda place: place.uv("sync", "--locked", "--reinstall")):
            with pytest.raises(AssertionError, match=r"(?i)hash"):
                again(place)


def test_a_requirements_file_with_all_hashes(setting: Setting, tmp_path: Path) -> None:
    place = Place(setting, tmp_path / "place", "same")
    (place.folder / "requirements.in").write_text("demo>=1.0\nreader\n")
    place.shell(blocks("shell", "> pins.txt").splitlines()[0])
    place.shell(blocks("shell", "uv pip compile"))
    assert place.found() == "patched"
    other = digest(*PUBLIC["same"].values())
    requirements = place.folder / "requirements.txt"
    assert other not in requirements.read_text("utf-8")


def test_containers(setting: Setting, tmp_path: Path) -> None:
    """The lines of the Dockerfile, in a virtual environment that has stock."""
    place = Place(setting, tmp_path / "place", "higher", setting.sample.wheel())
    place.shell(blocks("shell", "> pins.txt").splitlines()[0])
    inside = tmp_path / "opt"
    ran = 0
    for line in blocks("dockerfile", "FROM").splitlines():
        line = line.replace("/opt/overlay", str(inside)).replace(" /dist", f" {setting.dist}")
        word, _, rest = line.partition(" ")
        if word == "COPY":
            inside.mkdir()
            *sources, target = rest.split()
            for source in sources:
                shutil.copy(place.folder / source, target)
        elif word == "ENV":
            place.variables |= dict(pair.split("=", 1) for pair in rest.split())
        elif word == "RUN":
            place.shell(re.sub(r"^--mount=\S+ ", "", rest))
            ran += 1
            assert place.found() == "patched"
        else:
            assert word == "FROM"
    assert ran == 2
    place.run("pip", "install", "--upgrade", "demo")
    place.uv("pip", "install", "--upgrade", "demo")
    assert place.found() == "patched"
