"""Files that are written as a whole or not at all. Standard library only."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_native_id


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path beside `file` to write to; what is there at the end takes the place of `file`, at once. After an
    exception `file` is as before. Another thread or process may do the same at the same time."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.{get_native_id()}")
    try:
        yield draft
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
