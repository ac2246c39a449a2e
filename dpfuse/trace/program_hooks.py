"""Shows a trace a gradient before and after the hooks that a program has put on its parameter. Knows no step."""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import takewhile
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dpfuse.engine.autograd import ready_keys
from dpfuse.engine.torch_private import call_last, hook_tables

__all__ = ["HooksAround", "TraceHook"]


class HooksAround:
    """The hooks of a trace on one parameter: one of its own, and three more while the program has some there.

    Torch calls hooks in the order in which they came, and a program may put its own at any time. So ours take their
    places again before each backward. No node of the graph is kept: it would keep the parameter from being swapped.

    Args:
        param: a leaf that requires gradients.
        computed: called with the gradient before all hooks that may change it.
        hooked: called with the gradient after those of the program.
        accumulated: called with the parameter once `.grad` has the gradient: before the hooks of the program that are
            called then, and again after them.
    """

    def __init__(
        self,
        param: Tensor,
        computed: Callable[[Tensor], None],
        hooked: Callable[[Tensor], None],
        accumulated: Callable[[Tensor], None],
    ) -> None:
        self._param = param
        self._hooked = TraceHook(hooked)
        self._before, self._behind = TraceHook(accumulated, first=True), TraceHook(accumulated)
        self._computed: RemovableHandle = param.register_hook(TraceHook(computed, first=True))
        self._around: list[RemovableHandle] = []

    def surround(self) -> None:
        """Take the places around the hooks that the program has by now."""
        self.leave()
        param = self._param
        if not param.requires_grad:  # frozen since then: torch takes no hooks
            return
        with_gradient, accumulated = hook_tables(param)
        if _has_others(with_gradient):
            _make_room(with_gradient)
            self._around.append(param.register_hook(self._hooked))
        ready = ready_keys(param) if accumulated else frozenset()
        if _has_others(accumulated, ready):
            self._around.append(param.register_post_accumulate_grad_hook(self._before))
            _make_room(accumulated, ready)
            self._around.append(param.register_post_accumulate_grad_hook(self._behind))

    def leave(self) -> None:
        """Be called with computed gradients only."""
        while self._around:
            self._around.pop().remove()

    def remove(self) -> None:
        """Be called no more."""
        self.leave()
        self._computed.remove()


class TraceHook:
    """A hook of a trace, which is told from those of the program by its class.

    Args:
        call: the function.
        first: whether it comes before the hooks of the program.
    """

    def __init__(self, call: Callable[[Tensor], None], *, first: bool = False) -> None:
        self._call = call
        self.first = first

    def __call__(self, tensor: Tensor) -> None:
        self._call(tensor)


def _has_others(hooks: dict[int, Any], ready: Set[int] = frozenset()) -> bool:
    """Whether some hooks are neither of a trace nor, by their keys, dpfuse's own."""
    return any(key not in ready and not isinstance(hook, TraceHook) for key, hook in hooks.items())


def _make_room(hooks: dict[int, Any], ready: Set[int] = frozenset()) -> None:
    """Let the first hooks of traces be called before all others, which keep their order.

    Those of dpfuse that are in front stay there. They may send a bucket that lies in `.grad` itself, which is no change
    by the program.
    """
    others = [key for key, hook in hooks.items() if not (isinstance(hook, TraceHook) and hook.first)]
    in_front = [*takewhile(ready.__contains__, others)]
    call_last(hooks, [key for key in hooks if key not in others] + others[len(in_front) :])
