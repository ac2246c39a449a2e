"""Errors of random programs, which every rank must hear of: a rank that raised alone would leave the others waiting."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["agree_on", "what_is_wrong"]


def what_is_wrong(act: Callable[[], str]) -> str:
    """Return what `act` returns: how something differs; or what it has raised, in words."""
    try:
        return act()
    except BaseException:
        return traceback.format_exc(limit=-3)


def agree_on(error: str) -> None:
    """Raise AssertionError on every rank if some rank has an error."""
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    assert not any(errors), "\n".join(dict.fromkeys(errors))
