"""The rule of DPF-L07: optimizers of the ranks step on the same parameters with other learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from torch.optim import Optimizer

from dpfuse.findings import OTHER_RATES, findings
from dpfuse.loop.compared_words import Sums, Word, bits_of
from dpfuse.loop.record import Record

__all__ = ["REMEDY", "SameRates"]

BITS = 8
BACKWARDS = 2  # running
REMEDY = "Step each schedule equally often on every rank, and give one that depends on a loss the mean over the ranks."


class SameRates:
    """Notes the learning rates of optimizers that step, where they are numbers of the host, and compares them.

    Args:
        record: of the model whose gradients are averaged.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        # By optimizer, the number of its groups, a hash, and the places of the groups of the model.
        self._owned: WeakKeyDictionary[Optimizer, tuple[int, int, list[int]]] = WeakKeyDictionary()
        self._rates: dict[tuple[str, int], list[float]] = {}  # by name of an optimizer, and that hash
        self._known = True
        self._backwards = 0
        self._text = ""

    def before_step(self, optimizer: Optimizer) -> None:
        """Note the rates of this optimizer."""
        owned, places = self._owned_by(optimizer)
        if not owned:
            return
        rates: list[Any] = [optimizer.param_groups[place].get("lr") for place in places]
        if all(type(rate) in (int, float) for rate in rates):
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

    def words(self) -> Mapping[str, Word]:
        """Return what is compared."""
        rates = sorted(self._rates.items())
        return {
            "rated": [float(self._known and bool(rates))],
            "owned": bits_of(crc32(repr([key for key, _ in rates]).encode()), BITS),
            "rates": bits_of(crc32(repr([values for _, values in rates]).encode()), BITS),
            "rate": [self._mean()],
        }

    def _mean(self) -> float:
        rates = [rate for values in self._rates.values() for rate in values]
        return sum(rates) / max(1, len(rates))

    def heard(self, sums: Sums) -> None:
        """Take what the ranks have sent."""
        comparable = sums.all_set("rated") and sums.same("owned")
        differs = comparable and not sums.same("rates")
        self._backwards = self._backwards + 1 if differs else 0
        if self._backwards < BACKWARDS:
            return
        here = ", ".join(f"{name} {', '.join(map(str, rates))}" for (name, _), rates in sorted(self._rates.items()))
        rank, mean = self._record.rank, self._mean()
        others = (sums.total("rate") - mean) / (sums.size - 1)
        who = "the other rank has" if sums.size == 2 else "the other ranks have"
        self._text = (
            f"rank {rank}: in {BACKWARDS} steps running, the learning rates were not the same on all {sums.size} "
            f"ranks, for the same parameters. Rank {rank} has {here}, with a mean of {mean:.6g}; {who} a mean of "
            f"{others:.6g}. Expected equal ones; the weights of the ranks drift apart. {REMEDY}"
        )

    def tell(self) -> None:
        """Say what was found."""
        if self._text:
            findings.tell(OTHER_RATES, self._text, self._record.level)
            self._text = ""
