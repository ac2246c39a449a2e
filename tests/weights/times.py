"""What the comparison of weights does, told by numbers of averages and not by states: `test_states` compares both."""

from __future__ import annotations

from collections import deque

from dpfuse.weights.check import LOOK_AGAIN

__all__ = ["EMPTY", "SLICES", "Times"]

SLICES, EMPTY = 3, (1, 2)  # of a pass; those that are empty


class Times:
    """One rank. `log` is what it hashes, asks, examines and tells."""

    def __init__(self, late):
        self.late, self.log = late, []
        self.completed, self.hashed_at, self.turn = 0, -1, 0
        self.asks = self.due = self.suspected = self.after = self.before = self.inside = self.off = False
        self.older = self.ignored = self.noticed = self.alarms = self.last_alarm = self.hashes = 0
        self.slice, self.travelling, self.equal, self.known = None, deque([None]), {}, {}
        self.found, self.begun, self.hears_begins = None, {}, False

    def begins(self, sync):
        """A backward begins."""
        self.inside = False
        self.older -= bool(sync and self.older)
        if self.after and not self.before and not self.off:
            self.before = True
            self.log.append("each, before")

    def delivered(self, differs):
        """It is averaged, and this rank hears of it."""
        self.completed += 1
        self.travelling.append(self.slice)
        before = self.travelling.popleft()
        compared = before if self.late else self.slice
        if self.ignored:
            self.ignored -= 1
        elif differs:
            self.asks, self.noticed = True, self.completed - self.late
        elif compared is not None:
            self.equal[compared[0]] = compared[1]
        if self.known and self.completed % LOOK_AGAIN == 0:
            self.asks = True
        if self.inside and not self.off:
            self.hash()
        self.inside = False
        self.tell()

    def failed(self, completed):
        """It has failed here; the peers may have completed it."""
        self.completed += completed
        self.inside = False

    def step_begins(self, who):
        """A step begins."""
        self.begun[who] = self.hashes if self.hears_begins else None

    def step_ends(self, who):
        """A step ends between backwards."""
        begun = self.begun.pop(who)
        if self.off or not self.completed:
            return
        if self.completed != self.hashed_at or begun not in (None, self.hashes):
            self.hash()
        elif not (self.asks or self.due or self.hears_begins):
            self.hears_begins, self.slice = True, None

    def hash(self):
        """Hash what is due."""
        self.hashes += 1
        if self.asks or self.due:
            self.after, self.before = True, False
            self.log.append("each")
        if self.completed != self.hashed_at:
            self.hashed_at, self.turn = self.completed, self.turn + 1
        seed, number = divmod(self.turn - 1, SLICES)
        if number not in EMPTY:
            self.slice = number, self.completed
            self.log.append(("slice", seed, number))

    def suspects(self):
        """Every rank hears that one suspects something."""
        self.suspected = self.due = True
        self.noticed = self.completed + 1

    def answers(self, found, ever):
        """Every rank hears a question, after which a parameter is found to differ, or ever to have differed."""
        self.due = False
        if self.older and not self.suspected:
            return
        self.asks, self.older = False, 2 * self.late
        self.log.append(("examined", self.after, self.before, self.off))
        self.hashed_at, self.ignored, self.after, self.before, self.slice = -1, 1 + self.late, False, False, None
        ended = bool(self.known) and not ever
        suspected, self.suspected = self.suspected, False
        if ended:
            self.known = {}
        if found and not self.known:
            self.alarms, self.known = 0, {"w": self.noticed}
            self.found = "DPF-L01" if suspected else "DPF-W01", self.equal.get(0, 0), self.noticed
        elif not (suspected or ended or self.known):
            self.alarms = 1 if self.noticed - self.last_alarm > 200 else self.alarms + 1
            self.last_alarm = self.noticed
            self.off = self.off or self.alarms == 3

    def tell(self):
        """Tell what was found."""
        if self.found is not None:
            self.log.append(self.found)
        self.found = None

    def synchronized(self):
        """All ranks have the same weights."""
        self.turn, self.hashed_at, self.ignored = self.completed, -1, 1 + self.late
        self.asks = self.due = self.suspected = self.after = self.before = False
        self.known, self.found, self.slice = {}, None, None
