"""What DPF-L07 is asked about: the learning rates with which this rank and the others step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from torch.optim import Optimizer

from dpfuse.loop.compared_words import Sums, Word, bits_of
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.rules.l07_other_rates import mean_of, note

__all__ = ["LearningRates"]

BITS = 8


class LearningRates:
    """Notes the learning rates of optimizers that step, where they are numbers of the host, and compares them.

    Args:
        record: of the model whose gradients are averaged.
    """

    def __init__(self, record: TrainingRecord) -> None:
        self._record = record
        # By optimizer, the number of its groups, a hash, and the places of the groups of the model.
        self._owned: WeakKeyDictionary[Optimizer, tuple[int, int, list[int]]] = WeakKeyDictionary()
        self._rates: dict[tuple[str, int], list[float]] = {}  # by name of an optimizer, and that hash
        self._known = True
        self._backwards = 0  # running, that the rule remembers

    def before_step(self, optimizer: Optimizer) -> None:
        """Note the rates of this optimizer."""
        owned, places = self._owned_by(optimizer)
        if not owned:
            return
        rates: list[Any] = [optimizer.param_groups[place].get("lr") for place in places]
        if {*map(type, rates)} <= {int, float}:
            self._rates[type(optimizer).__name__, owned] = rates
        else:
            self._known = False

    def _owned_by(self, optimizer: Optimizer) -> tuple[int, list[int]]:
        """Return a hash of which parameters of the model it steps on, or 0, and the places of their groups.

        Other groups are of this rank alone, such as those of a personal layer.
        """
        count, owned, places = self._owned.get(optimizer, (0, 0, []))
        if count != len(optimizer.param_groups):
            names = {id(param): name for name, param in self._record.params().items()}
            groups = [[names.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
            places = [place for place, group in enumerate(groups) if any(name is not None for name in group)]
            owned = crc32(repr([groups[place] for place in places]).encode()) | 1 if places else 0
            self._owned[optimizer] = len(groups), owned, places
        return owned, places

    @property
    def _own(self) -> list[tuple[str, list[float]]]:
        """The rates of this rank, in an order that all ranks have."""
        return [(name, rates) for (name, _), rates in sorted(self._rates.items())]

    def words(self) -> Mapping[str, Word]:
        """Return what is compared."""
        own = self._own
        return {
            "rated": [float(self._known and bool(own))],
            "owned": bits_of(crc32(repr(sorted(self._rates)).encode()), BITS),
            "rates": bits_of(crc32(repr(own).encode()), BITS),
            "rate": [mean_of(own)],
        }

    def heard(self, sums: Sums) -> str | None:
        """Return what is said of what the ranks have sent."""
        known = {"comparable": sums.all_set("rated") and sums.same("owned"), "same": sums.same("rates")}
        rank, total = self._record.rank, sums.total("rate")
        self._backwards, text = note(self._backwards, rank, sums.size, self._own, total, **known)
        return text
