"""Drift: which series fits each release on an index, from the touched files alone, and none of them delivered."""

import json
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from packaging.version import Version

from overlay.errors import OverlayError
from overlay.queue import drift, drift_picture, drift_tables, judges, lock, series
from overlay.queue.judges import Verdict
from overlay.queue.source import Offer
from tests.queue.server import Handler, Server, serving
from tests.sample import PROJECT, Sample, archive, commit, copy, digest, git, members, message, metadata, module

DAYS = {"1.0": "2026-01-26", "1.1": "2026-03-04", "1.2": "2026-02-16", "2.0": "2026-06-01", "2.0.1": "2026-06-03"}
MISFIT = "0001-Subtract-in-the-core.patch does not fit src/demo/core.py: hunk @@ -122,7 +122,7 @@"

TABLE = f"""\
demo
version       released    blob        fault       fits       pinned
1.0           2026-01-26  573ad40373  none known  1.0-1.1    deliver r1
1.1           2026-03-04  42ece99d7c  none known  1.0-1.1    test
1.2           2026-02-16  ff16d904ef  none known  none       no
1.5                       8fb61fd519  none known  none       no
1.6                       none        none known  none       no
2.0 to 2.0.1  2026-06-01  8bb8aaa8fa  none known  2.0        2.0 deliver r1
2.1                       9d9dd35709  none known  fixed 2.1  no
1.2: no series fits: {MISFIT.replace(" +", "{}")}
1.5: no series fits: demo-1.0-1.1 applies, but is not for this release
1.6: no series fits: there is no demo/core.py
left out: 1.4 (yanked); 2.2rc1 (pre-releases)

plain
version  released  blob        fault       fits  pinned
3.0                573ad40373  none known  3.0   deliver r1
""".format("\n  +")

