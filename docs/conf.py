"""The site: README.md and docs/, made by Sphinx, which says of each link and each anchor whether it leads somewhere.

    "$(python3 -m overlay.environments docs)" -m sphinx --fail-on-warning --nitpicky -c docs . site

Sphinx and not mkdocs-material: that one is in maintenance mode, its makers have gone over to zensical, and mkdocs, on
which it stands, had its last release (1.6.1) in 2024. Sphinx has been kept since 2008, and takes the repository itself
as its source: README.md is the first page as it stands, and a link from a page out of docs/ works on the site as it
does where the repository is read. Nothing is fetched when a page is read.
"""

from collections.abc import Iterable
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

_ROOT = Path(__file__).parent.parent

project = "modeling-overlay"
project_copyright = "modeling-overlay maintainers, Apache-2.0"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "docs/cards/*.md"]

myst_heading_anchors = 4  # `#two-or-more-forwards`, as forges make them
myst_links_external_new_tab = False

html_theme = "furo"  # light and dark, and readable on a phone
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
smartquotes = False  # in front of a command they would be part of it


PAGES = {
    "start": "Start",
    "affected": "Am I affected?",
    "how-it-works": "How the fix works",
    "compatibility": "Compatibility",
    "checks": "Checks",
    "verify": "Verify",
    "bench": "Bench",
    "scaling": "Scaling",
    "publishing": "Publishing",
    "provenance": "Provenance",
    "security": "Security",
    "keeping": "Keeping the queue",
    "drift": "Drift",
    "upstreaming": "Upstreaming",
    "design": "Design",
}
"""The order of the pages, and what the navigation calls them."""


def folders(app: Sphinx, document: nodes.document) -> None:
    """A link to a folder of the repository, which has no page, is its name on the site."""
    beside = (_ROOT / app.env.docname).parent
    for link in list(document.findall(addnodes.pending_xref)):
        if link.get("reftype") == "myst" and (beside / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds the order of the pages, which has no place in README.md: forges would show a toctree as it is written."""
    if name == root_doc:
        source[0] += _toctree(f"{title} <docs/{page}>" for page, title in PAGES.items())
    if name == "docs/bench":
        source[0] += _toctree(
            f"{path.stem} <cards/{path.stem}>" for path in sorted((_ROOT / "docs" / "cards").glob("*.md"))
        )


def _toctree(entries: Iterable[str]) -> str:
    return "\n".join(["", "", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def index(app: Sphinx, error: Exception | None) -> None:
    """A web server shows `index.html` for a folder."""
    if error is None and app.builder.name == "html":
        first = Path(app.outdir) / f"{root_doc}.html"
        first.with_name("index.html").write_bytes(first.read_bytes())


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", folders)
    app.connect("source-read", navigation)
    app.connect("build-finished", index)
