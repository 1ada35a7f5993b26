"""Patches as mails of the user's, for `git am`: without what only this project knows of them."""

import re
from collections.abc import Sequence
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTPUTF8
from pathlib import Path

from overlay.errors import OverlayError
from overlay.pull_request.own import Identity
from overlay.queue.series import Patch

_NAMES = re.compile(r"modeling[-_ ]overlay|\+overlay\b|\boverlay\.", re.IGNORECASE)
"""How this project is named, by itself and in the label of a patched wheel."""


def write(patches: Sequence[Patch], author: Identity, folder: Path) -> list[Path]:
    """Writes a mail for each patch into `folder`, in the order in which `git am` takes them.

    A mail has the subject, the reason and the diff of the patch, and of its trailers where it was taken from (`Origin:
    backport, URL`).

    Raises:
        OverlayError: a patch names this project in what it adds or says: upstream has no use for that.
    """
    files = []
    for number, patch in enumerate(patches, 1):
        mail = EmailMessage(policy=SMTPUTF8.clone(linesep="\n", max_line_length=0))
        mail["From"] = Address(author.name, addr_spec=author.email)
        mail["Subject"] = f"[PATCH] {patch.subject}"
        _check(patch)
        body = f"{message(patch)}\n---\n\n{patch.diff}"
        mail.set_content(body, cte="8bit")
        file = folder / f"{number:04}.patch"
        file.write_bytes(b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n" + bytes(mail))
        files.append(file)
    return files


def message(patch: Patch) -> str:
    """The body of the commit message."""
    origin = re.fullmatch(r"backport, (\S+)", patch.trailers["Origin"])
    return patch.reason + (f"\n\nThis is a backport of {origin[1]}." if origin else "")


def _check(patch: Patch) -> None:
    rows = [patch.subject, *message(patch).splitlines()]
    rows += [row[1:] for row in patch.diff.splitlines() if row.startswith("+")]
    found = next((row for row in rows if _NAMES.search(row)), None)
    if found is not None:
        raise OverlayError(
            f"{patch.file}: expected nothing of this project in what a pull request takes, found {found.strip()!r}: "
            "take pull-request out of its Delivery:, or say it without"
        )
