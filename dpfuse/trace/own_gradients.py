"""Hashes the gradients of one model on this rank, while a backward computes them and before they are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from dpfuse.engine.tensor_hash import NOTHING, Hash, hash_of
from dpfuse.trace.finite import Look, is_finite
from dpfuse.trace.program_hooks import HooksAround, TraceHook
from dpfuse.trace.step_phases import StepPhases

__all__ = ["OwnGradients"]

BITS = 0xFFFFFFFF  # of a hash


class OwnGradients:
    """Hooks on the parameters of a model, and what they have noted in one backward.

    Args:
        params: of the model.
        phases: to which the time counts.
        reached: called in each backward before it adds the first gradient of this model.
        finite: look for values that are not finite, too.

    Attributes:
        deep: whether to hash; otherwise they only note that there are gradients.
        used: the places of parameters that have ever got a gradient.
    """

    def __init__(
        self, params: Sequence[Tensor], phases: StepPhases, reached: Callable[[], None], *, finite: bool
    ) -> None:
        self.deep = False
        self.used: set[int] = set()
        self._phases = phases
        self._reached = reached
        self._hooks = [
            HooksAround(param, *(partial(note, place) for note in (self._computed, self._hooked, self._accumulated)))
            for place, param in enumerate(params)
        ]
        self._finite_hooks = [
            param.register_hook(TraceHook(partial(self._look, place))) for place, param in enumerate(params) if finite
        ]
        self.begin()

    def begin(self) -> None:
        """Begin another backward: forget what hooks have noted, also those of `torch.autograd.grad` since the last."""
        self.is_reached = False  # whether the backward that runs has come to this model
        self.looks: list[Look] = []  # at gradients, whether they are finite
        self.local: list[Hash] = [NOTHING] * len(self._hooks)  # hashes in the backward that runs
        self._behind: list[Hash] = [*self.local]  # of them after hooks of the program, where it has some
        self._rewritten: list[Hash] = [*self.local]  # what such hooks have made of `.grad`; 0 where it is as before

    def surround(self) -> None:
        """See also what hooks of the program make of gradients, as many as it has by now."""
        for hooks in self._hooks:
            hooks.surround()

    def leave(self) -> None:
        """See no hooks of the program."""
        for hooks in self._hooks:
            hooks.leave()

    def remove(self) -> None:
        """See nothing any more."""
        for hook in (*self._hooks, *self._finite_hooks):
            hook.remove()

    def hooked(self) -> list[Hash] | None:
        """Return the hashes after hooks of the program, with nothing where it has none; None if it has none at all."""
        if all(one is NOTHING for one in (*self._behind, *self._rewritten)):
            return None
        found: list[Hash] = []
        for local, behind, rewritten in zip(self.local, self._behind, self._rewritten, strict=True):
            if local is NOTHING or (behind is NOTHING and rewritten is NOTHING):
                found.append(NOTHING)
            else:
                found.append((local if behind is NOTHING else behind) ^ _number(rewritten))
        return found

    def _computed(self, place: int, grad: Tensor) -> None:
        """Take what the backward has computed."""
        self.used.add(place)
        if not self.deep and self.is_reached:
            return
        with self._phases.inside("tracing"):
            if not self.is_reached:
                self.is_reached = True
                self._reached()
            if self.deep:
                self.local[place] = hash_of(grad, _number(self.local[place]))

    def _hooked(self, place: int, grad: Tensor) -> None:
        """Take what hooks of the program have made of it."""
        with self._phases.inside("tracing"):
            self._behind[place] = hash_of(grad, _number(self._behind[place]))

    def _accumulated(self, place: int, param: Tensor) -> None:
        """Look at `.grad` before hooks of the program, and again after them: equal hashes cancel each other out."""
        with self._phases.inside("tracing"):
            self._rewritten[place] = _number(self._rewritten[place]) ^ (hash_of(param.grad) & BITS)

    def _look(self, place: int, grad: Tensor) -> None:
        """Look for values that are not finite."""
        with self._phases.inside("tracing"):
            finite = is_finite(grad)
        if finite is not True:
            self.looks.append((place, finite))


def _number(found: Hash) -> Hash:
    """Return a hash from which to go on; 0 where there is none yet."""
    return 0 if found is NOTHING else found
