"""Drift: which series fits each release on an index, from the touched files alone, and none of them delivered."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version

from overlay.errors import OverlayError
from overlay.queue import drift, lock
from overlay.queue.source import Offer
from tests.queue.server import Handler, Server, serving
from tests.sample import PROJECT, Sample, archive, digest, members, module

DAYS = {"1.0": "2026-01-26", "1.1": "2026-03-04", "1.2": "2026-02-16", "2.0": "2026-06-01", "2.0.1": "2026-06-03"}
MISFIT = "0001-Subtract-in-the-core.patch does not fit src/demo/core.py: hunk @@ -122,7 +122,7 @@"

TABLE = f"""\
demo   released    core.py     pinned      series
1.0    2026-01-26  573ad40373  deliver r1  demo-1.0-1.1
1.1    2026-03-04  42ece99d7c  test        demo-1.0-1.1
1.2    2026-02-16  ff16d904ef  no          none: {MISFIT}
1.5                8fb61fd519  no          none (demo-1.0-1.1 applies)
1.6                none        no          none: there is no demo/core.py
2.0    2026-06-01  8bb8aaa8fa  deliver r1  demo-2.0
2.0.1  2026-06-03  8bb8aaa8fa  no          demo-2.0
2.1                9d9dd35709  no          fixed upstream in 2.1
left out: 1.4 (yanked); 2.2rc1 (pre-releases)

plain  released  core.py     pinned      series
3.0              573ad40373  deliver r1  plain-3.0
"""

MARKDOWN = f"""\
| demo | released | `core.py` | series | pinned |
|---|---|---|---|---|
| 1.0 | 2026-01-26 | `573ad40373` | demo-1.0-1.1 | deliver r1 |
| 1.1 | 2026-03-04 | `42ece99d7c` | demo-1.0-1.1 | test |
| 1.2 | 2026-02-16 | `ff16d904ef` | none: {MISFIT} | no |
| 1.5 |  | `8fb61fd519` | none (demo-1.0-1.1 applies) | no |
| 1.6 |  | `none` | none: there is no demo/core.py | no |
| 2.0 to 2.0.1 | 2026-06-01 to 2026-06-03 | `8bb8aaa8fa` | demo-2.0 | 2.0 deliver r1 |
| 2.1 |  | `9d9dd35709` | fixed upstream in 2.1 | no |

