"""`overlay doctor`: what `overlay.status()` says, for a reader or for a program.

`--json` prints one object, whose form is stable: keys may be added, and what is here does not change while `format` is
1.

    {
      "format": 1,
      "live": true,                        whether any fault is; the exit code is 1 then
      "python": "/opt/venv/bin/python",    the interpreter that was looked at
      "overlay": {
        "version": "0.2.0",
        "location": "/venv/lib/python3.11/site-packages/overlay",
        "active": false,                   covered modules are loaded with their fix in a process like this one
        "how": "not active: ...",          by what it is, or why it is not
        "mend": "python -m pip install ..."  what makes it active, or null
      },
      "packages": [                        those with a live fault first
        {
          "project": "transformers",
          "version": "5.14.1",             or null
          "location": "/opt/venv/lib/python3.11/site-packages/transformers",  or null
          "state": "stock",                overlay.packages.State
          "files": [                       covered files; state: overlay.packages.FileState
            {"path": "transformers/modeling_layers.py", "blob": "07757ba7471a...", "state": "stock"}
          ],
          "faults": [{"code": "...", "text": "..."}],   those that are live
          "mend": "python -m pip install ...",          or null
          "notes": ["..."]
        }
      ]
    }
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from overlay import manifest, mends, packages, terminal
from overlay.mends import Overlay
from overlay.packages import PackageStatus
from overlay.terminal import wrapped

FORMAT = 1

_BOLD, _RED, _PLAIN = "\033[1m", "\033[1;31m", "\033[0m"


def main(form: str) -> int:
    """Prints the report.

    Args:
        form: `text` or `json`.

    Returns:
        The exit code: 1 where a fault is live, else 0.

    Raises:
        OverlayError: as `overlay.status`.
    """
    found = packages.status()
    here = mends.overlay_here()
    print(to_json(found, here) if form == "json" else _text(found, here))  # noqa: T201
    return int(any(package.faults for package in found))


def to_json(found: Sequence[PackageStatus], here: Overlay) -> str:
    """The report for a program; see above."""
    listed = {
        name: value for name, value in asdict(here).items() if name in ("version", "location", "active", "how", "mend")
    }
    report = {
        "format": FORMAT,
        "live": any(package.faults for package in found),
        "python": sys.executable,
        "overlay": listed,
        "packages": [asdict(package) for package in found],
    }
    return json.dumps(report, indent=2)


def _text(found: Sequence[PackageStatus], here: Overlay) -> str:
    """As wide as the terminal is, and with the verdict in bold where it is one."""
    text = to_text(found, here, terminal.width())
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    verdict, _, rest = text.partition("\n\n")
    return f"{_RED if any(one.faults for one in found) else _BOLD}{verdict}{_PLAIN}\n\n{rest}"


def to_text(found: Sequence[PackageStatus], here: Overlay, width: int) -> str:
    """The report for a reader: the verdict, a table, and what there is to say of each package."""
    return "\n".join(_lines(found, here, width))


def _lines(found: Sequence[PackageStatus], here: Overlay, width: int) -> Iterator[str]:
    yield from wrapped(_verdict(found), "", width)
    yield ""
    yield from wrapped(sys.executable, "python   ", width)
    yield from wrapped(f"{here.version}, {here.how}", "overlay  ", width)
    yield ""
    rows = [(_mark(one), one.project, one.version or "-", _said(one)) for one in found]
    sizes = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  ".join([*(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)), row[3]]).rstrip()
    told: dict[str, str] = {}
    for one in found:
        if one.faults or one.notes:
            yield ""
            yield from _details(one, here, told, width)


def _verdict(found: Sequence[PackageStatus]) -> str:
    live = [one.project for one in found if one.faults]
    if live:
        return f"FAULT LIVE in {', '.join(live)}: mend it before you train"
    covered = [one for one in found if one.project in manifest.PROJECTS]
    if all(one.state == "not installed" for one in covered):
        return (
            f"Neither {' nor '.join(manifest.PROJECTS)} is installed for this Python: if you train with another, run "
            "that one: PYTHON -m overlay doctor"
        )
    if any(one.state in ("unknown", "partly patched") for one in covered):
        return "No fault is known to be live; not all of the content is known"
    return "No fault is live"


def _mark(one: PackageStatus) -> str:
    return "!" if one.faults else " "


def _said(one: PackageStatus) -> str:
    return "" if one.state == "beside" else one.state


def _details(one: PackageStatus, here: Overlay, told: dict[str, str], width: int) -> Iterator[str]:
    yield " ".join(filter(None, [one.project, one.version, _said(one) and f"({_said(one)})"]))
    for fault in one.faults:
        yield from wrapped(f"{fault.code}: {fault.text}", "  fault  ", width)
    if one.mend in told:
        yield f"  mend   as for {told[one.mend]}"
    elif one.mend is not None:
        told[one.mend] = one.project
        yield "  mend"
        yield from (f"    {line}" for line in _command(one.mend, width - 4))
    for note in one.notes:
        if note != f"the overlay is {here.how}":  # said above
            yield from wrapped(note, "  note   ", width)
    if one.location is not None:
        yield from wrapped(one.location, "  at     ", width)


def _command(command: str, width: int) -> Iterator[str]:
    """A shell command on lines that a shell joins again; a line of Python and words stay as they are."""
    if len(command) <= width or command.startswith("import "):
        yield command
        return
    line = ""
    for word in (word if word == "&&" else shlex.quote(word) for word in shlex.split(command)):
        if line and len(line) + len(word) + 3 > width:
            yield f"{line} \\"
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    yield line
