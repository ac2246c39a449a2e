"""Finds the user's line: the innermost one outside of dpfuse, of torch and of all other installed packages."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from types import FrameType

__all__ = ["user_frame", "user_line", "warn_at_user"]

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
DPFUSE = __file__.rpartition("engine")[0]
INSIDE = (*LIBRARIES, DPFUSE, "<frozen")  # how the paths of files begin that are not the user's


def user_frame(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return the innermost frame of the user's code, and how many frames lie inside of it; None if there is none.

    Args:
        frame: the innermost frame to look at.
    """
    inside = 0
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, inside = frame.f_back, inside + 1
    return frame, inside


def user_line() -> str:
    """Return file and line of the user's code that is running, such as "train.py:31"; empty if there is none."""
    frame, _ = user_frame(sys._getframe(1))
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def warn_at_user(warning: str | Warning) -> None:
    """Warn with the user's line as the place, for example that of `loss.backward()`. Other warnings show our own.

    Args:
        warning: its text, or the warning itself.
    """
    found, inside = user_frame(sys._getframe(1))
    warnings.warn(warning, stacklevel=2 if found is None else inside + 2)
