"""The site: README.md and docs/, made by Sphinx, which says of each link and each anchor whether it leads somewhere.

    "$(python3 -m overlay.environments docs)" -m sphinx --fail-on-warning --nitpicky -c docs . site

Sphinx and not mkdocs-material: that one is in maintenance mode, its makers have gone over to zensical, and mkdocs, on
which it stands, has had its last release (1.6.1) in 2024. Sphinx has been kept since 2008, and takes the
repository itself as its source, so that README.md is the first page as it stands, and a link from a page out of docs/
works on the site as it does where the repository is read. Nothing is fetched when a page is read.
"""

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


PAGES = (
    "start",
    "affected",
    "how-it-works",
    "compatibility",
    "checks",
    "bench",
    "scaling",
    "publishing",
    "provenance",
    "security",
    "keeping",
    "drift",
    "upstreaming",
    "design",
)


def folders(app: Sphinx, document: nodes.document) -> None:
    """A link to a folder of the repository, which has no page, is its name on the site."""
    beside = (_ROOT / app.env.docname).parent
    for link in list(document.findall(addnodes.pending_xref)):
        if link.get("reftype") == "myst" and (beside / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """The order of the pages, which README.md has no place for: forges would show a toctree as it is written."""
    if name == root_doc:
        source[0] += _toctree("docs/", PAGES)
    if name == "docs/bench":
        source[0] += _toctree("cards/", sorted(path.stem for path in (_ROOT / "docs" / "cards").glob("*.md")))


def _toctree(folder: str, names: tuple[str, ...] | list[str]) -> str:
    return "\n".join(["", "", "```{toctree}", ":hidden:", "", *(f"{folder}{name}" for name in names), "```", ""])


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", folders)
    app.connect("source-read", navigation)
