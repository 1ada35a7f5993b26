"""`python -m overlay.checks`: docs/checks.md, from the docstrings of the rules."""

from collections.abc import Iterator
from types import ModuleType

from overlay.checks import rules

_INTRODUCTION = """\
# Checks

What `overlay.check` and `overlay check` look for. This page is made from the docstrings of the rules, in
`overlay/checks/`, by `python -m overlay.checks > docs/checks.md`.

```python
import overlay

for finding in overlay.check(model):  # where training starts, with the model as it is trained
    print(finding)
overlay.check(model, raise_on_error=True)  # or stop the run: overlay.CheckError
```

Where nothing is installed yet, `PYTHONPATH=CHECKOUT` before the command that trains will do, with a clone of this
project: importing it changes nothing.

Nothing is changed in the model, and no forward is run. A finding has a `code`, which is a title below, a `severity`,
and says `where`, `what`, `why`, and how to `fix` it.

| severity | |
|---|---|
| error | gradients or outputs are wrong, or the run will fail |
| warning | memory or time is lost, or something may be wrong |
| info | worth to know |

`overlay check` looks at an environment alone, without a model, and imports none of its packages. It needs nothing but
the overlay wheel, prints the findings (`--json`: for a program), and exits 1 where an error is among them. No rule has
an error for an environment without a model, so that it exits 0: `overlay doctor` exits 1 where a fault is live."""


def document() -> str:
    """The page, with an end of line at its end."""
    return "\n\n".join([_INTRODUCTION, _table(rules()), *map(_section, rules())]) + "\n"


def _table(listed: list[ModuleType]) -> str:
    return "\n".join(["| check | looks at | finds |", "|---|---|---|", *map(_row, listed)])


def _row(rule: ModuleType) -> str:
    kinds = {"in_model": "model", "in_environment": "environment"}
    looks_at = " and ".join(word for function, word in kinds.items() if hasattr(rule, function))
    return f"| [`{rule.CODE}`](#{rule.CODE}) | {looks_at} | {_title(rule)} |"


def _section(rule: ModuleType) -> str:
    return f"## {rule.CODE}\n\n" + "\n".join(_paragraphs(rule))


def _title(rule: ModuleType) -> str:
    return next(_paragraphs(rule))


def _paragraphs(rule: ModuleType) -> Iterator[str]:
    assert rule.__doc__ is not None
    yield from rule.__doc__.strip().splitlines()


if __name__ == "__main__":
    print(document(), end="")  # noqa: T201
