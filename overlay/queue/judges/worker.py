"""The process that judges run in: `python -I -S`, started by `verdicts` in an empty folder.

What is judged comes as JSON on standard input, a list of `[project, code, {path: content}]` with content as Latin-1;
what was found goes to standard output, a line `[number, state, why, whether that will be so again]` for each as it is
done. Each is judged in a fork
of its own, so that none sees what another has left behind, and one that hangs or dies takes no other with it.

A fork has limits on time, memory and written files, and an audit hook (PEP 578) that refuses the network, other
processes and writing. That keeps an accident small. It is no sandbox: code that means harm can get round it.
"""

import contextlib
import gc
import importlib.metadata  # here, so that it is imported once  # noqa: F401
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from overlay.queue.judges import RULES, CannotJudgeError, Files, State, fusers, layers, models, stand_ins

MEMORY = 1 << 30
"""Bytes of address space: the interpreter and the largest file take a tenth of it."""

LONGEST = 300
"""Characters of a reason."""

_REFUSED = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "ctypes.")
_CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown")


def main(seconds: int) -> None:
    """Judges what comes on standard input, each in at most so many seconds."""
    gc.disable()  # a fork is short; looking for cycles while a large file is parsed takes half of it
    sys.path.pop()  # the folder of this project, which may be one with torch in it
    work: list[tuple[str, str, dict[str, str]]] = json.load(sys.stdin)
    for number, (project, code, contents) in enumerate(work):
        files = {path: text.encode("latin-1") for path, text in contents.items()}
        print(json.dumps([number, *_forked(project, code, files, seconds)]), flush=True)  # noqa: T201


def _forked(project: str, code: str, files: Files, seconds: int) -> tuple[State, str, bool]:
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        _judge_in_fork(project, code, files, seconds, target)
    os.close(target)
    said, ended = b"", 0
    try:
        with _alarm(seconds + 1), open(source, "rb") as answer:  # noqa: PTH123 - a descriptor
            said = answer.read()
            ended = os.waitpid(child, 0)[1]
    except TimeoutError:  # it has switched off its own alarm, or has stopped
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ended = signal.SIGALRM
    status = os.waitstatus_to_exitcode(ended)
    with contextlib.suppress(ValueError):
        state, why = json.loads(said)
        return state, why, True
    if status in (-signal.SIGALRM, -signal.SIGXCPU):
        return "not judged", f"it took longer than {seconds} s", False
    return "not judged", f"its process ended with {status}", False


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    """Raises TimeoutError inside after so many seconds."""

    def late(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _judge_in_fork(project: str, code: str, files: Files, seconds: int, target: int) -> NoReturn:
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(silent, descriptor)
        _confine(seconds)
        state, why = judge(project, code, files)
        os.write(target, json.dumps([state, " ".join(why.split())[:LONGEST]]).encode())
    finally:
        os._exit(1)


def _confine(seconds: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    for what, limit, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # at the first of the two there is a signal that can be told
        (resource.RLIMIT_AS, MEMORY, MEMORY),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit of the address space
            resource.setrlimit(what, (limit, hard))
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event.startswith(_REFUSED) or event in _CHANGING:
        raise PermissionError(f"{event} is refused here")


def judge(project: str, code: str, files: Files) -> tuple[State, str]:
    """Judges in this process. Whatever goes wrong is a reason not to judge, and so is a stand-in that was missing."""
    module, _, function = RULES[project][code].place.partition(".")
    try:
        verdict = getattr({"layers": layers, "models": models, "fusers": fusers}[module], function)(files)
        state, why = verdict.state, verdict.why
    except CannotJudgeError as error:
        state, why = "not judged", str(error)
    except BaseException as error:  # SystemExit, too
        state, why = "not judged", f"{type(error).__name__}: {error}"
    if stand_ins.missed:
        return "not judged", f"it uses {stand_ins.missed[0]}, for which there is no stand-in"
    return state, why
