"""Processes that take turns: one for each build of transformers, of which only one works at a time.

So what the machine does besides, and its clock, change between rounds and not between builds. A worker calls `serve`;
who measures starts one for each build, and asks them in order, round by round. Each question and each answer is
a line of JSON. Standard library only: both ends run beside other people's packages.
"""

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from overlay import processes

T = TypeVar("T")
REPLIES = "OVERLAY_TURNS_REPLIES"
"""The variable that tells a worker the descriptor to answer on."""


class TurnError(Exception):
    """A worker ended, took too long, or says that what it was asked for failed."""


@dataclass(frozen=True)
class Turn:
    """A worker that waits for its turn."""

    process: subprocess.Popen[str]
    questions: IO[str]
    replies: IO[str]
    said: IO[str]
    timeout: float

    def ask(self, *question: object) -> Any:
        """The worker's answer to a question: the name of what is to be answered, and arguments.

        Raises:
            TurnError: there is none; says why, with what the worker wrote to stderr where it ended.
        """
        with contextlib.suppress(BrokenPipeError):
            self.questions.write(json.dumps(question) + "\n")
            self.questions.flush()
        ready, _, _ = select.select([self.replies], [], [], self.timeout)
        line = self.replies.readline() if ready else ""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30 if ready else 0)  # its last words may still be on their way
            self.said.seek(0)
            ended = "was killed" if self.process.poll() == -signal.SIGKILL else "ended"
            how = ended if ready else f"took more than {self.timeout:.0f} s"
            raise TurnError(f"the worker {how}: {question}\n{self.said.read()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise TurnError(answer["error"])
        return answer["result"]


@contextlib.contextmanager
def turn(command: Sequence[str], environment: Mapping[str, str], timeout: float = 300) -> Iterator[Turn]:
    """Start a worker; it and what it started end with the context.

    Args:
        timeout: how many seconds an answer may take.
    """
    ours, theirs = os.pipe()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        os.fdopen(ours, encoding="utf-8") as replies,
    ):
        try:
            process: subprocess.Popen[str] = processes.start(
                command,
                env={**environment, REPLIES: str(theirs)},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(theirs,),
                text=True,
            )
        except BaseException:
            os.close(theirs)
            raise
        assert process.stdin is not None
        try:
            os.close(theirs)
            yield Turn(process, process.stdin, replies, said, timeout)
        finally:
            processes.kill_group(process)
            with contextlib.suppress(BrokenPipeError):  # a question that nobody has read
                process.stdin.close()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is collected before what is measured, and not within."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def serve(answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer what is asked on stdin until it ends. What anybody prints meanwhile is not in the way.

    An exception is an answer, too: its name and its first line.
    """
    with os.fdopen(int(os.environ[REPLIES]), "w", encoding="utf-8") as replies:
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            try:
                answer = {"result": answers[what](*arguments)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            replies.write(json.dumps(answer) + "\n")
            replies.flush()


def rounds(count: int, builds: Sequence[T]) -> Iterator[Sequence[T]]:
    """The order of each round: forwards and backwards in turn, so that a drift favours nobody."""
    for i in range(count):
        yield builds if i % 2 == 0 else builds[::-1]
