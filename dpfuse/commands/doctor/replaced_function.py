"""Puts a function in the place of one of torch or Python. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["replace"]


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """From here on another function runs when this one is called.

    Args:
        owner: the module or class that has it.
        name: under which it is there.
        call: the other function. It gets the plain one, and then what the caller has passed. The caller is two frames
            above it.
    """
    plain = getattr(owner, name)

    @wraps(plain)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(plain, *args, **kwargs)

    setattr(owner, name, replaced)
