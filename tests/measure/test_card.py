"""A run card: its schema, what it is written as, and what is no card."""

import json
import math
from importlib import import_module
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from overlay.errors import OverlayError
from overlay.measure import card, markdown, output, picture
from tests.measure.cards import MIB, finding, made, mode, parity
from tests.variants import ROOT

GOOD = made(mode("off"), mode("reentrant", peak=60, slowdown=1.3), mode("non-reentrant", peak=60, slowdown=1.25))
BAD = made(
    mode("off"),
    card.Mode(mode="reentrant", outcome="out of memory", message="killed"),
    mode("non-reentrant", peak=90, parity=parity(loss=math.inf, gradient=0.5)),
    choices=[
        mode("group:2", peak=80, slowdown=1.2),
        mode("group:3", peak=80, slowdown=1.2, parity=parity(gradient=0.4)),
        card.Mode(mode="offload", outcome="not available"),
    ],
    choices_left_out="",
    budget=card.Budget(bytes=85 * 2**20, best="group:2"),
)
DUMPED = GOOD.model_dump(mode="json")
CARDS = sorted((ROOT / "docs" / "cards").glob("*.json"))


def test_the_schema_in_the_repository_is_that_of_the_models() -> None:
    kept = ROOT / "overlay" / "measure" / "card.schema.json"
    assert kept.read_text("utf-8") == card.schema(), "python -m overlay.measure.card > overlay/measure/card.schema.json"


