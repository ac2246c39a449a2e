"""At which lines ranks are in a phase of their steps: each looks at its own thread, and the first rank groups them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from time import sleep
from typing import Any

from dpfuse.comm.step_clock import NAMES
from dpfuse.comm.waiting import Board
from dpfuse.liveness.diagnosis import MAX_TEXT, names, printable
from dpfuse.liveness.thread_state import thread_state

__all__ = ["PhaseLines", "lines_in"]

TIMES, PAUSE = 40, 0.006  # looks, and seconds between them: a fourth of a second, in which no heartbeat is due
PATIENCE = 4  # heartbeats that the first rank waits for the looks of the others
SHOWN = 4  # groups of ranks


def lines_in(board: Board, phase: int) -> dict[str, int]:
    """Return at which lines of the user's source the thread that trains was in a phase, and how often.

    The clock of the board tells which phase runs.
    """
    seen: Counter[str] = Counter()
    for _ in range(TIMES):
        if board.clock is not None and board.clock.phase == phase:
            seen[thread_state(board.thread).at[:MAX_TEXT]] += 1
        sleep(PAUSE)
    return dict(seen.most_common(SHOWN))


class PhaseLines:
    """What the ranks have seen of one phase, in which some of them are late."""

    def __init__(self, phase: int, late: tuple[int, ...], size: int) -> None:
        self.phase = phase
        self._late = late
        self._size = size
        self._seen: dict[int, tuple[str, int, int]] = {}  # by rank: the line, how often, of how many looks
        self._beats = 0

    def add(self, rank: int, seen: Mapping[Any, Any]) -> None:
        """Take what a rank has seen.

        Raises:
            ValueError: it is no such thing.
        """
        if not all(isinstance(line, str) and isinstance(count, int) and count > 0 for line, count in seen.items()):
            raise ValueError("these are not lines with numbers")
        line = max(seen, key=lambda one: int(seen[one]), default="")
        self._seen[rank] = printable(line[:MAX_TEXT]), seen.get(line, 0), sum(seen.values())

    def is_complete(self) -> bool:
        """Whether no more is waited for. To be called once in each heartbeat."""
        self._beats += 1
        return len(self._seen) == self._size or self._beats > PATIENCE

    def __str__(self) -> str:
        """The late ranks first, then the others, grouped by their lines."""
        groups: dict[tuple[bool, str], list[int]] = {}
        for rank, (line, *_) in sorted(self._seen.items()):
            if line:
                groups.setdefault((rank not in self._late, line), []).append(rank)
        texts = []
        for (_, line), ranks in sorted(groups.items())[:SHOWN]:
            often = sum(self._seen[rank][1] for rank in ranks)
            looks = sum(self._seen[rank][2] for rank in ranks)
            texts.append(f"{names(ranks)} mostly at {line} ({often} of {looks} looks)")
        return f"in {NAMES[self.phase]}: {'; '.join(texts)}" if texts else ""
