"""RECORD: path, hash and size of each file of a wheel (PEP 427) or of an installed package (PEP 376)."""

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Sequence

from overlay.errors import OverlayError


def parse(content: bytes, name: str) -> list[list[str]]:
    """The rows of a RECORD: path, hash, size.

    Args:
        content: the whole file.
        name: whose it is, for messages.

    Raises:
        OverlayError: it is no comma-separated UTF-8, or a row has not three fields.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(content.decode("utf-8"))) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise OverlayError(
            f"{name}: RECORD: expected comma-separated UTF-8, found: {error}: do not use this file"
        ) from None
    for row in rows:
        if len(row) != 3:
            raise OverlayError(f"{name}: RECORD: expected three fields in each row, found {row}: do not use this file")
    return rows


def row(path: str, content: bytes) -> list[str]:
    """The row of a file with this content."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode("ascii")
    return [path, f"sha256={digest}", str(len(content))]


def write(rows: Iterable[Sequence[str]], line_end: str = "\n") -> bytes:
    """A RECORD of these rows."""
    text = io.StringIO()
    csv.writer(text, lineterminator=line_end).writerows(rows)
    return text.getvalue().encode("utf-8")
