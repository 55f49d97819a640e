"""The documentation site: README.md, docs/*.md as they are in the repository, and the docstrings.

make docs; the sources are the whole repository, so that links work here as they do there.
"""

import re
import shutil
from importlib import metadata
from typing import Any

from sphinx.application import Sphinx

project = "hpc_oldsgd"
release = metadata.version("hpc_oldsgd")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md"]
exclude_patterns = ["docs/site/conf.py"]

# --- Markdown -----------------------------------------------------------------------------------
myst_heading_anchors = 4  # the same as those of GitHub
myst_links_external_new_tab = False

# --- docstrings: plain text with `code`, and indented lines for a longer piece of it ------------
autodoc_default_options = {"members": True, "undoc-members": True}
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
default_role = "literal"
add_module_names = False

# --- how it looks: nothing from another host -----------------------------------------------------
html_theme = "furo"
html_title = f"hpc_oldsgd {release}"
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"

CONTENTS = """

```{toctree}
:hidden:
:caption: %s

%s
```
"""
PARTS = {
    "Start": "docs/your-own-loop docs/tasks docs/runs docs/plan docs/plots",
    "With a framework": "docs/integrations/hugging-face-trainer docs/integrations/accelerate "
    "docs/integrations/lightning docs/integrations/fabric",
    "On a cluster": "docs/cluster docs/other-schedulers docs/shared-file-systems docs/wheels "
    "docs/doctor docs/gpu docs/faults docs/stragglers docs/troubleshooting",
    "The method": "docs/algorithms docs/topologies docs/wire docs/overlap docs/mixing-op "
    "docs/theory docs/guarantees",
    "Results": "docs/results docs/studies docs/results-small docs/benchmarks benchmarks/README",
    "Reference": "docs/site/api/hpc_oldsgd docs/site/api/algorithms docs/site/api/topology "
    "docs/site/api/tasks docs/site/api/data docs/site/api/ops docs/site/api/theory "
    "docs/site/api/simulation docs/site/api/integrations docs/site/api/errors",
    "The project": "docs/architecture docs/adding-an-algorithm CONTRIBUTING CHANGELOG",
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """The list of pages beside the text. A page that no part names comes last."""
    if page != root_doc:
        return
    parts = {part: pages.split() for part, pages in PARTS.items()}
    parts["More"] = sorted(app.env.found_docs.difference(*parts.values(), [root_doc]))
    for part, pages in parts.items():
        if pages:
            source[0] += CONTENTS % (part, "\n".join(f"/{one}" for one in pages))


def as_restructured_text(app: Sphinx, kind: str, name: str, of: Any, how: Any, lines: list) -> None:
    """Indented lines are code, and _ * | outside of `code` are what they look like."""
    given, code = list(lines), False
    lines.clear()
    for line in given:
        indented = line.startswith("    ")
        if indented and not code:
            lines += ["", "::", ""]
        code = indented or (code and not line)
        parts = re.split(r"(`[^`]+`)", line)
        parts[::2] = [re.sub(r"([_*|\\])", r"\\\1", part) for part in parts[::2]]
        lines.append(line if code else "".join(parts))


def add_index(app: Sphinx, error: Exception | None) -> None:
    """A browser and a web server look for it."""
    if app.builder.format == "html" and not error:
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", add_index)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", as_restructured_text)