MARKDOWN = f"""\
| demo | released | `core.py` | fault | series | pinned |
|---|---|---|---|---|---|
| 1.0 | 2026-01-26 | `573ad40373` | none known | demo-1.0-1.1 | deliver r1 |
| 1.1 | 2026-03-04 | `42ece99d7c` | none known | demo-1.0-1.1 | test |
| 1.2 | 2026-02-16 | `ff16d904ef` | none known | none: {MISFIT} | no |
| 1.5 |  | `8fb61fd519` | none known | none: demo-1.0-1.1 applies, but is not for this release | no |
| 1.6 |  | `none` | none known | none: there is no demo/core.py | no |
| 2.0 to 2.0.1 | 2026-06-01 to 2026-06-03 | `8bb8aaa8fa` | none known | demo-2.0 | 2.0 deliver r1 |
| 2.1 |  | `9d9dd35709` | none known | fixed upstream in 2.1 | no |

| plain | released | `core.py` | fault | series | pinned |
|---|---|---|---|---|---|
| 3.0 |  | `573ad40373` | none known | plain-3.0 | deliver r1 |
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


def test_a_row_for_each_release(drifted: Sample, server: Server) -> None:
    lines = drifted.overlay("drift", "--all", "demo").succeeds().stdout.splitlines()
    assert [line.split()[0] for line in lines[2:10]] == ["1.0", "1.1", "1.2", "1.5", "1.6", "2.0", "2.0.1", "2.1"]
    assert lines[8] == "2.0.1    2026-06-03  8bb8aaa8fa  none known  2.0        no"


def test_the_table_for_the_readme(drifted: Sample, server: Server) -> None:
    assert drifted.overlay("drift", "--markdown").succeeds().stdout == MARKDOWN


def test_everything_for_a_program(drifted: Sample, server: Server) -> None:
    found = json.loads(drifted.overlay("drift", "--json").succeeds().stdout)
    assert list(found) == ["demo", "plain"]
    assert found["demo"]["faults"] == {}
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
        "faults": {},
        "series": "demo-1.0-1.1",
        "unmended": [],
        "undecided": [],
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
    drifted.overlay("drift", "torch").fails("expected one of demo, plain, found 'torch'", "without a version")
    assert server.requests == []


@pytest.mark.parametrize("form", ["--markdown", "--all"])
def test_two_forms_at_once(drifted: Sample, form: str) -> None:
    done = drifted.overlay("drift", "--json", form)
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
    assert "| 2.0 to 2.0.1 |  | `8bb8aaa8fa` | none known | demo-2.0 | 2.0 deliver r1 |" in found.splitlines()
    outcome = "none: demo-1.0-1.1 applies, but is not for this release"
    assert f"| 1.4 |  | `573ad40373` | none known | {outcome} | no |" in found.splitlines()


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


def test_an_index_of_several_that_gives_no_answer(drifted: Sample, server: Server) -> None:
    """Half of the releases are no table. One that has no such project is no failure."""
    drifted.variables["PIP_EXTRA_INDEX_URL"] = f"{server.url}/other"
    assert drifted.overlay("drift").succeeds().stdout == TABLE
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = f"http://user:geheim@127.0.0.1:{listening.getsockname()[1]}/simple"
    drifted.variables["PIP_EXTRA_INDEX_URL"] = closed
    done = drifted.overlay("drift")
    said = done.fails("demo: expected an answer of every index, found none of http://127.0.0.1:", "check the network")
    assert "geheim" not in said
    assert done.stdout == ""


@pytest.mark.parametrize("status", [401, 429, 503])
def test_an_index_of_several_that_does_not_let_us_ask(drifted: Sample, server: Server, status: int) -> None:
    drifted.variables["PIP_EXTRA_INDEX_URL"] = f"{server.url}/other"
    server.answers["/other/plain/"] = lambda handler: handler.answer(b"", status=status)
    done = drifted.overlay("drift", "plain")
    said = f"plain: expected an answer of every index, found none of {server.url}/other/plain/: "
    done.fails(said, f" Error({status})")
    assert done.stdout == ""


def test_an_index_of_several_that_forbids_what_it_has_not(drifted: Sample, server: Server) -> None:
    """As one in a bucket of S3."""
    drifted.variables["PIP_EXTRA_INDEX_URL"] = f"{server.url}/other"
    server.answers["/other/plain/"] = lambda handler: handler.answer(b"", status=403)
    assert drifted.overlay("drift", "plain").succeeds().stdout == TABLE.partition("\n\n")[2]


def test_a_library_that_is_not_installed(drifted: Sample, server: Server, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['zipwire'] = None\n")
    drifted.variables["PYTHONPATH"] = f"{PROJECT}:{tmp_path}"
    drifted.overlay("drift", own=True).fails(
        "expected the library zipwire, found none", "pip install --editable '.[queue]'"
    )


FUSER = """\
import torch

from .op import OperationContext


class OperationFuser:
    def __init__(self, ops):
        self.ops = ops

    def __call__(self, value, basic_op_kwargs):
        outputs = []
        for op in self.ops:
            value, (outputs,) = op.fuser_forward([OperationContext()], value, basic_op_kwargs=basic_op_kwargs)
        for output in (value, *outputs):
            output.requires_grad_(False)
        return value, *outputs
"""
"""A fuser of the tests' own, with the fault of TransformerEngine's."""

MENDED = FUSER.replace("        for output in (value, *outputs):\n            output.requires_grad_(False)\n", "")
RELEASES = {
    "2.9.0": FUSER,
    "2.10.0": FUSER.replace("import torch\n", "import torch  # of old\n"),
    "2.12.0": FUSER,
    "2.12.1": FUSER,
    "2.13.0": MENDED,
    "2.14.0": MENDED.replace("class OperationFuser", "class Fuser"),
    "2.15.0": MENDED,
}

ENGINE = """\
transformer_engine
version           released  blob        fault          fits          pinned
2.10.0                      5b6503761c  yes: 1         none          no
2.12.0 to 2.12.1            cae65d1922  yes: 1         2.12          2.12.0 test
2.13.0                      a0cb3ca7e8  no             fixed 2.13.0  no
2.14.0                      62c246a7e3  not judged: 1  none          no
2.15.0                      a0cb3ca7e8  no             fixed 2.13.0  no
1 requires-grad: a leaf stops training (fixed upstream in 2.13.0)
2.10.0: no series fits: 0001-Mend-it.patch does not fit transformer_engine/pytorch/ops/fuser.py:
  hunk @@ -1,16 +1,14 @@
