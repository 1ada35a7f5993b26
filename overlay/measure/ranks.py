"""The ranks of a worker, which answer each question together."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from overlay.measure import gloo, group, parity
from overlay.measure.settings import Settings

PATIENCE = timedelta(hours=2)
"""How long a rank waits for a question; who asks has a shorter patience with an answer."""


class Answerer(Protocol):
    """Answers on one rank."""

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer to a question."""


class RankError(RuntimeError):
    """A rank failed: its message begins with the name of what it raised."""


@contextmanager
def together(settings: Settings, make: Callable[[Settings], Answerer], folder: Path) -> Iterator[Callable[..., Any]]:
    """Starts the other ranks, and yields what asks all of them. None outlives the context.

    Args:
        folder: of whoever asks, for the file that the ranks meet at: this process is killed and cleans nothing up.
        make: makes what answers on a rank.
    """
    if settings.ranks == 1:
        if settings.device == "cuda":
            torch.cuda.set_device(0)
        yield make(settings).ask
        return
    group.meet_on_this_machine()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    context = multiprocessing.get_context(group.start_method("nccl" if settings.device == "cuda" else "gloo"))
    others = [
        context.Process(target=_other, args=(rank, folder, settings, make), daemon=True)
        for rank in range(1, settings.ranks)
    ]
    for process in others:
        process.start()
    try:
        _join(0, folder, settings)
        answerer = make(settings)
        yield lambda *question: _ask(answerer, question, settings)
    finally:
        for process in others:
            process.kill()
        for process in others:
            process.join()


def _join(rank: int, folder: Path, settings: Settings) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    backend = "gloo"
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    gloo.one_thread()
    dist.init_process_group(
        backend, init_method=(folder / "meeting").as_uri(), rank=rank, world_size=settings.ranks, timeout=PATIENCE
    )


def _other(rank: int, folder: Path, settings: Settings, make: Callable[[Settings], Answerer]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends this one
    _join(rank, folder, settings)
    answerer = make(settings)
    while True:
        question: list[Any] = [None]
        dist.broadcast_object_list(question, device=torch.device("cpu"))
        _answer(answerer, question[0], settings)


def _ask(answerer: Answerer, question: Sequence[Any], settings: Settings) -> Any:
    try:
        dist.broadcast_object_list([question], device=torch.device("cpu"))
        answers = _answer(answerer, question, settings)
    except RuntimeError as error:
        traceback.print_exc()
        raise SystemExit("a rank has ended, for want of memory or by a fault") from error  # nobody answers any more
    for answer in answers:
        if "error" in answer:
            raise RankError(answer["error"])
    return combine(question[0], [answer["result"] for answer in answers])


def _answer(answerer: Answerer, question: Sequence[Any], settings: Settings) -> list[Any]:
    try:
        own: dict[str, Any] = {"result": answerer.ask(*question)}
    except Exception as error:
        traceback.print_exc()
        own = {"error": f"{type(error).__name__}: {error}"}
    answers: list[Any] = [None] * settings.ranks
    dist.all_gather_object(answers, own)
    return answers


def combine(what: str, answers: Sequence[Any]) -> Any:
    """One answer of all ranks': the slowest, the one with the highest peak, or the one with the largest difference."""
    if what == "seconds":
        return max(answers)
    if what == "memory":
        return max(answers, key=lambda one: int(one["peak"]))
    if what == "parity":
        return parity.worst(answers)
    return answers[0]
