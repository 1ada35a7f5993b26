"""Which faults a release has: asks the judges, which run its own code in a process apart (`overlay.queue.judges`).

Equal files are judged once, and what was found is kept in the user's cache by the content of the files and of the
judges.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from overlay import processes
from overlay.progress import say
from overlay.queue import git, judges, kept
from overlay.queue.judges import RULES, Verdict
from overlay.queue.members import Members

LIMIT = 300
"""Seconds that the process of all judges may take."""

EACH = 10
"""Seconds that one of them may take."""

_START = (
    "import sys; sys.path.append(sys.argv[1]); from overlay.queue.judges.worker import main; main(int(sys.argv[2]))"
)
_KIND = "judged"

Work = tuple[str, str, Mapping[str, bytes]]
"""A project, the code of a fault and the files that its judge looks at."""


def judge(project: str, codes: Sequence[str], contents: Sequence[Members]) -> list[dict[str, Verdict]]:
    """Whether each fault is live in each release.

    Args:
        project: its name in the lock.
        codes: the faults.
        contents: the touched files of each release, by path in its wheel.

    Returns:
        For each release a verdict on each fault, by its code.
    """
    found: list[dict[str, Verdict]] = []
    asked: dict[str, Work] = {}
    keys: list[dict[str, str]] = []
    for files in contents:
        verdicts: dict[str, Verdict] = {}
        places: dict[str, str] = {}
        for code in codes:
            rule = RULES.get(project, {}).get(code)
            missing = [path for path in rule.paths if files.get(path) is None] if rule else []
            if rule is None:
                verdicts[code] = Verdict("not judged", "there is no judge of this fault")
            elif missing:
                verdicts[code] = Verdict("not judged", f"there is no {missing[0]} in the wheel")
            else:
                needed = {path: files[path] or b"" for path in rule.paths}
                blobs = {path: git.blob_id(content) for path, content in needed.items()}
                places[code] = kept.key(_judges(), project, code, blobs)
                asked[places[code]] = (project, code, needed)
        found.append(verdicts)
        keys.append(places)
    answers = _answers(asked)
    return [
        {code: verdicts[code] if code in verdicts else answers[places[code]] for code in codes}
        for verdicts, places in zip(found, keys, strict=True)
    ]


def _answers(asked: Mapping[str, Work]) -> dict[str, Verdict]:
    """The verdicts by key, from the cache or else from the judges."""
    answers: dict[str, Verdict] = {}
    for key in asked:
        known = kept.find(_KIND, key)
        if known is not None:
            answers[key] = Verdict(*known)
    new = [key for key in asked if key not in answers]
    if new:
        say(f"running the code of {len(new)} faults in a process apart, to see whether they are live")
        for key, (verdict, lasting) in zip(new, run([asked[key] for key in new]), strict=True):
            answers[key] = verdict
            if lasting:
                kept.keep(_KIND, key, [verdict.state, verdict.why])
    return answers


def run(work: Sequence[Work]) -> list[tuple[Verdict, bool]]:
    """What the judges say, and whether they would say it again: in one process, and a fork of it for each."""
    given = [
        (project, code, {path: content.decode("latin-1") for path, content in files.items()})
        for project, code, files in work
    ]
    missing = (Verdict("not judged", f"the judges took longer than {LIMIT} s, or ended before it"), False)
    found = [missing] * len(work)
    for line in _said(json.dumps(given)).splitlines():
        number, state, why, lasting = json.loads(line)
        found[number] = (Verdict(state, why), lasting)
    return found


def _said(text: str) -> str:
    """What the process prints, also where it was ended."""
    top = Path(judges.__file__).parents[3]
    with tempfile.TemporaryDirectory(prefix="overlay-") as folder:
        process: subprocess.Popen[str] = processes.start(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START, str(top), str(EACH)],
            cwd=folder,
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        try:
            said, _ = process.communicate(text, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        finally:  # none of its forks outlives it
            processes.kill_group(process)
    return said[: said.rfind("\n") + 1]


@cache
def _judges() -> str:
    """The hash of the code of the judges."""
    from overlay import versions

    return kept.content_of([*sorted(Path(judges.__file__).parent.glob("*.py")), Path(versions.__file__)])