@pytest.mark.parametrize("one", [GOOD, BAD], ids=["good", "bad"])
def test_what_is_written_is_read_again(one: card.Card, tmp_path: Path) -> None:
    files = list(output.write(one, tmp_path / "run"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.md", "run.png"]
    assert card.read(files[-1]) == one
    json.loads(files[-1].read_text("utf-8"), parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_without_a_picture(tmp_path: Path) -> None:
    list(output.write(GOOD, tmp_path / "run", drawn=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.md"]
    assert "run.png" not in (tmp_path / "run.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Invalid JSON"),
        (json.dumps(DUMPED | {"format": 2}), "found at format"),
        (json.dumps(DUMPED | {"other": 1}), "found at other"),
        (json.dumps(DUMPED | {"settings": {"model": "llama", "other": 1}}), "found at settings.other"),
    ],
    ids=["no JSON", "another format", "an unknown key", "an unknown setting"],
)
def test_what_is_no_card(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "card.json"
    file.write_text(content, "utf-8")
    with pytest.raises(OverlayError, match=said) as raised:
        card.read(file)
    assert str(file) in str(raised.value)
    with pytest.raises(OverlayError, match="cannot be read"):
        card.read(tmp_path / "none.json")


def test_the_page_says_what_is_measured() -> None:
    page = markdown.document(BAD, "run.png")
    for part in (
        "# llama: 1.0 M parameters, 2 blocks, 100 tokens",
        "**off in 4 points: patched 5.22.2**",
        "| optimizer state | 20.0 MiB | 20% |",
        "| patched 5.22.2, non-reentrant | 90.0 MiB | -10% | x 1.00 (1.00 to 1.00) |",
        "- patched 5.22.2, reentrant: out of memory: killed",
        "- patched 5.22.2, non-reentrant: gradients differ from off by 5.0e-01 (layers.0.weight)",
        "| segments of 2 blocks | 80.0 MiB | -20% |",
        "For 85.0 MiB: segments of 2 blocks is the fastest that fits.",
        "![memory over the step, and time and memory, per mode](run.png)",
    ):
        assert part in page
    assert "**pass: patched 5.22.2**" in markdown.document(GOOD, None)


def here(state: str, series: str = "", version: str = "5.14.1") -> card.Card:
    """A card of `--here`."""
    build = card.Build(kind="here", release="", version=version, modes=GOOD.ours.modes, state=state, series=series)
    return made(*GOOD.ours.modes, judged="here", builds=[build])


@pytest.mark.parametrize(
    ("one", "name", "said"),
    [
        (
            here("patched wheel", "transformers-5.2-5.22", "5.14.1+overlay.3"),
            "here 5.14.1+overlay.3 (patched wheel)",
            "What is here: transformers 5.14.1+overlay.3 (patched wheel): the patches of transformers-5.2-5.22.",
        ),
        (
            here("overlaid", "transformers-5.2-5.22"),
            "here 5.14.1 (overlaid)",
            "What is here: transformers 5.14.1 (overlaid): the patches of transformers-5.2-5.22.",
        ),
        (here("stock"), "here 5.14.1 (stock)", "What is here: transformers 5.14.1 (stock)."),
        (
            here(""),
            "here 5.14.1",
            "What is here: transformers 5.14.1; whether stock, patched or overlaid is not known.",
        ),
    ],
    ids=["patched", "overlaid", "stock", "not known"],
)
def test_of_what_is_here_the_page_says_which_build_it_is(one: card.Card, name: str, said: str) -> None:
    page = markdown.document(one, None)
    assert f"\n{said}\n" in page
    assert markdown.verdict(one) == f"pass: {name}"
    assert f"| {name}, non-reentrant | 60.0 MiB |" in page
    assert card.Card.model_validate_json(card.write(one)) == one
    assert "What is here" not in markdown.document(GOOD, None)


def test_a_card_from_before_builds_said_what_they_are_is_one() -> None:
    builds = [
        {key: value for key, value in build.items() if key not in ("state", "series")} for build in DUMPED["builds"]
    ]
    assert card.Card.model_validate_json(json.dumps(DUMPED | {"builds": builds})) == GOOD
    assert import_module("jsonschema").validate(DUMPED | {"builds": builds}, json.loads(card.schema())) is None


def test_blocks_that_do_not_run_are_told() -> None:
    found = card.Granularity(found=1, checkpointed=1, twice=0, findings=[])
    page = markdown.document(made(mode("off"), mode("reentrant", peak=60, granularity=found)), None)
    assert "Blocks of the model: 2 Layer (1 of them run with these batches). Saved" in page
    assert "Blocks of the model: 2 Layer. Saved" in markdown.document(GOOD, None)


@pytest.mark.parametrize(
    ("second", "shown"), [(3 * MIB, "3.0 MiB"), (3 * MIB + 8, "3.0 MiB"), (5 * MIB, "3.0 MiB to 5.0 MiB")]
)
def test_what_blocks_save_is_a_range_where_it_reads_as_one(second: int, shown: str) -> None:
    saved = card.Saved(blocks={"layers.0": 3 * MIB, "layers.1": second}, outside=MIB)
    page = markdown.document(made(mode("off", saved=saved)), None)
    assert f"| patched 5.22.2, off | - | {shown} | 1.0 MiB |" in page


def test_a_peak_that_is_the_same_has_no_sign() -> None:
    assert "| patched 5.22.2, reentrant | 100.0 MiB | 0% |" in markdown.document(
        made(mode("off"), mode("reentrant")), None
    )


def test_the_page_names_what_the_checks_found() -> None:
    found = card.Granularity(found=2, checkpointed=2, twice=0, findings=[finding()])
    page = markdown.document(made(mode("off"), mode("reentrant", peak=60, granularity=found)), None)
    assert "- **error** in-place-operation: layers.0: `x += 1` changes the argument `x` in place (model.py:7)" in page


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (made(mode("off")), "nothing to judge: patched 5.22.2, off alone"),
        (
            made(card.Mode(mode="off", outcome="out of memory"), mode("reentrant", peak=60)),
            "pass, but memory, time and parity have nothing to be compared with: off did not run: patched 5.22.2",
        ),
    ],
    ids=["off alone", "off does not fit"],
)
def test_a_pass_says_what_was_not_judged(one: card.Card, said: str) -> None:
    assert one.passed
    assert markdown.verdict(one) == said


def test_what_did_not_run_is_told_below_the_table() -> None:
    """Its message would make the table wider than a page."""
    page = markdown.document(BAD, None)
    assert "\n- reentrant: out of memory: killed\n- offload: not available\n" in page.partition("## Other ways")[2]
    assert "\n- segments of 3 blocks: gradients differ from off by 4.0e-01 (layers.0.weight)" in page
    assert max(len(line) for line in page.splitlines() if line.startswith("|")) < 100


@pytest.mark.parametrize("one", [GOOD, BAD, made(card.Mode(mode="off", outcome="failed"))], ids=["good", "bad", "none"])
def test_the_picture(one: card.Card) -> None:
    drawn = picture.png(one)
    assert len(drawn) < 150_000
    with Image.open(BytesIO(drawn)) as image:
        assert image.format == "PNG"
        assert image.size[0] == 765
        assert image.size[1] < 2 * 765


@pytest.mark.parametrize(
    "one",
    [GOOD, BAD, here("patched wheel", version="5.14.1+overlay.13")],
    ids=["good", "bad", "here, with a long name"],
)
def test_nothing_in_the_picture_goes_over_its_edge(one: card.Card) -> None:
    with Image.open(BytesIO(picture.png(one))) as image:
        width, height = image.size
        for edge in ((0, 0, 4, height), (width - 4, 0, width, height), (0, height - 4, width, height)):
            assert image.convert("L").crop(edge).getextrema() == (255, 255), edge


def test_the_picture_can_be_read_on_a_telephone() -> None:
    """Its smallest letters, at the 343 pixels that a page leaves of 375, in pixels: 10 is what captions have."""
    assert 343 / picture.INCHES * picture.SMALL / 72 >= 9
    assert 343 / picture.INCHES * picture.LETTERS / 72 >= 10


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_cards_of_the_documentation(path: Path) -> None:
    one = card.read(path)
    assert {build.kind for build in one.builds} == {"stock", "patched", "latest"}
    assert all(mode.outcome == "ok" for build in one.builds for mode in build.modes)
    assert path.with_suffix(".md").read_text("utf-8") == markdown.document(one, f"{path.stem}.png")
    with Image.open(path.with_suffix(".png")) as kept, Image.open(BytesIO(picture.png(one))) as drawn:
        assert kept.size == drawn.size, f"overlay bench draw {path}"
        difference = ImageChops.difference(kept.convert("L"), drawn.convert("L"))
        share = sum(difference.histogram()[64:]) / (kept.size[0] * kept.size[1])
        assert share < 0.01, f"overlay bench draw {path}"
    assert path.with_suffix(".png").stat().st_size < 150_000


def test_there_are_cards_of_five_models() -> None:
    assert [path.stem for path in CARDS] == ["bert", "llama", "mixtral", "t5", "vit-segmentation"]
