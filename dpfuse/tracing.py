"""The only door to Dynamo: keeps torch.compile out of our own code, without the seconds that its import takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["leave_untraced", "set_tracer"]


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


def leave_untraced(function: Callable[..., Any]) -> None:
    """Make Dynamo run `function` as it is, and look only at what it calls: `torch._dynamo.disable(recursive=False)`.

    Args:
        function: a plain function; it is marked in place.
    """
    if set_code_exec_strategy is None:
        return
    run = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, run)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
