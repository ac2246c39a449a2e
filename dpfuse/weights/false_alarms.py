"""Differences that had ended when the ranks examined them: after some in a row, a program is left alone."""

from __future__ import annotations

__all__ = ["FalseAlarms"]

MOST = 3  # differences in a row that had ended a step later, after which a program is left alone
IN_A_ROW = 200  # averaged backwards between two of them, at most


class FalseAlarms:
    """How many there were in a row.

    Attributes:
        in_a_row: their number.

    Example:
        >>> alarms = FalseAlarms()
        >>> [alarms.count(backward) for backward in (10, 20, 30)]
        [False, False, True]
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._last = 0  # the averaged backward of the last one

    def count(self, backward: int) -> bool:
        """Count one of this averaged backward, and return whether it is the one after which a program is left alone."""
        if backward - self._last > IN_A_ROW:
            self.in_a_row = 0
        self._last = backward
        self.in_a_row += 1
        return self.in_a_row == MOST

    def end(self) -> None:
        """Note a difference that is none."""
        self.in_a_row = 0
