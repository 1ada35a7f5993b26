"""Results in the user's cache, each by a hash of all that it was made from, the code that made it included."""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from overlay import cache


def key(*parts: object) -> str:
    """The hash (sha256, hex) of `parts`, which JSON can write, and of the version of Python."""
    return hashlib.sha256(json.dumps([sys.version_info[:2], *parts]).encode()).hexdigest()


def content_of(files: Iterable[Path]) -> str:
    """The hash (sha256, hex) of the names and contents of files, in this order."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def find(kind: str, key: str) -> Any:
    """What was kept, or None: also where the file is not as it was written."""
    try:
        kept = json.loads(_place(kind, key).read_bytes())
        return kept["value"] if kept["sha256"] == _digest(kept["value"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep(kind: str, key: str, value: Any) -> None:
    """Keeps `value`, which JSON can write and is not None.

    Raises:
        OverlayError: the cache folder cannot be made.
    """
    cache.write(_place(kind, key), json.dumps({"sha256": _digest(value), "value": value}))


def forget(kind: str, key: str) -> None:
    """Removes what was kept, if anything was."""
    _place(kind, key).unlink(missing_ok=True)


def _place(kind: str, key: str) -> Path:
    return cache.folder() / kind / f"{key}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
