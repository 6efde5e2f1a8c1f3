"""Settings of Sphinx for the documentation: `make docs` builds it.

Pages are found from the root of the repository, so that links to cards, records and source hold on the site and in the
repository alike.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from dynattn import __version__

sys.path.insert(0, str(Path(__file__).parent))
import notebooks

project = "dynattn"
author = "The dynattn authors"
project_copyright = "2026, The dynattn authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "mathml"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
# Docstrings write code in single backticks, as Markdown does.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Otherwise an `__init__` without a text of its own shows that of `torch.nn.Module`.
autodoc_inherit_docstrings = False
autodoc_class_signature = "mixed"
# Longer signatures have a line for each parameter.
maximum_signature_line_length = 120
napoleon_google_docstring = True

html_theme = "furo"
html_title = f"dynattn {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
# Files that lie beside the pages as they are.
EXTRA = Path(__file__).parents[1] / "build" / "extra"
html_extra_path = [str(EXTRA)]

root_doc = "docs/index"
include_patterns = ["docs/**", "model_cards/**", "modeling/ops/**.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = ["**/.*", ".venv", "build", "runs", "tests"]
# Tables of records and design notes are linked from the text that tells of them.
suppress_warnings = ["toc.not_included", "myst.header", "misc.highlighting_failure"]


def without_fences(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Examples in docstrings stand in Markdown's fences; their prompts are all that reStructuredText needs."""
    lines[:] = [line for line in lines if not line.strip().startswith("```")]


def without_constructors(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leaves out `__new__`, and an `__init__` that is Python's own: neither says what to give."""
    return True if name == "__new__" or obj is object.__init__ else None


def without_inherited_fields(
    app: Sphinx, what: str, name: str, obj: object, options: object, parameters: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Leaves the fields that all configurations of Transformers have out of the signatures of ours."""
    if parameters and parameters.startswith("(transformers_version: "):
        return "(" + parameters.partition("*, ")[2], None
    return None


def link_notebook(app: Sphinx, page: str, source: list[str]) -> None:
    """Guides that are notebooks, too, offer it below their title."""
    name = Path(page).name
    if page.startswith("docs/guides/") and name in notebooks.NOTEBOOKS:
        title, _, text = source[0].partition("\n")
        link = f'<a href="../../notebooks/{name}.ipynb" download>Download this page as a notebook</a>'
        source[0] = f"{title}\n\n{link}\n{text}"


def forget_overloads(module: str) -> None:
    """Overloads are for type checkers; the function itself shows all parameters, with their defaults."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    analyzer.overloads.clear()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    forget_overloads("dynattn.modeling.ops.dcmha.attention")
    notebooks.main(EXTRA / "notebooks")
    app.connect("source-read", link_notebook)
    app.connect("autodoc-process-docstring", without_fences)
    app.connect("autodoc-skip-member", without_constructors)
    app.connect("autodoc-process-signature", without_inherited_fields)
