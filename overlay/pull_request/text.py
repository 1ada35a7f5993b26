"""The text of a pull request, after the template that the upstream project has."""

import re
from collections.abc import Sequence
from pathlib import Path

from overlay import atomic
from overlay.pull_request.checks import Outcome
from overlay.pull_request.evidence import Evidence
from overlay.pull_request.mails import message
from overlay.pull_request.plan import Plan
from overlay.queue import git
from overlay.queue.checkout import Checkout

_PLACES = ("", ".github/", "docs/")
"""Where GitHub looks for a template, in any case
(https://docs.github.com/communities/using-templates-to-encourage-useful-issues-and-pull-requests)."""

_PLAIN = "# Description\n\n## Changes\n"
"""Where the project has no template."""


def template(base: Checkout) -> str:
    """The project's template at the commit, or a plain one."""
    for place in _PLACES:
        listed = git.run("ls-tree", "-z", "--name-only", f"{base.commit}:{place}", folder=base.folder).stdout
        for name in listed.decode("utf-8", "replace").split("\0"):
            if re.fullmatch(r"pull_request_template(\.md|\.txt)?", name, re.IGNORECASE):
                return base.read(place + name).decode("utf-8-sig", "replace").replace("\r\n", "\n")
    return _PLAIN


def write(
    form: str, plan: Plan, base: Checkout, measured: Sequence[Evidence], outcomes: Sequence[Outcome], tests: bool
) -> str:
    """The text, in Markdown.

    The first section of the template is replaced by what the patches say, the measurements and how to repeat them; a
    section of changes by their list. Of the boxes, those are ticked that are known to be true; the others, and all
    other sections, stay as they are for a person.

    Args:
        form: the template.
        plan: what the pull request has.
        base: the commit that it is on.
        measured: what was measured.
        outcomes: what upstream's checks said.
        tests: whether the pull request brings tests.
    """
    passed = any(outcome.what == "tests" for outcome in outcomes) and all(
        outcome.passed for outcome in outcomes if outcome.what == "tests"
    )
    true = {
        r"bug fix": True,
        r"\b(added|write|wrote|written|new)\b.*\btests?\b(?!.*\bpass\b)": tests,
        r"\btests? pass\b": passed,
    }
    sections = _sections(form)
    body = _body(plan, base, measured, outcomes)
    lines = []
    filled = False
    for heading, content in sections:
        if not filled and heading:
            lines += [heading, "", body, ""]
            filled = True
        elif re.fullmatch(r"#+ *changes *", heading, re.IGNORECASE):
            lines += [heading, "", *(f"- {patch.subject}" for patch in plan.patches), ""]
        else:
            lines += [*([heading] if heading else []), *(_ticked(row, true) for row in content)]
    if not filled:
        lines = [body, "", *lines]
    return "\n".join(lines).rstrip("\n") + "\n"


def _sections(form: str) -> list[tuple[str, list[str]]]:
    """The headings of a template with what follows each; the first has none. A comment or a code block holds none."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    comment = fence = False
    for row in form.splitlines():
        fence ^= row.lstrip().startswith("```") and not comment
        if re.match(r"#+ ", row) and not comment and not fence:
            sections.append((row.rstrip(), []))
        else:
            sections[-1][1].append(row)
        for opened in re.findall(r"<!--|-->", row):
            comment = opened == "<!--"
    return sections


def _ticked(row: str, true: dict[str, bool]) -> str:
    box = re.match(r"(\s*[-*] )\[ \](.*)", row)
    if box and any(is_true and re.search(pattern, box[2], re.IGNORECASE) for pattern, is_true in true.items()):
        return f"{box[1]}[x]{box[2]}"
    return row


def _body(plan: Plan, base: Checkout, measured: Sequence[Evidence], outcomes: Sequence[Outcome]) -> str:
    parts = []
    for patch in plan.patches:
        parts += [f"**{patch.subject}**", *map(_unwrapped, message(patch).split("\n\n"))]
    if plan.held:
        parts += ["Not in here, because it is there already:", "\n".join(f"- {one.for_upstream}" for one in plan.held)]
    for one in measured:
        parts += [f"### {one.title}", one.caption, one.table, one.repeat]
        if one.program:
            parts += [
                "Without anything else, this shows it, before and after:",
                f"```python\n{one.program.strip()}\n```",
            ]
    checks = [f"- {outcome}{_how(outcome)}" for outcome in outcomes]
    at = f"{plan.version}, {base.commit[:12]}" if plan.version else base.commit[:12]
    parts += ["### Checks", f"On {at}:\n\n" + "\n".join(checks)] if checks else []
    return "\n\n".join(parts)


def _how(outcome: Outcome) -> str:
    return f" (`{outcome.command}`)" if outcome.command else ""


def _unwrapped(paragraph: str) -> str:
    """A paragraph in one line: GitHub shows the line ends of a pull request's text."""
    if re.search(r"^(\s{2,}|[-*|>] |\d+\. )", paragraph, re.MULTILINE):
        return paragraph
    return " ".join(paragraph.split())


def save(text: str, file: Path) -> None:
    """Writes a new file, at once."""
    with atomic.replacing(file) as draft:
        draft.write_text(text, "utf-8")
