"""DPF-L02 where nothing at all is averaged: the ranks compare the weights they had, once, without a collective."""

from __future__ import annotations

import atexit
import json
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from weakref import ref

import torch.distributed as dist
from torch.distributed import DistError

from dpfuse.engine.sample import Sample, sample_of, values_of
from dpfuse.engine.tensor_hash import hash_of
from dpfuse.engine.torch_private import default_store
from dpfuse.findings import findings
from dpfuse.loop.training_record import TrainingRecord
from dpfuse.loop.watched_gradient import WatchedGradient
from dpfuse.rules.codes import NOTHING_AVERAGED
from dpfuse.rules.l02_nothing_averaged import text_of_weights

__all__ = ["WeightsAtExit"]

STEPS = 1_000  # after which the ranks compare, unless the process ends before
AGAIN = 64  # steps between two looks whether the others have got there
PATIENCE = 2  # seconds for the others, at the end of the process

_numbers: Counter[str] = Counter()  # of models that have the same ranks and parameter
_to_compare: set[WeightsAtExit] = set()  # at the end of the process


class WeightsAtExit:
    """Remembers a few elements of one parameter before each step, as long as no gradient of its model was averaged.

    Such steps may be right. Local SGD averages weights, after hundreds of steps. Some optimizers communicate inside
    their steps, and some hooks inside no_sync(). In all of these, two ranks have equal weights at some time. So the
    finding is told only if no two ranks ever had any in common, but for those they began with. Each rank puts what it
    had into the store of the job. A rank that finds there what all have put compares.

    Args:
        watched: a gradient of the optimizer; the parameter is its own.
        record: of the model.
        optimizer: the name of its class.
    """

    def __init__(self, watched: WatchedGradient, record: TrainingRecord, optimizer: str) -> None:
        self._param = ref(watched.param)
        self._level, self._rank, self._optimizer = record.level, record.rank, optimizer
        self._store = default_store()  # a program may destroy the group before it ends
        model = f"dpfuse/{NOTHING_AVERAGED}/{dist.get_process_group_ranks(record.group)}/{watched.name}"
        self._keys = [f"{model}/{_numbers[model]}/{rank}" for rank in range(record.group.size())]  # ranks of the group
        _numbers[model] += 1
        self._samples: list[Sample] = []

    def before_step(self, step: int) -> bool:
        """Remember the weights before this step, counted from 1; return False once the ranks have compared."""
        if step < STEPS:
            self._remember()
            return True
        try:
            if step == STEPS:
                self._remember()
                self._send()
            if step % AGAIN or not self._store.check(self._keys):
                return True
            self._compare()
        except DistError:  # the store has ended with its rank
            self.stop()
        return False

    def compare_at_exit(self) -> None:
        """Compare at the end of the process, if it comes before."""
        _to_compare.add(self)

    def stop(self) -> None:
        """Compare nothing: a gradient was averaged."""
        _to_compare.discard(self)

    def send_rest(self) -> None:
        """Put what this rank had into the store, at the end of the process."""
        if len(self._samples) < STEPS:
            self._remember()
            self._send()

    def compare_until(self, deadline: float) -> None:
        """Compare with the ranks that get there in time."""
        # A wait of 0 would have no end.
        self._store.wait(self._keys, timedelta(seconds=max(deadline - monotonic(), 0.01)))
        self._compare()

    def _remember(self) -> None:
        param = self._param()
        if param is not None:
            self._samples.append(sample_of(param))

    def _send(self) -> None:
        first, *others = map(_hash, self._samples)
        mine = set(others) - {first}  # a schedule may begin with steps of length 0
        self._store.set(self._keys[self._rank], json.dumps([*mine]))

    def _compare(self) -> None:
        self.stop()
        had = [json.loads(text) for text in self._store.multi_get(self._keys)]
        ranks_with = Counter(each for of_rank in had for each in of_rank)
        if not all(had) or max(ranks_with.values()) > 1:
            return
        findings.tell(
            NOTHING_AVERAGED,
            text_of_weights(self._rank, len(self._samples) - 1, self._optimizer),
            self._level,
        )


def _hash(sample: Sample) -> int:
    """Return a hash of these elements. It waits for the device."""
    return int(hash_of(values_of(sample).cpu()))


@atexit.register
def _at_exit() -> None:
    deadline = monotonic() + PATIENCE
    with suppress(Exception):  # a rank or its store has ended before, or waits for another model: nothing is compared
        for each in _to_compare:
            each.send_rest()
    for each in tuple(_to_compare):
        with suppress(Exception):
            each.compare_until(deadline)
