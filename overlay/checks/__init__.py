"""What is wrong with a model or an environment: one rule a module in this folder (`fsdp2_reentrant.py`, …).

A rule is a module that has
- a docstring: its first line says what it finds, the rest (Markdown) when it fires, why that matters, and what to do;
  `docs/checks.md` is made of it;
- `CODE`, its name in findings and in the documentation, and
- `in_model(subject)`, `in_environment(environment)` or both: generators of findings. They import torch and other
  packages inside themselves, change nothing in the model, run no forward, and never raise on an unusual model.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay.checks.finding import CheckError, Finding

if TYPE_CHECKING:
    from torch import nn

_ORDER = {"error": 0, "warning": 1, "info": 2}
_NO_RULES = frozenset({"__main__", "environment", "finding", "report", "subject"})


def rules() -> list[ModuleType]:
    """Every rule, in the order of the codes."""
    from importlib import import_module
    from pkgutil import iter_modules

    found = [import_module(f"{__name__}.{item.name}") for item in iter_modules(__path__) if item.name not in _NO_RULES]
    return sorted(found, key=lambda rule: str(rule.CODE))


def check(model: "nn.Module | None" = None, *, optimizer: Any = None, raise_on_error: bool = False) -> list[Finding]:
    """What is wrong with this environment and, if one is given, with this model, as it is now.

    Call it where training starts: after `fully_shard`, PEFT, DeepSpeed and `gradient_checkpointing_enable`, with the
    model in training mode. Nothing is changed and no forward is run.

    Args:
        model: a module with checkpointed layers, wrapped or not.
        optimizer: the optimizer that is to train it, where there is one.
        raise_on_error: raise instead of returning findings among which an error is.

    Returns:
        Findings, errors first.

    Raises:
        CheckError: with `raise_on_error`, there is an error.
    """
    findings = list(_found(model, optimizer))
    findings.sort(key=lambda finding: (_ORDER[finding.severity], finding.code))
    if raise_on_error and any(finding.severity == "error" for finding in findings):
        raise CheckError(findings)
    return findings


def _found(model: "nn.Module | None", optimizer: Any) -> Iterator[Finding]:
    from overlay.checks.environment import Environment

    environment = Environment()
    for rule in rules():
        if hasattr(rule, "in_environment"):
            yield from rule.in_environment(environment)
    if model is None:
        return
    from overlay.checks.subject import Subject

    subject = Subject(model, optimizer, environment)
    for rule in rules():
        if hasattr(rule, "in_model"):
            yield from rule.in_model(subject)
