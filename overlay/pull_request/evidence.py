"""What was measured, for the text of a pull request: taken from the pages whose tables the tests make, never typed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from overlay.errors import OverlayError
from overlay.queue.lock import Package
from overlay.queue.series import Series

PROGRAMS = Path(__file__).with_name("programs")


@dataclass(frozen=True)
class Evidence:
    """A table before and after the change, what it is of, how to repeat it, and a program that needs nothing of this
    project ("" where there is none)."""

    title: str
    caption: str
    table: str
    repeat: str
    program: str


@dataclass(frozen=True)
class _Measured:
    """A table of a page.

    Attributes:
        title, caption: what it says.
        page, marker: the file, and the comments between which the table stands.
        rows: a pattern of the rows that are of this fault; those that the change leaves as they are do not count.
        command: what makes the table anew, in a checkout of this project.
        program: a file of `programs/`.
    """

    title: str
    caption: str
    page: str
    marker: str
    command: str
    program: str = ""
    rows: str = ""


_BY_FAULT = {
    "fsdp2-gradients": _Measured(
        "Gradients under FSDP2",
        "Relative error of the gradients (one rank / two ranks) of a 3-layer Llama (a Mixtral where experts are named) "
        "under `fully_shard` and activation checkpointing, against the same model with neither; gloo, on the CPU.",
        "README.md",
        "fsdp2-table",
        "scripts/test.sh fsdp2",
        "fsdp2_gradients.py",
    ),
    "forward-replaced": _Measured(
        "What third-party code does with the `forward` of a layer",
        "Whether a layer is checkpointed, and how often.",
        "docs/compatibility.md",
        "upstream-table",
        "scripts/test.sh tests/contracts/test_compatibility.py",
        "forward_replaced.py",
    ),
    "training-cache": _Measured(
        "Generation in training mode",
        "The greedy tokens of `generate` from a model in training mode with checkpointing on, against eval mode.",
        "docs/compatibility.md",
        "on-purpose-table",
        "scripts/test.sh tests/contracts/test_compatibility.py",
        rows=r"`generate`",
    ),
    "requires-grad": _Measured(
        "Flags of the caller's tensors under `torch.no_grad()`",
        "What a call under `torch.no_grad()` does to a tensor of the caller's that requires gradients.",
        "docs/compatibility.md",
        "requires-grad-table",
        "scripts/test.sh tests/transformer_engine/test_fuser.py",
        "requires_grad.py",
    ),
}
_ALSO = {"fsdp2-nested": "fsdp2-gradients"}
"""Faults that are measured in the table of another."""


_VALUES = re.compile(r"stock|latest|patched|with this project|\d")
"""The heads of columns of what was measured; the others say of what."""


def collect(
    root: Path, package: Package, queue: Series, faults: Sequence[str], version: Version | None
) -> list[Evidence]:
    """What was measured of these faults.

    Args:
        root: the checkout of this project, which has the pages.
        package: the pins, which say which releases have the series.
        queue: the series.
        faults: the codes of the faults that the pull request mends.
        version: that of the commit: of several releases that were measured, the nearest one's columns are taken.

    Raises:
        OverlayError: a page does not have its table.
    """
    found = []
    for code in dict.fromkeys(_ALSO.get(code, code) for code in faults):
        measured = _BY_FAULT.get(code)
        if measured is None:
            continue
        heads, *rows = _table(root / measured.page, measured.marker)
        columns = _columns(heads, package, queue, version)
        if columns is None:
            continue
        release, before, after = columns
        shown = [row for row in rows if row[before] != row[after] and re.search(measured.rows, row[0])]
        if not shown:
            continue
        labels = [index for index, head in enumerate(heads) if not _VALUES.match(head)]
        cells = [[*(heads[index] for index in labels), f"before ({release})", "after"]]
        cells += [[*(row[index] for index in labels), row[before], row[after]] for row in shown]
        lines = [f"| {' | '.join(row)} |" for row in cells]
        lines.insert(1, "|---" * len(cells[0]) + "|")
        program = (PROGRAMS / measured.program).read_text("utf-8") if measured.program and code in faults else ""
        found.append(
            Evidence(
                measured.title,
                measured.caption,
                "\n".join(lines),
                f"Measured with the release {release}, stock and with this change. In a checkout of modeling-overlay, "
                f"`{measured.command}` measures it again.",
                program,
            )
        )
    return found


def _table(page: Path, marker: str) -> list[list[str]]:
    """The head and the rows of the table between `<!-- MARKER -->` and `<!-- /MARKER -->`, as cells."""
    _, _, rest = page.read_text("utf-8").partition(f"<!-- {marker} -->")
    text, end, _ = rest.partition(f"<!-- /{marker} -->")
    rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in text.strip().splitlines()]
    if not end or len(rows) < 3 or len({len(row) for row in rows}) != 1:
        raise OverlayError(f"{page}: expected a table between <!-- {marker} --> and <!-- /{marker} -->: restore it")
    return [rows[0], *rows[2:]]


def _columns(
    heads: Sequence[str], package: Package, queue: Series, version: Version | None
) -> tuple[str, int, int] | None:
    """The release whose columns are taken, and the places of these: one of the same series, the nearest that is not
    later than the version; or else the next later one."""
    pairs = {}
    for release in package.releases:
        named = release.version
        before = [head for head in (f"stock {named}", f"latest {named}", named, "stock") if head in heads]
        after = [
            head for head in (f"patched {named}", f"{named} with this project", "with this project") if head in heads
        ]
        if release.use == "deliver" and before and after:
            pairs[Version(named)] = (named, heads.index(before[0]), heads.index(after[0])), release.series == queue.name
    if not pairs:
        return None
    wanted = version or max(pairs)
    same = [one for one, (_, is_same) in pairs.items() if is_same]
    earlier = [one for one in same if one <= wanted]
    later = [one for one in pairs if one >= wanted]
    chosen = max(earlier) if earlier else min(same or later or pairs)
    return pairs[chosen][0]