2.14.0: no series fits: 0001-Mend-it.patch does not fit transformer_engine/pytorch/ops/fuser.py:
  hunk @@ -1,16 +1,14 @@
"""

UNMENDED = (
    "overlay: expected a series for every release with a fault, found none for transformer_engine 2.10.0 "
    "(requires-grad): make one"
)
UNDECIDED = (
    "overlay: expected to judge every release, could not judge transformer_engine 2.14.0 (requires-grad): --json says "
    "why; adapt the judge"
)

ENGINE_LOCK = """\
version = 1

[packages.transformer_engine]
repository = "https://git.example/engine"

[[packages.transformer_engine.releases]]
version = "2.12.0"
use = "test"
series = "transformer_engine-2.12"
wheel = {{ file = "{file}", size = {size}, sha256 = "{sha256}" }}
"""


@pytest.fixture(scope="module")
def engine_template(template: Sample, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A project with the name of one that there are judges for: releases with its fault, mended, and of another form;
    and a series for those of 2.12."""
    sample = copy(template, tmp_path_factory.mktemp("engine") / "sample")
    path = "transformer_engine/pytorch/ops/fuser.py"
    folder = sample.index / "transformer-engine"
    folder.mkdir()
    for version, text in RELEASES.items():
        file = folder / f"transformer_engine-{version}-py3-none-any.whl"
        file.write_bytes(archive({path: text.encode(), **metadata("transformer_engine", version)}))
    sample.list_page("transformer-engine")
    checkout = sample.checkouts / "engine"
    checkout.mkdir()
    git("init", "--quiet", "--template=", folder=checkout)
    base = commit(checkout, "base", {path: FUSER.encode()})
    fault = "Fault: requires-grad: a leaf stops training\nLast-Update"
    commit(checkout, message("Mend it").replace("Last-Update", fault), {path: MENDED.encode()})
    patches = sample.root / "patches" / "transformer_engine-2.12"
    git("format-patch", "--quiet", "--unified=20", "--output-directory", str(patches), base, folder=checkout)
    (patches / "series").write_text("0001-Mend-it.patch\n")
    wheel = (folder / "transformer_engine-2.12.0-py3-none-any.whl").read_bytes()
    pin = {"file": "transformer_engine-2.12.0-py3-none-any.whl", "size": len(wheel), "sha256": digest(wheel)}
    sample.lock.write_text(ENGINE_LOCK.format(**pin))
    shutil.rmtree(sample.cache)
    return sample


@pytest.fixture
def engine(engine_template: Sample, tmp_path: Path) -> Iterator[tuple[Sample, Server]]:
    sample = copy(engine_template, tmp_path / "sample")
    with serving(sample.index) as server:
        sample.variables["PIP_INDEX_URL"] = server.url
        server.ranges = True
        yield sample, server


def offer_only(engine: tuple[Sample, Server], *versions: str) -> Sample:
    """The sample with an index of these releases alone."""
    sample, _ = engine
    for file in (sample.index / "transformer-engine").glob("*.whl"):
        if file.name.split("-")[1] not in versions:
            file.unlink()
    sample.list_page("transformer-engine")
    return sample


def test_the_faults_are_those_that_the_code_has(engine: tuple[Sample, Server]) -> None:
    done = engine[0].overlay("drift")
    assert (done.code, done.stdout) == (1, ENGINE)
    assert done.stderr.splitlines()[-2:] == [UNMENDED, UNDECIDED]


