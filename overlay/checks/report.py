"""`overlay check`: the rules about an environment, for a reader or for a program.

`--json` prints one object, whose form is stable: keys may be added, and what is here does not change while `format` is
1.

    {
      "format": 1,
      "findings": [              errors first
        {"code": "...", "severity": "error, warning or info", "where": "...", "what": "...", "why": "...", "fix": "..."}
      ]
    }
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from overlay.checks import check
from overlay.checks.finding import Finding
from overlay.terminal import WIDTH, width, wrapped

FORMAT = 1


def main(form: str) -> int:
    """Prints what is found.

    Args:
        form: `text` or `json`.

    Returns:
        The exit code: 1 where there is an error among the findings, which no rule has for an environment yet, else 0.
    """
    findings = check()
    print(to_json(findings) if form == "json" else to_text(findings, width()))  # noqa: T201
    return int(any(finding.severity == "error" for finding in findings))


def to_json(findings: Sequence[Finding]) -> str:
    """The findings for a program; see above."""
    return json.dumps({"format": FORMAT, "findings": [asdict(finding) for finding in findings]}, indent=2)


def to_text(findings: Sequence[Finding], columns: int = WIDTH) -> str:
    """The findings for a reader, and where more are to be had."""
    return "\n".join(_lines(findings, columns))


def _lines(findings: Sequence[Finding], columns: int) -> Iterator[str]:
    for finding in findings:
        yield f"{finding.severity}  {finding.code}  {finding.where}"
        for label, text in (("what", finding.what), ("why", finding.why), ("fix", finding.fix)):
            yield from wrapped(text, f"  {label:5}", columns)
        yield ""
    if not findings:
        yield "nothing found in this environment"
    yield "a model is checked in the program that trains it: overlay.check(model)"