| plain | released | `core.py` | series | pinned |
|---|---|---|---|---|
| 3.0 |  | `573ad40373` | plain-3.0 | deliver r1 |
"""


def release(sample: Sample, project: str, version: str, changes: Mapping[str, bytes | None] | None = None) -> None:
    """Puts another release on the index; None takes a file out of it."""
    files: dict[str, bytes | None] = {**members(project, version), **(changes or {})}
    content = archive({path: content for path, content in files.items() if content is not None})
    (sample.index / project / f"{project}-{version}-py3-none-any.whl").write_bytes(content)
    sample.list_page(project)


def page(sample: Sample) -> Callable[[Handler], None]:
    """The page of demo as JSON (PEP 691 and 700), with the days of upload and with 1.4 yanked (PEP 592)."""
    files = []
    for file in sorted((sample.index / "demo").glob("*.whl")):
        version = file.name.split("-")[1]
        entry: dict[str, object] = {
            "filename": file.name,
            "url": file.name,
            "yanked": "by mistake" if version == "1.4" else False,
        }
        entry["hashes"] = {"sha256": digest(file.read_bytes())}
        if version in DAYS:
            entry["upload-time"] = f"{DAYS[version]}T23:59:59.123456Z"
        files.append(entry)
    content = json.dumps({"meta": {"api-version": "1.1"}, "name": "demo", "files": files}).encode()
    return lambda handler: handler.answer(content, kind="application/vnd.pypi.simple.v1+json")


@pytest.fixture
def drifted(sample: Sample) -> Sample:
    """The sample with nothing in the cache, and with releases that fit, that do not, and that are left out."""
    shutil.rmtree(sample.cache)
    turned = module("core").replace(b"return value + 30", b"return 30 + value")
    release(sample, "demo", "1.2", {"demo/core.py": turned})
    release(sample, "demo", "1.4")
    release(sample, "demo", "1.5", {"demo/core.py": module("core", 61)})
    release(sample, "demo", "1.6", {"demo/core.py": None})
    release(sample, "demo", "2.0.1")
    release(sample, "demo", "2.1", {"demo/core.py": module("kernel").replace(b"value + 30", b"value - 30")})
    release(sample, "demo", "2.2rc1")
    release(sample, "demo", "1.0+overlay.1")
    shutil.copy(sample.wheel("demo-1.0"), sample.index / "demo" / "demo-2.0-cp311-cp311-linux_x86_64.whl")
    sample.list_page("demo")
    sample.rewrite(1, "Applied-Upstream: no", "Applied-Upstream: 2.1", series="demo-2.0")
    return sample


@pytest.fixture
def server(drifted: Sample) -> Iterator[Server]:
    """A server of that index, which answers with parts of files, and which the sample uses."""
    with serving(drifted.index) as server:
        drifted.variables["PIP_INDEX_URL"] = server.url
        server.ranges = True
        server.answers["/demo/"] = page(drifted)
        yield server


def kept(sample: Sample, folder: str) -> list[str]:
    """The files in a folder of the cache."""
    return sorted(file.name for file in (sample.cache / "modeling-overlay" / folder).rglob("*") if file.is_file())


def test_the_table(drifted: Sample, server: Server) -> None:
    done = drifted.overlay("drift").succeeds()
    assert done.stdout == TABLE
    assert done.stderr.splitlines() == [
        "overlay: looking for the releases of demo on the package index",
        "overlay: demo: looking at files that no lock names; nothing of them is delivered",
        "overlay: demo: 8 releases",
        "overlay: looking for the releases of plain on the package index",
        "overlay: plain: looking at files that no lock names; nothing of them is delivered",
        "overlay: plain: 1 releases",
    ]


def test_the_table_for_the_readme(drifted: Sample, server: Server) -> None:
    assert drifted.overlay("drift", "--markdown").succeeds().stdout == MARKDOWN


def test_everything_for_a_program(drifted: Sample, server: Server) -> None:
    found = json.loads(drifted.overlay("drift", "--json").succeeds().stdout)
    assert list(found) == ["demo", "plain"]
    assert (found["demo"]["yanked"], found["demo"]["pre-releases"]) == (["1.4"], ["2.2rc1"])
    releases = {one["version"]: one for one in found["demo"]["releases"]}
    assert list(releases) == ["1.0", "1.1", "1.2", "1.5", "1.6", "2.0", "2.0.1", "2.1"]
    kernel = (
        "0001-Subtract-in-the-core.patch does not fit src/demo/core.py: hunk @@ -122,7 +122,7 @@ def kernel_29(value):"
    )
    assert releases["1.0"] == {
        "version": "1.0",
        "uploaded": "2026-01-26T23:59:59.123456+00:00",
        "wheel": {"file": "demo-1.0-py3-none-any.whl", "sha256": digest(drifted.wheel().read_bytes())},
        "blobs": {
            "demo/core.py": "573ad40373dcc9ef5d6baadf8bb9cd54853a0c0d",
            "demo/layers/block.py": "14e10432c3325f1fce79dcd6617e194ac5b46ee5",
        },
        "fits": ["demo-1.0-1.1"],
        "reasons": {"demo-2.0": kernel},
        "fixed-upstream": None,
        "known-fixed": False,
        "pinned": {"use": "deliver", "revision": 1},
    }
    assert releases["1.5"]["fits"] == ["demo-1.0-1.1"]
    assert releases["1.5"]["uploaded"] is None
    assert releases["1.6"]["blobs"]["demo/core.py"] is None
    assert releases["2.1"]["fits"] == []
    assert releases["2.1"]["fixed-upstream"] == "2.1"
    assert releases["2.1"]["pinned"] is None


@pytest.mark.parametrize("name", ["plain", "Plain"])
def test_one_project(drifted: Sample, server: Server, name: str) -> None:
    assert drifted.overlay("drift", name).succeeds().stdout == TABLE.partition("\n\n")[2]
    assert server.requests[0] == "/plain/"


def test_a_project_that_is_not_pinned(drifted: Sample, server: Server) -> None:
    drifted.overlay("drift", "torch").fails("expected one of demo, plain, found 'torch'", "pin it in upstream.lock")
    assert server.requests == []


def test_two_forms_at_once(drifted: Sample) -> None:
    done = drifted.overlay("drift", "--json", "--markdown")
    assert done.code == 2
    assert done.stderr.startswith("usage: overlay drift ")


def test_nothing_is_delivered(drifted: Sample, server: Server) -> None:
    drifted.overlay("drift").succeeds()
    assert len(kept(drifted, "members")) == 9
    assert kept(drifted, "artefacts") == []
    assert not drifted.out.exists()
    assert not drifted.patched.exists()
    drifted.apply("plain==3.0").succeeds()
    assert kept(drifted, "artefacts") == ["plain-3.0-py3-none-any.whl"]


@pytest.mark.parametrize("ranges", [True, False])
def test_what_is_in_the_cache_is_not_fetched(drifted: Sample, server: Server, ranges: bool) -> None:
    server.ranges = ranges
    assert drifted.overlay("drift").succeeds().stdout == TABLE
    server.requests.clear()
    assert drifted.overlay("drift").succeeds().stdout == TABLE
    assert server.requests == ["/demo/", "/plain/"]


def test_a_local_index(drifted: Sample) -> None:
    """Pages as HTML, which know nothing of days; nothing is yanked there."""
    found = drifted.overlay("drift", "--markdown").succeeds().stdout
    assert "| 2.0 to 2.0.1 |  | `8bb8aaa8fa` | demo-2.0 | 2.0 deliver r1 |" in found.splitlines()
    assert "| 1.4 |  | `573ad40373` | none (demo-1.0-1.1 applies) | no |" in found.splitlines()


def test_a_hash_that_is_a_path(drifted: Sample, server: Server) -> None:
    name = "plain-3.0-py3-none-any.whl"
    entry = {"filename": name, "url": name, "hashes": {"sha256": "../../../evil"}}
    content = json.dumps({"meta": {"api-version": "1.0"}, "name": "plain", "files": [entry]}).encode()
    server.answers["/plain/"] = lambda handler: handler.answer(content, kind="application/vnd.pypi.simple.v1+json")
    assert drifted.overlay("drift", "plain").succeeds().stdout == TABLE.partition("\n\n")[2]
    assert list(drifted.folder.rglob("*evil*")) == []


def test_an_index_without_the_project(drifted: Sample, server: Server) -> None:
    shutil.rmtree(drifted.index / "plain")
    drifted.overlay("drift", "plain").fails(f"expected wheels of plain on {server.url}, found none", "404")


def test_a_library_that_is_not_installed(drifted: Sample, server: Server, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['zipwire'] = None\n")
    drifted.variables["PYTHONPATH"] = f"{PROJECT}:{tmp_path}"
    drifted.overlay("drift", own=True).fails("expected the library zipwire, found none", "pip install '.[queue]'")


def offer(version: str) -> Offer:
    return Offer(Version(version), f"transformers-{version}-py3-none-any.whl", "", None, None, False)


def test_the_first_release_that_is_looked_at() -> None:
    package = lock.read(PROJECT / "upstream.lock").packages["transformers"]

    def nothing(offer: Offer, paths: object) -> dict[str, bytes | None]:
        return {}

    offered = [offer(version) for version in ("5.10.0", "4.57.6", "5.0.0rc3", "5.0.0", "5.9.0", "5.11.0rc0")]
    found = drift.survey("transformers", package, [], offered, nothing)
    assert [one.version for one in found.standings] == ["5.0.0", "5.9.0", "5.10.0"]
    assert [one.outcome for one in found.standings] == ["none", "none", "none"]
    assert found.pre_releases == ("5.11.0rc0",)
    with pytest.raises(OverlayError, match=r"expected releases of transformers from 5.0 on, found none"):
        drift.survey("transformers", package, [], [offer("4.57.6")], nothing)


@dataclass(frozen=True)
class Row:
    """A row of README.md's tables: the first and the last release of it, and its cells."""

    project: str
    file: str
    first: Version
    last: Version
    blob: str
    outcome: str
    pinned: str


