"""What a rule finds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from overlay.errors import OverlayError

Severity = Literal["error", "warning", "info"]
"""error: gradients or outputs are wrong, or the run will fail; warning: memory or time is lost, or it may be wrong;
info: worth to know."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a model or an environment.

    Attributes:
        code: the rule, as `docs/checks.md` lists it.
        severity: how bad it is.
        where: the modules (names as `named_modules` gives them), the package or the setting.
        what: what was found, in one line.
        why: what comes of it.
        fix: what to do, with the exact call or command.
    """

    code: str
    severity: Severity
    where: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity} {self.code}: {self.where}: {self.what}: {self.why}: {self.fix}"


class CheckError(OverlayError):
    """Raised by `overlay.check(..., raise_on_error=True)`; `findings` are all that were made, not the errors alone."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        errors = [str(finding) for finding in findings if finding.severity == "error"]
        super().__init__("; ".join(errors))
        self.findings = list(findings)
