"""A model in training, in one mode of checkpointing after the other, and what is measured of it."""

import contextlib
import inspect
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

import numpy  # which transformers requires
import torch
from torch import Tensor, nn

from overlay.measure import blocks, in_place, memory, segments
from overlay.measure.model import IGNORED, Task
from overlay.measure.parity import Trained, compare
from overlay.measure.settings import MODES, Settings
from overlay.measure.turns import no_collection

STEPS = 3
"""From the same weights, to look for parity."""

RATE = 1e-3

RELEVANT = ("checkpointed-twice", "granularity", "in-place-operation")
"""Rules that a card has a place for; errors of other rules are told as well."""

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor, "sgd": torch.optim.SGD}


_Hook = tuple[nn.Module, int, Any]
"""A module, the key of a forward hook on it, and the hook."""


class ModeError(ValueError):
    """This model or release cannot do a mode: says why."""


class Trial:
    """One model, its optimizer and batches.

    Modes: `off`, `reentrant`, `non-reentrant`; `group:N`, one checkpoint around N blocks; `every:N` and `offload`, the
    options of transformers from 5.22 on.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        self.settings = settings
        self.task = task
        self.model = task.model
        self.blocks = blocks.find(self.model)
        self.classes = {name: type(block).__name__ for name, block in self.blocks.items()}
        self.called: nn.Module = self.model
        self._distribute()
        self.optimizer = OPTIMIZERS[settings.optimizer](self.model.parameters(), lr=RATE)
        generator = torch.Generator().manual_seed(settings.seed + 1 + rank())
        made = [task.batch(generator) for _ in range(settings.accumulate)]
        self.batches = [{name: one.to(settings.device) for name, one in batch.items()} for batch in made]
        generator.manual_seed(settings.seed + 1000)  # the same on all ranks
        self.validation = {name: one.to(settings.device) for name, one in task.batch(generator).items()}
        with contextlib.suppress(Exception):  # what fails is asked for again, and told then
            self._look()  # what a model does in its first forward alone (BigBird exchanges modules) is done by now
        self._initial = [memory.local(one.detach()).to("cpu", copy=True) for one in self._state()]
        self._kept: dict[str, tuple[list[tuple[nn.Module, dict[str, Any]]], list[_Hook]]] = {}
        self._hooks: list[_Hook] = []
        self._restore: segments.Restore | None = None
        self._base: Trained | None = None
        self._released = False
        self._repeatable = settings.device == "cuda" and not settings.compile
        self.mode = ""
        self.release()  # what has been taken so far is for the other builds, too
        self.enable("off")

    def _distribute(self) -> None:
        if self.settings.parallel == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.settings.device, (self.settings.ranks,))
            for block in self.blocks.values():
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif self.settings.parallel == "ddp":
            self.called = nn.parallel.DistributedDataParallel(self.model)
        if self.settings.compile:
            self.called = torch.compile(self.called)

    def _state(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def enable(self, mode: str) -> None:
        """Puts the model in a mode.

        What transformers sets for a mode is kept, and set again later as it was: its own functions add a hook to the
        embeddings at each call, and give each layer a new function, for which compiled code would be compiled again.

        Raises:
            ModeError: the model, or this release, has no such mode.
        """
        if mode == self.mode:
            return
        if self._restore is not None:
            self._restore()
            self._restore = None
        self.mode = ""  # until it is there
        self.optimizer.zero_grad(set_to_none=True)  # a step that failed has left some
        kind, _, number = mode.partition(":")
        if kind == "group":
            self._apply("off")
            named = [[self.blocks[name] for name in names] for names in blocks.rows(self.blocks).values()]
            try:
                self._restore = segments.group(named, int(number), self._look)
            except segments.NoSegmentError as error:
                raise ModeError(f"these blocks cannot be grouped: {error}") from error
        else:
            self._apply(mode)
        self.mode = mode

    def _look(self) -> None:
        with torch.no_grad(), self._autocast():
            self.model(**self.batches[0])
        self._reshard()

    def _reshard(self) -> None:
        """FSDP2 leaves the root gathered after a forward, for a backward that here does not come."""
        if self.settings.parallel == "fsdp":
            for module in self.model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()

    def _apply(self, mode: str) -> None:
        names = ("gradient_checkpointing", "_gradient_checkpointing_func")
        for module, key, _ in self._hooks:
            module._forward_hooks.pop(key, None)
        self._hooks = []
        if mode in self._kept:
            flags, self._hooks = self._kept[mode]
            for module, values in flags:
                for name in names:
                    vars(module).pop(name, None)
                vars(module).update(values)
            for module, key, hook in self._hooks:
                module._forward_hooks[key] = hook
            return
        before = {module: set(module._forward_hooks) for module in self.model.modules()}
        self._set(mode)
        modules = list(self.model.modules())
        flags = [(one, {name: vars(one)[name] for name in names if name in vars(one)}) for one in modules]
        self._hooks = [
            (module, key, hook)
            for module, known in before.items()
            for key, hook in module._forward_hooks.items()
            if key not in known
        ]
        self._kept[mode] = flags, self._hooks

    def _set(self, mode: str) -> None:
        kind, _, number = mode.partition(":")
        enable = getattr(self.model, "activation_checkpointing_enable", None) or getattr(
            self.model, "gradient_checkpointing_enable", None
        )
        if kind == "off":
            # Where checkpointing was never on there is nothing to take back
            with contextlib.suppress(AttributeError, ValueError):
                self.model.gradient_checkpointing_disable()
            return
        if enable is None:
            raise ModeError("expected a model with gradient_checkpointing_enable, found none")
        options: dict[str, Any] = {}
        if kind == "offload" and self.settings.device == "cpu":
            raise ModeError("there is no accelerator to offload from")
        if kind in ("every", "offload"):
            if "offload" not in inspect.signature(enable).parameters:
                raise ModeError("this release of transformers has no such option: 5.22 has it")
            options = {"offload": True} if kind == "offload" else {"every_n_layers": int(number)}
        try:
            enable({"use_reentrant": kind == "reentrant"}, **options)
        except (ValueError, NotImplementedError) as error:
            raise ModeError(str(error)) from error

    def loss(self, i: int) -> Tensor:
        """Of a micro-batch, in the mode that is on."""
        self._draw(self.settings.seed + i)
        with self._autocast():
            return self.called(**self.batches[i]).loss / len(self.batches)

    @staticmethod
    def _draw(seed: int) -> None:
        """A seed for each forward: dropout, and what is drawn by Python or numpy, is then the same in every mode."""
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.settings.autocast:
            return contextlib.nullcontext()
        dtype = getattr(torch, self.settings.autocast)
        context: AbstractContextManager[Any] = torch.autocast(self.settings.device, dtype=dtype)
        return context

    @contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged between ranks with the last micro-batch of a step alone."""
        if self.settings.parallel == "fsdp":
            self.model.set_requires_gradient_sync(last)
            yield
        elif self.settings.parallel == "ddp" and not last:
            ddp = getattr(self.called, "_orig_mod", self.called)
            with ddp.no_sync():
                yield
        else:
            yield

    def gradients(self) -> list[float]:
        """Forward and backward of each micro-batch; their losses."""
        losses = []
        for i in range(len(self.batches)):
            with self._sync(i == len(self.batches) - 1):
                with memory.phase("forward"):
                    loss = self.loss(i)
                with memory.phase("backward"):
                    loss.backward()
                losses.append(float(loss.detach()))
        return losses

    def step(self) -> None:
        """A training step; gradients are freed at its end, as most loops do."""
        self.gradients()
        with memory.phase("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def cpu_time(self) -> bool:
        """Whether a step is timed by the CPU time of this process."""
        return self.settings.device == "cpu" and self.settings.ranks == 1 and torch.get_num_threads() == 1

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.settings.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, mode: str, steps: int) -> float:
        """Of a step: of CPU time where one thread does it all, so that what else the machine does is not in it."""
        self.enable(mode)
        if self._released:
            self.step()  # takes memory again that another process has had in the meantime
            self._released = False
        self.synchronize()
        clock = time.process_time if self.cpu_time else time.perf_counter
        with no_collection():
            begin = clock()
            for _ in range(steps):
                self.step()
            self.synchronize()
            taken = clock() - begin
        return taken / steps

    def release(self) -> None:
        """Gives the memory back that the allocator keeps, for another process to have its turn."""
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()
            self._released = True

    def enlarge(self, factor: int) -> None:
        """Makes each micro-batch so many times as large, of the same samples."""
        self.batches = [{name: torch.cat([one] * factor) for name, one in batch.items()} for batch in self.batches]

    def memory(self, mode: str) -> dict[str, Any]:
        """Bytes: what is there between steps, and a step's curve beyond that."""
        self.enable(mode)
        self.step()  # the optimizer's state is there from the first step on
        inputs = [one for batch in self.batches for one in batch.values()]
        resident = {
            "parameters": memory.storage_bytes(self.model.parameters()),
            "buffers": memory.storage_bytes(self.model.buffers()),
            "optimizer": memory.storage_bytes(memory.optimizer_state(self.optimizer)),
            "inputs": memory.storage_bytes(inputs),
        }
        gradients = memory.storage_bytes(one for one in self.model.parameters() if one.requires_grad)
        remove = memory.watch_gradients(self.model.parameters())
        try:
            with no_collection():
                curve = memory.curve(self.step, self.settings.device)
        finally:
            remove()
        peak = sum(resident.values()) + curve.peak
        if self.settings.device == "cuda":
            with no_collection():
                peak = memory.allocator_peak(self.step)
        return {"resident": resident, "gradients": gradients, "peak": peak, "curve": curve.plain()}

    def saved(self, mode: str) -> dict[str, Any]:
        """Bytes that autograd holds after a forward, by block, the blocks that were checkpointed, the modules that were
        in others, and how many blocks were called at all: a model of text and images is given text alone.

        Of the model as it is without the compiler, which autograd's hooks do not look into.
        """
        self.enable(mode)
        found = memory.Saved(self.model)
        checkpointed: dict[str, int] = {}
        called: set[str] = set()

        def told(name: str | None, checkpoint: bool) -> None:
            found.block = name
            if name is not None:
                called.add(name)
            if name is not None and checkpoint:
                checkpointed[name] = checkpointed.get(name, 0) + 1

        self._draw(self.settings.seed)
        recomputed = blocks.Recomputed(self.blocks)
        with recomputed.watched() as between:
            with blocks.listening(self.model, self.blocks, told), found.hooks(), self._autocast():
                loss = self.model(**self.batches[0]).loss
            between()
            # FSDP2's hooks wait for it
            if self.settings.parallel == "fsdp" or (mode in MODES[1:] and called - checkpointed.keys()):
                loss.backward()
                self.optimizer.zero_grad(set_to_none=True)
        for name in recomputed.whole():
            if name not in checkpointed:
                checkpointed[name] = 1
                found.claim(name, recomputed.given[name])
        return {
            "blocks": {name: found.by_block.get(name, 0) for name in self.blocks if name in called},
            "outside": found.by_block.get(None, 0),
            "checkpointed": checkpointed,
            "parts": {name: parts for name, parts in recomputed.parts().items() if name not in checkpointed},
            "called": len(called),
        }

    def parity(self, mode: str, base: bool) -> dict[str, Any]:
        """Trains a few steps from the first weights on.

        Args:
            base: this mode is what the others are compared with.
        """
        try:
            with self._deterministic():
                trained = self._train(mode)
        except torch.OutOfMemoryError:  # some deterministic ones take more than what a step fits in
            if not self._repeatable or self.settings.ranks > 1:
                raise
            self._repeatable = False
            trained = self._train(mode)
        if base:
            self._base = trained
        if self._base is None:
            raise ModeError("nothing has been trained to compare with")
        difference = compare(trained, self._base)
        return {"losses": trained.losses, "metrics": trained.metrics, **difference.plain()}

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """On CUDA some operators add in another order each time, the backward of attention for one, by which modes
        would differ that are the same. Compiled code would be compiled again for that."""
        if not self._repeatable:
            yield
            return
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def _train(self, mode: str) -> Trained:
        self._reset()
        self.enable(mode)
        trained = Trained()
        for step in range(STEPS):
            trained.losses += self.gradients()
            if step == 0:
                trained.gradients = {
                    name: None if one.grad is None else memory.local(one.grad.detach()).to("cpu", copy=True)
                    for name, one in self.model.named_parameters()
                    if one.requires_grad
                }
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        trained.metrics = self._validate()
        return trained

    def _reset(self) -> None:
        with torch.no_grad():
            for tensor, initial in zip(self._state(), self._initial, strict=True):
                memory.local(tensor).copy_(initial)
        self.optimizer.state.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def _validate(self) -> dict[str, float]:
        self.model.eval()
        try:
            with torch.no_grad(), self._autocast():
                output = self.model(**self.validation)
        finally:
            self.model.train()
        self._reshard()
        metrics = {"validation loss": float(output.loss)}
        labels, logits = self.validation.get("labels"), getattr(output, "logits", None)
        if labels is not None and logits is not None:
            metrics["validation accuracy"] = self._accuracy(logits, labels)
        return metrics

    def _accuracy(self, logits: Tensor, labels: Tensor) -> float:
        guess = logits.argmax(1 if logits.dim() == 4 else -1)  # of pixels, or of words
        if self.task.causal:
            guess, labels = guess[:, :-1], labels[:, 1:]
        counted = labels != IGNORED
        return float((guess == labels)[counted].double().mean())

    def findings(self, mode: str) -> list[dict[str, str]]:
        """What the checks find in a mode (docs/checks.md), and in-place operations that a forward has run into."""
        from overlay import check

        self.enable(mode)
        found = [asdict(one) for one in check(self.model) if one.code in RELEVANT or one.severity == "error"]
        named = " ".join(one["what"] for one in found)
        for change in in_place.changes(self.model, self.blocks, self._look):
            if change.line not in named:
                found.append(asdict(change.finding()))
        return found

    def overwritten(self) -> list[dict[str, str]]:
        """Where the forward changes in place what its backward needs."""
        self.enable("off")

        def run() -> None:
            with self._autocast():
                self.model(**self.batches[0])
            self._reshard()

        return [asdict(one.finding()) for one in in_place.overwritten(self.model, run)]


def rank() -> int:
    """This process's; 0 where there is one alone."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