def rows() -> list[Row]:
    text = (PROJECT / "README.md").read_text("utf-8").partition(drift.START)[2].partition(drift.END)[0]
    found: list[Row] = []
    for table in text.strip().split("\n\n"):
        cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        for versions, _, blob, outcome, pinned in cells[2:]:
            first, _, last = versions.partition(" to ")
            project, file = cells[0][0], cells[0][2]
            found.append(Row(project, file, Version(first), Version(last or first), blob, outcome, pinned))
    return found


def test_the_readme_says_of_each_pinned_release_what_the_lock_says() -> None:
    """Without an index: what stands there of other releases is as it was when somebody ran the command."""
    again = f"put between {drift.START} and {drift.END}: .venv/bin/overlay drift --markdown"
    pins = lock.read(PROJECT / "upstream.lock")
    said: dict[tuple[str, str], str] = {}
    for row in rows():
        for cell in [] if row.pinned == "no" else row.pinned.split(", "):
            version, use = (str(row.first), cell) if row.first == row.last else cell.split(" ", 1)
            said[row.project, version] = use
    expected = {}
    fixed = set()
    for project, package in pins.packages.items():
        for one in package.fixed:
            (row,) = (row for row in rows() if row.project == project and row.first == Version(one.version))
            assert row.blob == one.files[0].blob[: drift.ABBREVIATED], again
            fixed.add((project, one.version))
        for release in package.releases:
            use = release.use if release.revision is None else f"{release.use} r{release.revision}"
            expected[project, release.version] = use
            matching = [
                row for row in rows() if row.project == project and row.first <= Version(release.version) <= row.last
            ]
            assert len(matching) == 1, f"{project} {release.version}: {again}"
            if release.series is not None:
                blobs = {Path(file.path).name: file.before for file in release.files}
                assert (matching[0].outcome, matching[0].blob) == (
                    release.series,
                    blobs[matching[0].file][: drift.ABBREVIATED],
                ), again
    assert fixed <= {release for release, use in said.items() if use.endswith("fixed")}, again
    pinned = {release: use.removesuffix(" and fixed") for release, use in said.items() if use != "fixed"}
    assert pinned == expected, again
