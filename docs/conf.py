"""Sphinx configuration. `make docs` builds with warnings as errors; no network is used."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from dpfuse.version import __version__  # noqa: E402

project = "dpfuse"
author = "dpfuse developers"
copyright = f"{author}, Apache-2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_reredirects",
]
if os.environ.get("READTHEDOCS"):  # links to torch's and Python's pages need a network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# Old addresses of pages, which other sites may link to, and where their texts are now.
redirects = json.loads((ROOT / "docs/redirects.json").read_text(encoding="utf-8"))

# In docstrings, `x` is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The pages are the same whether or not these are installed.
autodoc_mock_imports = ["lightning", "pytorch_lightning", "lightning_fabric"]
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

copybutton_prompt_text = "$ "
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_theme_options = {
    "source_repository": "https://github.com/dpfuse/dpfuse/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_title = f"dpfuse {release}"
