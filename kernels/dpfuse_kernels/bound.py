"""Launches a compiled kernel past Triton's dispatcher. The only file that knows Triton's private ways.

`kernel[grid](…)` finds the compilation anew at each call, in 4 to 5 us of Python. What it ends in is a call of
`CompiledKernel.run`, the same in Triton 3.6 and 3.9: half a microsecond. `bind` returns that call only
where this Triton is seen to make it just so, and None elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["BoundKernel", "bind"]

ALIGNMENT = 16  # bytes: all that Triton may have assumed of a pointer


class BoundKernel:
    """One compilation, and all that its launches have in common.

    Args:
        compiled: what `kernel[grid](…)` returned.
        types: of the arguments that change, as Triton spells them; pointers are passed as integers.
        constants: the compile-time arguments, which are the last ones.
    """

    def __init__(self, compiled: Any, types: tuple[str, ...], constants: tuple[Any, ...]) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._kernel = compiled  # a kernel that nobody holds may be unloaded
        self._run: Callable[..., Any] = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._constants = constants
        self._pointers = tuple(index for index, kind in enumerate(types) if kind.startswith("*"))
        self._runtime = knobs.runtime
        self._stream_of: Callable[[int], int] = driver.active.get_current_stream

    def fits(self, arguments: tuple[int, ...]) -> bool:
        """Was this compiled for such arguments, and does nobody, such as a profiler, listen to launches?"""
        for index in self._pointers:
            if arguments[index] % ALIGNMENT:
                return False
        return _unheard(self._runtime.launch_enter_hook) and _unheard(self._runtime.launch_exit_hook)

    def launch(self, programs: int, device: int, arguments: tuple[int, ...]) -> None:
        """Launch it on the current stream of `device`, which is the current device."""
        stream = self._stream_of(device)
        # Three times None: what hooks would be told, and the hooks.
        common = (stream, self._function, self._metadata, None, None, None)
        self._run(programs, 1, 1, *common, *arguments, *self._constants)


def bind(compiled: Any, types: tuple[str, ...], constants: tuple[Any, ...]) -> BoundKernel | None:
    """`compiled` as a plain call, or None where anything about it is not as known.

    Args:
        compiled: what `kernel[grid](…)` returned; None in Triton's interpreter.
        types: of the arguments that change, as Triton spells them: `i64`, `*i64`.
        constants: the compile-time arguments, in the order of the kernel's.
    """
    try:
        if _takes(compiled, types, len(constants)) and _launches_as_known(type(compiled)):
            return BoundKernel(compiled, types, constants)
    except Exception:
        # Whatever a future Triton does to the private parts looked at here, its dispatcher works.
        pass
    return None


def _takes(compiled: Any, types: tuple[str, ...], constants: int) -> bool:
    """Is it compiled for every value of its integers, and for every pointer with that alignment?

    A value that Triton has specialised on, such as 1, would be a constant here, or have an attribute.
    """
    source = compiled.src
    pointers = {(index,) for index, kind in enumerate(types) if kind.startswith("*")}
    assumed = {place: facts for place, facts in source.attrs.items() if facts}
    return (
        tuple(source.signature.values()) == types + ("constexpr",) * constants
        and set(assumed) <= pointers
        and all(facts == [["tt.divisibility", ALIGNMENT]] for facts in assumed.values())
    )


def _launches_as_known(kind: Any) -> bool:
    """Lets `CompiledKernel[grid]` launch something that only takes down how it was called."""
    calls: list[tuple[Any, ...]] = []
    probe = SimpleNamespace(
        _init_handles=lambda: None,
        launch_metadata=lambda *arguments: "launch metadata",
        function="function",
        packed_metadata="metadata",
        run=lambda *arguments: calls.append(arguments),
    )
    kind.__getitem__(probe, (2, 3, 4))("first", "second", stream="stream")
    known = (2, 3, 4, "stream", "function", "metadata", "launch metadata")
    # Between them are two hooks, which are Triton's own.
    return [(call[:7], len(call[7:9]), call[9:]) for call in calls] == [(known, 2, ("first", "second"))]


def _unheard(hook: Any) -> bool:
    # Triton 3.6 has chains of hooks, which may be empty, and takes a single one as well.
    return hook is None or getattr(hook, "calls", None) == []
