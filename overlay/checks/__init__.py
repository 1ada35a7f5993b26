"""What is wrong with a model or an environment: one rule a module in this folder (`fsdp2_reentrant.py`, …).

A rule is a module that has
- a docstring: its first line says what it finds, the rest (Markdown) when it fires, why that matters, and what to do;
  `docs/checks.md` is made of it;
- `CODE`, its name in findings and in the documentation, and
- `in_model(subject)`, `in_environment(environment)` or both: generators of findings. They import torch and other
  packages inside themselves, change nothing in the model and run no forward. What one raises on an unusual model is
  told as a finding of it (`found_by`).
"""

from collections.abc import Callable, Iterator
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
        OverlayError: `model` is no module.
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
            yield from found_by(rule.CODE, rule.in_environment, environment, "this environment")
    if model is None:
        return
    from overlay.checks.subject import Subject, expect_module

    expect_module(model)
    subject = Subject(model, optimizer, environment)
    for rule in rules():
        if hasattr(rule, "in_model"):
            yield from found_by(rule.CODE, rule.in_model, subject, type(model).__name__)


def found_by(code: str, rule: Callable[[Any], Iterator[Finding]], looked_at: Any, where: str) -> Iterator[Finding]:
    """What a rule finds; where it raises, what it found until then, and an info that says so.

    Args:
        code: of the rule.
        rule: its `in_model` or `in_environment`.
        looked_at: the subject or the environment.
        where: for the info.
    """
    try:
        yield from rule(looked_at)
    except Exception as error:  # an unusual model must not stop a run that is right
        yield Finding(
            code,
            "info",
            where,
            "this could not be looked at",
            " ".join(f"{type(error).__name__}: {error}".split()),
            "report it to modeling-overlay, with the name of the model",
        )