@pytest.mark.parametrize(
    ("versions", "said", "form"),
    [
        (("2.12.0", "2.12.1", "2.13.0"), [], "--all"),
        (("2.10.0", "2.12.0"), [UNMENDED], "--json"),
        (("2.12.0", "2.14.0"), [UNDECIDED], "--markdown"),
    ],
    ids=["mended", "unmended", "undecided"],
)
def test_the_exit_code_says_whether_every_release_with_a_fault_has_a_series(
    engine: tuple[Sample, Server], versions: Sequence[str], said: Sequence[str], form: str
) -> None:
    done = offer_only(engine, *versions).overlay("drift", form)
    assert done.code == bool(said)
    assert [line for line in done.stderr.splitlines() if "expected" in line] == list(said)
    assert done.stdout


def test_a_series_that_does_not_mend_what_a_release_has(engine: tuple[Sample, Server]) -> None:
    """It fits, but its patch names another fault."""
    sample = offer_only(engine, "2.12.0")
    other = sample.root / "patches" / "transformer_engine-2.10"
    shutil.copytree(sample.root / "patches" / "transformer_engine-2.12", other)
    sample.rewrite(1, "Fault: requires-grad", "Fault: unheard-of", series="transformer_engine-2.12")
    done = sample.overlay("drift", "--json")
    found = json.loads(done.stdout)["transformer_engine"]["releases"][0]
    assert (done.code, found["series"], found["unmended"]) == (1, "transformer_engine-2.12", ["requires-grad"])
    assert found["faults"]["unheard-of"] == {"state": "not judged", "why": "there is no judge of this fault"}


def test_the_faults_for_a_program(engine: tuple[Sample, Server]) -> None:
    found = json.loads(engine[0].overlay("drift", "--json").stdout)["transformer_engine"]
    assert found["faults"] == {"requires-grad": {"text": "a leaf stops training", "fixed-upstream": "2.13.0"}}
    releases = {one["version"]: one for one in found["releases"]}
    states = {version: one["faults"]["requires-grad"]["state"] for version, one in releases.items()}
    assert states == {
        "2.10.0": "live",
        "2.12.0": "live",
        "2.12.1": "live",
        "2.13.0": "not live",
        "2.14.0": "not judged",
        "2.15.0": "not live",
    }
    assert "a leaf: its flag was turned off" in releases["2.10.0"]["faults"]["requires-grad"]["why"]
    assert [one["fixed-upstream"] for one in releases.values()] == [None, None, None, "2.13.0", None, "2.13.0"]
    assert (releases["2.10.0"]["unmended"], releases["2.14.0"]["undecided"]) == (["requires-grad"], ["requires-grad"])
    assert (releases["2.12.0"]["unmended"], releases["2.12.0"]["undecided"]) == ([], [])


def test_nothing_is_fetched_judged_or_tried_twice(engine: tuple[Sample, Server]) -> None:
    sample, server = engine
    first = sample.overlay("drift")
    judging = "overlay: running the code of 4 faults in a process apart, to see whether they are live"
    assert judging in first.stderr.splitlines()  # of 6 releases, 2 of which have the file of another
    assert len(kept(sample, "judged")) == len(kept(sample, "fits")) == 4
    server.requests.clear()
    sample.variables["PATH"] = ""  # git, which applies patches
    again = sample.overlay("drift")
    assert (again.code, again.stdout) == (first.code, first.stdout)
    assert server.requests == ["/transformer-engine/"]
    assert "running the code" not in again.stderr


def test_another_series_is_tried_anew(engine: tuple[Sample, Server]) -> None:
    sample = offer_only(engine, "2.12.0", "2.13.0")
    sample.overlay("drift").succeeds()
    sample.rewrite(
        1, "-            output.requires_grad_(False)", "-            output.detach_()", "transformer_engine-2.12"
    )
    done = sample.overlay("drift")
    assert (done.code, "does not fit" in done.stdout) == (1, True)


PNG = b"\x89PNG\r\n\x1a\n"


def test_the_picture(engine: tuple[Sample, Server]) -> None:
    sample, _ = engine
    place = sample.folder / "releases.png"
    place.write_bytes(b"an older one")
    done = sample.overlay("drift", "--png", place)
    assert (done.code, done.stdout) == (1, ENGINE)
    content = place.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(PNG)
    assert 1000 <= width <= 1600
    assert 200 <= height <= 900
    assert not list(sample.folder.glob(".releases*"))


