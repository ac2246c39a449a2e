"""Names: those of gradients, and suggestions for wrong names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["GRAD", "suggestion"]

GRAD = "@GRAD"  # NAME@GRAD is the gradient of NAME


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the known names nearest to `name`, or with some known names.

    Example:
        >>> from dpfuse.paddle.static.names import suggestion
        >>> suggestion("los", ["loss", "y"])
        "Did you mean 'loss'?"
        >>> suggestion("z", ["loss", "y"])
        "Known are 'loss', 'y'."
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    if near:
        return f"Did you mean {', '.join(map(repr, near))}?"
    if not names:
        return "There are none."
    return f"Known are {', '.join(map(repr, names[:8]))}{', …' if len(names) > 8 else '.'}"
