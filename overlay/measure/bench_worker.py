"""`python bench_worker.py SETTINGS.json`: one build and one model, which answers on stdin and stdout (see turns.py).

With several ranks this process is the first of them; it starts the others, and all answer each question together.
"""

import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from overlay.measure import blocks, model, ranks
from overlay.measure.experiments import loaded
from overlay.measure.settings import Settings
from overlay.measure.step import Trial
from overlay.measure.turns import serve


class Answers:
    """What a rank answers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._trial: Trial | None = None

    @property
    def trial(self) -> Trial:
        if self._trial is None:
            self._trial = Trial(model.build(self.settings), self.settings)
            gc.collect()
            gc.freeze()  # what is there by now stays: each collection would look at all of it
        return self._trial

    def about(self) -> dict[str, Any]:
        trial = self.trial
        device = self.settings.device
        free = total = None
        if device == "cuda":
            free, total = torch.cuda.mem_get_info()
            free += torch.cuda.memory_reserved()  # what this process has by now is its own
        return {
            "transformers": transformers.__version__,
            "state": loaded.state("transformers"),
            "series": loaded.series("transformers"),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
            "device memory": total,
            "free": free,
            "threads": torch.get_num_threads(),
            "clock": "CPU time" if trial.cpu_time else "wall time",
            "parameters": sum(one.numel() for one in trial.model.parameters()),
            "tokens": trial.task.tokens,
            "sizes": dict(trial.task.sizes),
            "blocks": trial.classes,
            "longest": max((len(row) for row in blocks.rows(trial.blocks).values()), default=0),
        }

    def ask(self, what: str, *arguments: Any) -> Any:
        if what == "about":
            return self.about()
        return getattr(self.trial, what)(*arguments)


QUESTIONS = ("about", "seconds", "memory", "saved", "parity", "findings", "overwritten", "release", "enlarge")


def main(told: Path) -> None:
    settings = Settings.parse(told.read_text("utf-8"))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if settings.device == "cuda" and torch.cuda.device_count() < settings.ranks:
        several = "s" * (settings.ranks > 1)
        sys.exit(
            f"expected {settings.ranks} NVIDIA GPU{several} and a CUDA build of torch, found "
            f"{torch.cuda.device_count()} with torch {torch.__version__}: take --device cpu, --torch 2.14 (such a "
            "build), or --here with your own torch"
        )
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with ranks.together(settings, Answers, told.parent) as ask:
        serve({what: lambda *arguments, what=what: ask(what, *arguments) for what in QUESTIONS})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
