"""Raises at one place of a step: at a line of ours, or in the program itself. It raises once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from tests.distributed.failures.opening.fault import ERRORS, Fault
from tests.distributed.failures.opening.lines import Lines, Passed
from tests.distributed.failures.opening.programs import Halting

__all__ = ["Planter", "is_planted"]

TEXT = "planted"
STAGES = {"around": "forward", "forward": "forward", "step": "step"}  # any other kind: "backward"


def is_planted(error: BaseException) -> bool:
    """Whether this is the planted exception, or was raised because of it."""
    each: BaseException | None = error
    while each is not None:
        if str(each) == TEXT:
            return True
        each = each.__cause__ or each.__context__
    return False


class Planter:
    """Raises on this rank.

    Args:
        fault: what strikes on this rank, if anything.

    Attributes:
        active: whether the step has come.
        passed: what was passed.
    """

    def __init__(self, fault: Fault | None) -> None:
        self.active = False
        self.passed = Passed()
        self._fault = fault
        self._strikes = False  # in the program itself
        if fault is not None:
            self._lines = Lines(self.passed, fault.at, self._error, inside=fault.kind == "line")

    def prepare(self, module: Any, kinds: Collection[str]) -> None:
        """Put hooks on the module; to be called on all ranks, with the kinds of all failures."""
        module.inside = self._in_program if "forward" in kinds else nothing
        Halting.halt = self._in_program if "step" in kinds else nothing
        weights = [layer.weight for layer in module.layers[:2]]  # a batch may leave one of them out
        for weight in weights if "hook" in kinds else ():
            weight.register_hook(lambda _grad: self._in_program())
        for weight in weights if "post" in kinds else ():
            weight.register_post_accumulate_grad_hook(lambda _param: self._in_program())

    def around(self, part: str, stage: str) -> AbstractContextManager[object]:
        """Return what this stage of a part of the step runs in."""
        fault = self._fault
        if not self.active or self.passed.raised or fault is None:
            return nullcontext()
        if (part, stage) != (fault.part, STAGES.get(fault.kind, "backward")):
            return nullcontext()
        if fault.kind in ("line", "around"):
            return self._lines.traced()
        return self._striking()

    def on_the_way(self, outputs: Tensor) -> Tensor:
        """Return the outputs for the loss, by way of a tensor whose hook may raise."""
        if self._fault is None or self._fault.kind != "loss":
            return outputs
        passed_on = outputs * 1
        passed_on.register_hook(lambda _grad: self._in_program())
        return passed_on

    @contextmanager
    def _striking(self) -> Iterator[None]:
        self._strikes = True
        try:
            yield
        finally:
            self._strikes = False

    def _in_program(self) -> None:
        if self._strikes and not self.passed.raised:
            self.passed.raised = True
            raise self._error()

    def _error(self) -> BaseException:
        assert self._fault is not None
        return ERRORS[self._fault.error](TEXT)


def nothing() -> None:
    """Raise nothing."""
