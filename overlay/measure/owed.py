"""The rows that a worker owes: its first one says what each of them is of, and each of them comes once.

Standard library only.
"""

import contextlib
import json
from collections.abc import Generator, Sequence

from overlay.measure.experiments.experiment import Row
from overlay.measure.rows import WorkerError


def checked(rows: Generator[Row, None, None]) -> Generator[Row, None, None]:
    """The rows of a worker as they come, which end with its own.

    Args:
        rows: the first has `owed`, a list of what the others are of: the same few fields of each, for JSON.

    Raises:
        WorkerError: a row came twice, is of nothing that is owed, or did not come; names it. What `rows` raises, too.
    """
    with contextlib.closing(rows):
        head = next(rows, None)
        if head is None:
            raise WorkerError("gave nothing")
        yield head
        owed: Sequence[Row] = head["owed"]
        waiting = dict.fromkeys(map(_name, owed))
        given = set()
        fields = list(owed[0]) if owed else []
        for row in rows:
            name = _name({field: row[field] for field in fields if field in row})
            if name in given:
                raise WorkerError(f"gave {name} twice")
            if name not in waiting:
                raise WorkerError(f"gave {name}, which it does not owe")
            del waiting[name]
            given.add(name)
            yield row
        if waiting:
            first, *others = waiting
            raise WorkerError(f"left out {first}" + (f" and {len(others)} more" if others else ""))


def _name(row: Row) -> str:
    """What a row is of: `case 2 forwards, reentrant true`."""
    return ", ".join(
        f"{field} {value if isinstance(value, str) else json.dumps(value)}" for field, value in row.items()
    )
