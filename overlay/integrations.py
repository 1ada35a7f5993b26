"""Checks where a training framework starts to train. Importing this module imports transformers."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from overlay.checks import check, rules
from overlay.checks.finding import CheckError, Finding
from overlay.checks.subject import in_training
from overlay.errors import OverlayError

if TYPE_CHECKING:
    from torch import nn

_logger = logging.getLogger(__name__)


class PreflightCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not there where types are checked
    """Runs `overlay.check` before the first step of a `transformers.Trainer`, and stops on an error.

    The model is the one that the `Trainer` trains: sharded, partitioned, with its checkpointing on, and for the time of
    the check in training mode, which the `Trainer` turns on at each step. What one rank finds counts for all of them:
    all raise, so that none waits for another. Warnings are logged, once, by the first rank.

    ```python
    Trainer(model, args, train_dataset=data, callbacks=[PreflightCallback()])
    ```

    Args:
        ignore: codes of rules whose findings do not count.

    Raises:
        OverlayError: `ignore` names a rule that there is none of.
        CheckError: when training starts, with all findings.
        OverlayError: then, the check raised on another rank.
    """

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self.ignore = frozenset([ignore] if isinstance(ignore, str) else ignore)
        known = {str(rule.CODE) for rule in rules()}
        if unknown := sorted(self.ignore - known):
            expected, found = ", ".join(sorted(known)), ", ".join(unknown)
            raise OverlayError(f"ignore: expected codes of rules ({expected}), found {found}: take them out")

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: "nn.Module", optimizer: Any = None, **kwargs: Any
    ) -> None:
        """What the `Trainer` calls, on each rank."""
        found: list[Finding] = []
        raised: Exception | None = None
        try:
            with in_training(model):
                found = check(model, optimizer=optimizer)
        except Exception as error:  # the other ranks wait for what this one has to say
            raised = error
        mine = [finding for finding in found if finding.code not in self.ignore]
        findings, failed = _of_all_ranks(mine, "" if raised is None else f"{type(raised).__name__}: {raised}")
        if raised is not None:
            raise raised
        if failed:
            raise OverlayError(f"expected a check on each rank, found {failed} on another one: see its error")
        for finding in findings if args.process_index == 0 else ():
            if finding.severity != "error":
                _logger.log(logging.WARNING if finding.severity == "warning" else logging.INFO, "%s", finding)
        if any(finding.severity == "error" for finding in findings):
            raise CheckError(findings)


def _of_all_ranks(mine: list[Finding], raised: str) -> tuple[list[Finding], str]:
    """All findings, each once, and what the first rank raised that raised anything."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return mine, raised
    gathered: list[tuple[list[Finding], str]] = [([], "")] * distributed.get_world_size()
    distributed.all_gather_object(gathered, (mine, raised))
    findings = list(dict.fromkeys(finding for found, _ in gathered for finding in found))
    return findings, next((error for _, error in gathered if error), "")
