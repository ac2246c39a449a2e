"""The only door to Dynamo: keeps torch.compile out of our own code, without the seconds that its import takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["EndOfCompiledBackward", "compiled_backward", "leave_untraced", "set_tracer"]


def _nothing(_tracer: Any) -> None:
    """What `set_tracer` is where torch has no such door; Dynamo then looks at our code as at any other."""


try:
    # Private, but what torch._dynamo itself stands on since 2.7.
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
    from torch._C._dynamo.eval_frame import set_eval_frame as set_tracer
except ImportError:
    set_tracer = _nothing  # type: ignore[assignment]
    set_code_exec_strategy = None  # type: ignore[assignment]


def leave_untraced(function: Callable[..., Any], *, calls: bool = False, reason: str | None = None) -> None:
    """Make Dynamo run `function` as it is: `torch._dynamo.disable`.

    Args:
        function: a plain function; it is marked in place.
        calls: whether what it calls is left alone too, not only looked at by itself.
        reason: for the error where Dynamo must not leave anything out (`fullgraph=True`).
    """
    if set_code_exec_strategy is None:
        return
    run = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP if calls else _FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, run)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def compiled_backward() -> Any:
    """Compiled autograd's object for the backward that runs around the caller; None if there is none we know."""
    frame = sys._getframe(1)
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if module == "torch._dynamo.compiled_autograd" and code.co_name == "runtime_wrapper":
            return frame.f_locals.get("self") if "nan_checker" in code.co_names else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


class EndOfCompiledBackward:
    """Hears of the end of the backward that runs, once, in the place of the check for NaN that is made there.

    Compiled autograd calls no callback that was queued in the engine, and those queued in traced code only where
    nothing at all is left out of the graph. Its check after the graph has run is the one place left; it comes with
    anomaly mode, and is made nonetheless if it was there before.

    Args:
        backward: what `compiled_backward()` returned.
        call: called with whether gradients were accumulated into leaves; not called if the backward raises.
    """

    def __init__(self, backward: Any, call: Callable[[bool], None]) -> None:
        self._backward = backward
        self._check = backward.nan_checker
        self._call = call
        backward.nan_checker = self

    def prep_with_inputs(self, inputs: Any) -> None:
        """The same graph runs again: the backward before had died."""
        self._leave()
        if self._check is not None:
            self._check.prep_with_inputs(inputs)

    def check(self, outputs: Any) -> None:
        """The graph has run; `outputs` are the gradients that `torch.autograd.grad` returns, none otherwise."""
        self._leave()
        if self._check is not None:
            self._check.check(outputs)
        self._call(not outputs)

    leave_untraced(check, calls=True)

    def _leave(self) -> None:
        self._backward.nan_checker = self._check
