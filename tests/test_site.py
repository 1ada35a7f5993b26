"""The site builds without a warning, and whoever has but a symptom, an error text or a version finds the page."""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from overlay import environments
from tests.variants import ROOT, run_worker

DOCS = ROOT / "docs"
AFFECTED = (DOCS / "affected.md").read_text("utf-8")

SYMPTOMS = (
    "DPO on FSDP2, reward flat, no error",
    "you can only change requires_grad flags of leaf variables",
    "Recomputed values … have different metadata",
    "Trying to backward through the graph a second time",
    "generation turns to noise while training",
)

TYPED = (
    "AttributeError: 'function' object has no attribute '__self__'",
    "CUDA out of memory",
    "OutOfMemoryError",
    "gradient checkpointing",
    "shape [0]",
    "{'shape': torch.Size([0])",
    "hook is called twice",
    "grad is None",
    "nan",
    "after a resume",
    "does not go down",
    "gibberish",
    "ds_grads_remaining",
    "mark a variable ready only once",
    "You are resuming training from a checkpoint trained with",
)
"""Of other symptoms, what somebody pastes or types."""

OURS = (
    "is sharded by itself",
    "inside of a layer",
    "cannot recompute layers with frozen parameters under ZeRO-3",
    "inside of its checkpoint, because its call is not the known one",
    "Found a stock fuser.py",
    "package version mismatch",
    "nothing is mended in this process",
)
"""Of messages that the page explains: what the patches and the overlay say, as it says it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as docs/design.md has it."""
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = re.search(r" (-m sphinx .*) -c docs \. site$", (DOCS / "design.md").read_text("utf-8"), re.MULTILINE)
    assert command is not None
    python = str(environments.python("docs"))
    run = [python, *command[1].split(), "--quiet", "-d", str(out / ".trees"), "-c", "docs", ".", str(out)]
    return subprocess.run(run, cwd=source, capture_output=True, text=True, check=False)


class Page(HTMLParser):
    """What a page links to or shows, by its addresses, and the texts that lead there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in ("href", "src") and value]


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    written = {path.relative_to(ROOT).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert written <= {path.relative_to(site) for path in pages(site)}
    linked = {Path(address.partition("#")[0]) for address in Page(site / "README.html").addresses}
    assert {path for path in written if path.parent.name == "docs"} <= linked


def test_links_lead_to_what_the_site_has(site: Path) -> None:
    for path in pages(site):
        for address in Page(path).addresses:
            target = address.partition("#")[0].partition("?")[0]
            if target and not target.startswith(("https://", "data:")):
                assert (path.parent / target).exists(), f"{path.relative_to(site)}: {address}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in pages(site):
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="https?:', path.read_text("utf-8")), path


def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs" / "cards").mkdir(parents=True)
    for name in ("conf.py", "site.css"):
        (tmp_path / "docs" / name).write_bytes((DOCS / name).read_bytes())
    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        (tmp_path / path.relative_to(ROOT)).write_text("# Sample\n", "utf-8")
    sound = build(tmp_path, tmp_path / "sound")
    assert sound.returncode == 0, sound.stderr
    wrong = ["[a](page.md)", "[a](start.md#anchor)", "[a](#here)", "![a](picture.png)", "[a](../file.lock)"]
    (tmp_path / "docs" / "design.md").write_text("# Sample\n\n" + "\n\n".join(wrong), "utf-8")
    done = build(tmp_path, tmp_path / "wrong")
    assert done.returncode != 0
    for number, link in enumerate(wrong):
        assert f"design.md:{3 + 2 * number}: WARNING" in done.stderr, link


@pytest.mark.parametrize("symptom", [*SYMPTOMS, *TYPED])
def test_one_search_of_the_repository_finds_the_page(symptom: str) -> None:
    for part in symptom.split(" … "):
        assert "docs/affected.md" in search(part)


def search(text: str) -> list[str]:
    command = ["git", "grep", "-i", "--untracked", "--files-with-matches", "--fixed-strings", text, "--", "*.md"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


@pytest.mark.parametrize("torch", ["2.11", "2.13"])
def test_a_whole_message_of_pytorch_finds_the_page(torch: str) -> None:
    """Pasted as a traceback ends, with the class of the error and without."""
    found = run_worker(
        ROOT / "tests" / "messages_worker.py",
        on=f"torch {torch}",
        interpreter=environments.python(f"train-{torch}"),
        laid_over=[],
    )
    for name, messages in found.items():
        assert messages, name
        for message in messages:
            assert search(message) == ["docs/affected.md"], message


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_each_symptom_is_a_title(symptom: str) -> None:
    """So that the search of the site puts it first, and a link can lead there."""
    titles = re.findall(r"^## (.*)$", AFFECTED, re.MULTILINE)
    assert any(all(part in title for part in symptom.split(" … ")) for title in titles)


@pytest.mark.parametrize("text", OURS)
def test_explained_messages_are_said_somewhere(text: str) -> None:
    assert text in AFFECTED
    search = ["git", "grep", "-l", "-F", text, "--", "patches", "overlay"]
    assert subprocess.run(search, cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_faults_by_version_are_those_of_the_patches() -> None:
    faults = {}
    for series in sorted(path for path in (ROOT / "patches").iterdir() if path.is_dir()):
        said = "".join(path.read_text("utf-8") for path in series.glob("*.patch"))
        faults[series.name.replace("-", " ", 1)] = sorted(re.findall(r"^Fault: (\S+):", said, re.MULTILINE))
    table = AFFECTED.partition("<!-- faults-table -->")[2].partition("<!-- /faults-table -->")[0]
    rows = dict(re.findall(r"^\| (\S+ [0-9.-]+) \| (.*) \|$", table, re.MULTILINE))
    assert {release: sorted(codes.split(", ")) for release, codes in rows.items()} == faults
    needs = set(re.findall(r"^\| ([a-z0-9-]+) \|", AFFECTED, re.MULTILINE))
    assert {code for codes in faults.values() for code in codes} <= needs


@pytest.mark.parametrize("drawing", sorted(path.name for path in DOCS.glob("*.svg")))
def test_drawings_are_small_and_have_a_ground_of_their_own(drawing: str) -> None:
    text = (DOCS / drawing).read_text("utf-8")
    assert len(text) < 8000
    assert "<title>" in text
    assert "<desc>" in text
    width = re.search(r'viewBox="0 0 (\d+) ', text)
    assert width is not None
    assert int(width[1]) <= 440  # a phone shows it as it is
    assert f'width="{int(width[1]) - 1}" ' in text.partition('fill="#ffffff"')[0]  # light and dark alike
