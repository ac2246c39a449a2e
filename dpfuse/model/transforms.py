"""Is a forward one of training, or one inside a transform of torch or a `functional_call`? Knows no wrapper."""

from __future__ import annotations

import sys

import torch
from torch import compiler, nn
from torch.autograd import forward_ad

from dpfuse.engine.torch_private import leave_untraced

__all__ = ["functional_call_runs", "may_have_backward"]


def may_have_backward() -> bool:
    """Whether an ordinary backward may go through the outputs of a forward that begins now.

    Under `torch.no_grad()` there is none. A transform of `torch.func` computes its derivatives itself, and forward-mode
    AD without any backward. While torch traces a program for `make_fx` or `torch.export`, nothing is computed.
    """
    return (
        _grad_enabled()
        and not _transforms_run()
        and forward_ad._current_level < 0
        and _mode_of(_PROXY) is None
        and not compiler._is_exporting_flag
    )


leave_untraced(may_have_backward, calls=True)

_grad_enabled = torch.is_grad_enabled
_transforms_run = torch._C._are_functorch_transforms_active
_mode_of = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def functional_call_runs(module: nn.Module) -> bool:
    """Whether `functional_call()` lets tensors stand in for parameters or buffers of `module`, to look at if some do.

    It walks up the stack of calls, which takes microseconds.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL and any(module is part for part in frame.f_locals["module"].modules()):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_FUNCTIONAL_CALL = nn.utils.stateless._functional_call.__code__