@pytest.mark.parametrize(("place", "found"), [("missing/a.png", "no folder "), ("home", "home is one")])
def test_a_place_where_no_picture_can_be(engine: tuple[Sample, Server], place: str, found: str) -> None:
    sample, server = engine
    (sample.folder / "home").mkdir(exist_ok=True)
    sample.overlay("drift", "--png", sample.folder / place).fails("expected a file in a folder that is there", found)
    assert server.requests == []


def test_without_matplotlib(engine: tuple[Sample, Server], tmp_path: Path) -> None:
    sample, server = engine
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    sample.variables["PYTHONPATH"] = f"{PROJECT}:{tmp_path}"
    done = sample.overlay("drift", "--png", sample.folder / "a.png", own=True)
    done.fails("expected the library matplotlib", "needs the extra `picture`", "pip install --editable '.[picture]'")
    assert server.requests == []


def standing(
    version: str,
    state: judges.State,
    fits: bool = False,
    fixed: bool = False,
    use: str = "",
    day: int | None = None,
) -> drift.Standing:
    """A release of demo with one fault."""
    uploaded = None if day is None else datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day)
    pin = None
    if use:
        wheel = {"file": f"demo-{version}-py3-none-any.whl", "size": 1, "sha256": "0" * 64}
        pin = lock.Release.model_validate({"version": version, "use": use, "wheel": wheel})
    return drift.Standing(
        "demo",
        Offer(Version(version), f"demo-{version}-py3-none-any.whl", "", None, uploaded, False),
        {"demo/core.py": "0" * 40},
        {"a-fault": Verdict(state, "")},
        (f"demo-{version.rpartition('.')[0]}",) if fits else (),
        {},
        frozenset({"a-fault"} if fits else ()),
        version if fixed else None,
        False,
        pin,
    )


EVERY_STATE = {
    "has a fault, no series mends it": standing("1.0.0", "live", day=0),
    "cannot be judged": standing("1.1.0", "not judged", day=10),
    "has a fault, delivered patched": standing("1.2.0", "live", fits=True, use="deliver", day=20),
    "has a fault, a series fits, for the tests": standing("1.3.0", "live", fits=True, use="test", day=30),
    "has a fault, a series fits, not pinned": standing("1.4.0", "live", fits=True, day=40),
    "fixed upstream": standing("1.5.0", "not live", fixed=True, day=50),
    "has no known fault": standing("1.6.0", "not live", day=60),
}


def test_a_file_that_the_lock_knows_as_fixed_needs_no_judge() -> None:
    unknown = EVERY_STATE["cannot be judged"]
    assert unknown.undecided == ("a-fault",)
    assert replace(unknown, known=True).undecided == ()


def drawn(*standings: drift.Standing) -> tuple[set[str], set[str], dict[str, Any]]:
    """The legend, the texts and the markers of a picture of these releases."""
    survey = drift.Survey("demo", ("demo/core.py",), standings, {"a-fault": "goes wrong"}, {}, (), ())
    figure = drift_picture.figure([survey])
    (axes,) = figure.axes
    (legend,) = figure.legends
    markers = {str(line.get_marker()): line.get_color() for line in axes.lines if list(cast(Any, line).get_xdata())}
    return {text.get_text() for text in legend.get_texts()}, {text.get_text() for text in axes.texts}, markers


def test_the_picture_tells_the_states_apart() -> None:
    assert {name: drift_picture.state(one) for name, one in EVERY_STATE.items()} == {name: name for name in EVERY_STATE}
    legend, texts, markers = drawn(*EVERY_STATE.values())
    assert legend == set(EVERY_STATE)
    assert {"1.0.0", "1.1.0", "1.2.0", "1.6.0", "series 1.2", "fixed upstream", "no series"} <= texts
    assert len(markers) == len(set(markers.values())) == len(EVERY_STATE)
    assert drawn(EVERY_STATE["fixed upstream"])[0] == {"fixed upstream"}


