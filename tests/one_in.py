"""Some cases of a table in every run of the tests, and all of them in the long one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

__all__ = ["crossed", "one_in"]


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters: the first of each `count` runs in `make test`, the others in `make test-all`."""
    return [pytest.param(case, marks=pytest.mark.slow if place % count else ()) for place, case in enumerate(cases)]


def crossed(count: int, cases: Mapping[str, Any], ways: Mapping[str, Any]) -> list[Any]:
    """Return each case in each way as parameters: two values, of the case and of the way.

    In `make test` each case runs in the first way, and the first of each `count` in the others.
    """
    return [
        pytest.param(case, way, id=f"{name}-{how}", marks=pytest.mark.slow if number and place % count else ())
        for place, (name, case) in enumerate(cases.items())
        for number, (how, way) in enumerate(ways.items())
    ]
