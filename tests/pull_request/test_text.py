"""The text of a pull request: the project's template, filled in with what is known, and no more."""

from pathlib import Path

import pytest

from tests.pull_request.user import known
from tests.sample import Sample, commit

FORM = """\
<!-- # Not a heading -->
Hello.

# What is it about?

<!-- Say it here.

## Nor is this one
-->

Fixes # (issue)

## Kind

- [ ] Docs
- [ ] Bug fix (nothing breaks)
- [ ] A new feature

## Changes

- One
- Two

## Before sending

* [ ] I have added tests for it
* [ ] Did you write any new necessary tests?
* [ ] All tests pass with it
* [ ] I have read the rules, and new people are welcome

```
# no heading, either
```

## Who can review?

<!-- somebody -->
"""


def written(sample: Sample, where: str | None = None, python: str = "false", form: str = FORM) -> str:
    """The text with a template at `where`."""
    checkout = known(sample).checkouts / "demo-1.0"
    if where is not None:
        commit(checkout, "A template", {where: form.encode()})
    sample.overlay("pr", "demo", "--checkout", checkout, *(("--python", python) if python else ())).succeeds()
    return (sample.checkouts / "demo-1.0-pull-request.md").read_text("utf-8")


def test_the_template_is_filled_in(sample: Sample) -> None:
    text = written(sample, ".github/PULL_REQUEST_TEMPLATE.md")
    first, _, rest = text.partition("## Kind\n")
    head, _, body = first.partition("# What is it about?\n\n")
    assert head == FORM.partition("# What")[0] + "\n" * head.endswith("\n\n\n")
    assert body.startswith("**Subtract in the core**\n\nThe sample is wrong there, and this mends it.\n\n**Test it**\n")
    assert "Fixes #" not in body
    assert "Say it here" not in body
    assert "- tests: not run: there was no Python that runs" in body
    assert rest == FORM.partition("## Kind\n")[2].replace("- [ ] Bug", "- [x] Bug").replace(
        "- One\n- Two\n", "- Subtract in the core\n- Test it\n"
    ).replace("[ ] I have added", "[x] I have added").replace("[ ] Did you write", "[x] Did you write")


def test_tests_that_passed_are_said_to_pass(sample: Sample) -> None:
    text = written(sample, "docs/pull_request_template.md", python="")
    assert "* [x] All tests pass with it" in text
    assert "- tests: 1 passed in " in text
    assert "(`PYTHONPATH=src python -m pytest tests/test_core.py`)" in text


@pytest.mark.parametrize(
    "where", ["PULL_REQUEST_TEMPLATE.md", ".github/pull_request_template.txt", "docs/Pull_Request_Template"]
)
def test_where_a_template_may_lie(sample: Sample, where: str) -> None:
    assert "## Who can review?" in written(sample, where)


def test_a_template_of_another_editor(sample: Sample) -> None:
    text = written(
        sample, "PULL_REQUEST_TEMPLATE.md", form="\ufeff" + FORM[FORM.index("# What") :].replace("\n", "\r\n")
    )
    assert text.startswith("# What is it about?\n\n**Subtract in the core**\n")
    assert "\r" not in text


@pytest.mark.parametrize("form", ["", "Just a line.\n"])
def test_a_template_without_headings(sample: Sample, form: str) -> None:
    text = written(sample, "PULL_REQUEST_TEMPLATE.md", form=form)
    assert text.startswith("**Subtract in the core**\n")
    assert text.rstrip("\n").endswith(form.strip())


def test_without_a_template(sample: Sample) -> None:
    text = written(sample)
    assert text.startswith("# Description\n\n**Subtract in the core**\n")
    assert text.endswith("## Changes\n\n- Subtract in the core\n- Test it\n")


def test_nothing_of_this_machine_is_in_it(sample: Sample) -> None:
    text = written(sample)
    assert str(sample.folder) not in text
    assert str(Path.home()) not in text
