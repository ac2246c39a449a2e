"""Some cases of a table in every run of the tests, and all of them in the long one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters: the first of each `count` runs in `make test`, the others in `make test-all`."""
    return [pytest.param(case, marks=pytest.mark.slow if place % count else ()) for place, case in enumerate(cases)]