def test_a_picture_of_releases_whose_days_nobody_knows() -> None:
    assert "1.7.0" in drawn(standing("1.7.0", "live"), *EVERY_STATE.values())[1]


@pytest.mark.parametrize("width", [100, 70, 50, 20])
def test_a_narrow_terminal(width: int) -> None:
    """Its table has fewer columns, and then more lines; a cell is in one piece, and none that counts is lost."""
    group = [standing(f"1.2.{number}", "live", fits=True, use="test", day=number) for number in range(5)]
    survey = drift.Survey("demo", ("demo/core.py",), tuple(group), {"a-fault": "goes wrong " * 12}, {}, (), ())
    said = drift_tables.text(survey, width, grouped=True)
    assert all(len(line) <= max(width, 48) for line in said.splitlines()), said
    assert all(word in said for word in ("1.2.0 to 1.2.4", "yes: 1", "1.2.3 test", "goes wrong"))
    assert ("0000000000" in said) == (width == 100)


def test_what_is_done_at_once() -> None:
    barrier = threading.Barrier(drift.CONNECTIONS)

    def together(item: int) -> int:
        barrier.wait(600)
        return item * 2

    found = dict(drift.at_once(together, range(drift.CONNECTIONS)))
    assert found == {number: number * 2 for number in range(drift.CONNECTIONS)}
    assert dict(drift.at_once(together, [])) == {}


def test_the_first_error_ends_it() -> None:
    begun: list[int] = []
    gate = threading.Event()

    def fail(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise OverlayError("no")
        gate.wait(600)

    with pytest.raises(OverlayError, match="no"):
        dict(drift.at_once(fail, range(100)))
    gate.set()
    assert len(begun) <= drift.CONNECTIONS + 1


def offer(version: str) -> Offer:
    return Offer(Version(version), f"transformers-{version}-py3-none-any.whl", "", None, None, False)


def test_the_first_release_that_is_looked_at() -> None:
    package = lock.read(PROJECT / "upstream.lock").packages["transformers"]

    def nothing(offer: Offer, paths: object) -> dict[str, bytes | None]:
        return {}

    offered = [offer(version) for version in ("5.10.0", "4.57.6", "5.0.0rc3", "5.0.0", "5.9.0", "5.11.0rc0")]
    found = drift.survey("transformers", package, [], offered, nothing)
    assert [one.version for one in found.standings] == ["5.0.0", "5.9.0", "5.10.0"]
    assert [(one.series, one.reason) for one in found.standings] == [(None, "there is none")] * 3
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
    faults: str
    outcome: str
    pinned: str


def rows() -> list[Row]:
    text = (PROJECT / "README.md").read_text("utf-8").partition(drift_tables.START)[2].partition(drift_tables.END)[0]
    found: list[Row] = []
    for table in text.strip().split("\n\n"):
        cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        for versions, _, blob, faults, outcome, pinned in cells[2:]:
            first, _, last = versions.partition(" to ")
            project, file = cells[0][0], cells[0][2]
            found.append(Row(project, file, Version(first), Version(last or first), blob, faults, outcome, pinned))
    return found


def test_the_readme_says_of_each_pinned_release_what_the_lock_says() -> None:
    """Without an index: what stands there of other releases is as it was when somebody ran the command."""
    again = f"put between {drift_tables.START} and {drift_tables.END}: .venv/bin/overlay drift --markdown"
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
            assert (row.blob, row.faults) == (one.files[0].blob[: drift_tables.ABBREVIATED], "no"), again
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
                mended = {fault.code for fault in series.read(PROJECT / "patches" / release.series).faults("wheel")}
                assert (matching[0].outcome, matching[0].blob, set(matching[0].faults.split(", "))) == (
                    release.series,
                    blobs[matching[0].file][: drift_tables.ABBREVIATED],
                    mended,
                ), again
    assert fixed <= {release for release, use in said.items() if use.endswith("fixed")}, again
    pinned = {release: use.removesuffix(" and fixed") for release, use in said.items() if use != "fixed"}
    assert pinned == expected, again
