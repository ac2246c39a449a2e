"""The parameters that are known to differ between ranks, and what is told of new ones. Decides no time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.findings import Level
from dpfuse.rules.codes import REST, WEIGHTS
from dpfuse.rules.w01_weights_differ import Drift, Phrases
from dpfuse.weights.compared_tensors import ComparedTensors
from dpfuse.weights.hashing import Hashing
from dpfuse.weights.schedule import LastEqual
from dpfuse.weights.which_ranks_differ import Differences, measure

__all__ = ["Examined", "KnownDifferences", "Learned", "Told"]

Told = tuple[str, str, Level]  # a code, a text, and what becomes of it


@dataclass(frozen=True)
class Examined:
    """An examination of all ranks.

    Args:
        found: what differs.
        hashing: of this rank's parameters.
        after_step: their hashes after the step, [tensors]; None if it has missed that.
        device: on which the group communicates.
        takes_part: whether this rank's weights count.
        noticed: the averaged backward in which hashes differed.
    """

    found: Differences
    hashing: Hashing
    after_step: Tensor | None
    device: torch.device
    takes_part: bool
    noticed: int


class Learned(NamedTuple):
    """What follows from an examination.

    Attributes:
        told: what is to be told; None if nothing is new.
        is_false_alarm: whether no rank suspected anything, and nothing is known to differ, or was.
    """

    told: Told | None
    is_false_alarm: bool


class KnownDifferences:
    """The known differences of a model.

    Args:
        tensors: that are compared.
        group: the ranks.
        level: what becomes of a finding.
        words: for the messages.

    Attributes:
        known: by name, the averaged backward of which it is known; read in each backward, without a call.
        planned: returns the parameters whose gradients are averaged; None: all of them, as without an engine.
    """

    def __init__(self, tensors: ComparedTensors, group: dist.ProcessGroup, level: Level, words: Phrases) -> None:
        self.known: dict[str, int] = {}
        self.planned: Callable[[], Sequence[Tensor]] | None = None
        self.level: Level = level
        self._tensors = tensors
        self._group = group
        self._words = words
        self._meant: set[str] = set()  # of the known ones, those that may be meant so

    @property
    def wrong(self) -> dict[str, int]:
        """The known parameters without those that a program may mean to differ; as `known`."""
        return {name: since for name, since in self.known.items() if name not in self._meant}

    def keep(self, names: Collection[str]) -> bool:
        """Forget all others, which differ no longer; return whether there are any."""
        ended = [name for name in self.known if name not in names]
        for name in ended:
            del self.known[name]
            self._meant.discard(name)
        return bool(ended)

    def learn(self, examined: Examined, last_equal: LastEqual, suspicion: tuple[bool, str]) -> Learned:
        """Note what differs now, and find what is to be told of it; to be called on every rank.

        Args:
            examined: what was found.
            last_equal: when it was equal, as far as this rank knows.
            suspicion: whether a rank has asked for it since it suspects something, and what this rank has seen.
        """
        names, found, suspected = examined.hashing.names, examined.found, suspicion[0]
        ended = self.keep({names[place] for place in found.ever})
        new = [place for place in found.always if names[place] not in self.known]
        if not new:
            return Learned(None, is_false_alarm=not (suspected or ended or self.known))
        drift, suspects = self._measured(new, examined, last_equal, suspects=bool(suspicion[1]))
        return Learned(self.add(drift, suspicion[1], suspects if suspected else None), is_false_alarm=False)

    def _measured(
        self, new: Sequence[int], examined: Examined, last_equal: LastEqual, *, suspects: bool
    ) -> tuple[Drift, Sequence[int]]:
        """Return how far the ranks lie apart in what is new, and which ranks have seen what may be the cause."""
        hashing = examined.hashing
        own = hashing if examined.takes_part else None
        first = max(last_equal.of(hashing.slices_with(place)) for place in new)
        apart = measure(own, examined.after_step, new, first, self._group, examined.device, suspects=suspects)
        names = tuple(hashing.names[place] for place in new)
        drift = Drift(
            names=names,
            count=len(hashing.names),
            numels=tuple(hashing.numel(place) for place in new),
            first=apart.first,
            last=examined.noticed,
            others=tuple(apart.measured),
            reference=apart.reference,
            size=self._group.size(),
            measured=tuple(apart.measured.values()),
            measured_count=apart.count,
            frozen=self.planned is not None and self._tensors.are_others(names, self.planned()),
            words=self._words,
        )
        return drift, apart.suspects

    def add(self, drift: Drift, cause: str, suspects: Sequence[int] | None) -> Told:
        """Note new ones, and return what is told of them.

        Args:
            drift: the new ones.
            cause: what this rank has seen.
            suspects: the ranks that have seen something; None if none has asked for the examination.
        """
        rank = self._group.rank()
        level: Level = "warn" if self.level == "raise" and drift.may_be_meant else self.level
        self.known |= dict.fromkeys(drift.names, drift.last)
        if drift.may_be_meant:
            self._meant |= set(drift.names)
        if suspects is None or drift.frozen:  # what a rank has added to gradients changes no frozen parameter
            return WEIGHTS, drift.text(rank), level
        return REST, drift.text_of_rest(rank, cause, suspects), level
