"""Sphinx configuration. `make docs` builds with warnings as errors; no network is used."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from dpfuse.version import __version__  # noqa: E402

project = "dpfuse"
author = "the dpfuse maintainers"
copyright = f"{author}, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

# In docstrings, `x` is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The pages are the same whether or not these are installed.
autodoc_mock_imports = ["lightning", "pytorch_lightning", "lightning_fabric"]
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"dpfuse {release}"
