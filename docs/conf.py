# SPDX-License-Identifier: Apache-2.0
"""Sphinx's settings: ``python -m sphinx -W docs docs/_build`` builds the pages, offline."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon.docstring import GoogleDocstring

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import generate  # noqa: E402 (found on the path above)

import pblasmp  # noqa: E402

project = "pblasmp"
author = "The pblasmp developers"
project_copyright = author
release = pblasmp.__version__

extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon", "sphinx.ext.viewcode",
    "sphinx_copybutton",
]  # fmt: skip
exclude_patterns = ["_build", "_generated"]  # what is generated is included by pages
myst_enable_extensions = ["deflist", "substitution"]
myst_substitutions = {"release": release}
myst_heading_anchors = 3
highlight_language = "text"

# Links into other projects' docs need their inventories, which are fetched only if asked for.
intersphinx_mapping = {}
if os.environ.get("PBLASMP_DOCS_INTERSPHINX") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_mock_imports = ["torch"]  # which need not be there
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_param = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = f"pblasmp {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"source_repository": "", "top_of_page_buttons": []}


def keep_property(app: Any, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon does to properties: it takes the text before a colon for their type."""
    if what == "property":
        text = inspect.cleandoc(member.__doc__)
        lines[:] = GoogleDocstring(text, app.config, app, "method", name, member, options).lines()


def setup(app: Any) -> None:
    app.connect("builder-inited", lambda _: generate.write_all(DOCS / "_generated"))
    app.connect("autodoc-process-docstring", keep_property, priority=600)  # after napoleon
