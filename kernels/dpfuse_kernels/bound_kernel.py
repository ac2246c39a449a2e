"""Launches a compiled kernel without Triton's dispatcher. The only file that uses private parts of Triton.

`kernel[grid](…)` looks up the compiled kernel at each call, in 4 to 5 us of Python, and then calls
`CompiledKernel.run`, which takes half a microsecond. `bind` returns that inner call. It first checks that this version
of Triton makes the call in the known way, as 3.6 and 3.9 do, and otherwise returns None.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["BoundKernel", "bind"]

ALIGNMENT = 16  # bytes: the only property of a pointer that Triton may have assumed


class BoundKernel:
    """One compiled kernel, with everything that its launches have in common.

    Args:
        compiled: the result of `kernel[grid](…)`.
        types: of the arguments that change, as Triton spells them; pointers are passed as integers.
        constants: the compile-time arguments, which come last.

    Attributes:
        stream_of: returns the handle of the current stream of a device, by its index.
    """

    def __init__(self, compiled: Any, types: tuple[str, ...], constants: tuple[Any, ...]) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._kernel = compiled  # Triton may unload a kernel without references
        self._run, self._before = _without_scratch(compiled.run)
        self._function = compiled.function
        self._behind = (compiled.packed_metadata, None, None, None)  # the launch metadata, which hooks read; two hooks
        self._constants = constants
        self._pointers = tuple(index for index, kind in enumerate(types) if kind.startswith("*"))
        self._runtime = knobs.runtime
        self.stream_of: Callable[[int], int] = driver.active.get_current_stream

    def launch(self, programs: int, device: int, arguments: tuple[float, ...]) -> bool:
        """Launch the kernel on the current stream of `device`, which must be the current device.

        Returns:
            Whether it was launched. It is not if it was not compiled for such arguments, or if a hook (such as a
            profiler's) is set on launches.
        """
        whole = self.whole(arguments)
        return whole is not None and self.launch_whole(programs, self.stream_of(device), whole)

    def whole(self, arguments: tuple[float, ...]) -> tuple[Any, ...] | None:
        """Return what Triton's launcher gets for these arguments; None if the kernel was not compiled for them."""
        for index in self._pointers:
            if arguments[index] % ALIGNMENT:
                return None
        return (*self._before, *self._behind, *arguments, *self._constants)

    def launch_whole(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> bool:
        """As `launch`, on the stream with this handle, with what `whole` has returned."""
        runtime = self._runtime
        before, behind = runtime.launch_enter_hook, runtime.launch_exit_hook
        # In Triton 3.6 a hook is a chain of hooks, which may be empty, or a single hook.
        if before is not None and getattr(before, "calls", None) != []:
            return False
        if behind is not None and getattr(behind, "calls", None) != []:
            return False
        self._run(programs, 1, 1, stream, self._function, *arguments)
        return True


def bind(compiled: Any, types: tuple[str, ...], constants: tuple[Any, ...]) -> BoundKernel | None:
    """Return `compiled` as a bound kernel, or None if anything about it differs from what is known.

    Args:
        compiled: the result of `kernel[grid](…)`; None in Triton's interpreter.
        types: of the arguments that change, as Triton spells them: `i64`, `*i64`, `fp32`.
        constants: the compile-time arguments, in the order of the kernel's.
    """
    try:
        if _takes(compiled, types, len(constants)) and _launches_as_known(type(compiled)):
            return BoundKernel(compiled, types, constants)
    except Exception:
        # A future Triton may change these private parts in any way. Its dispatcher still works.
        pass
    return None


def _without_scratch(run: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what `run` calls in the end, and what it puts between the function and the metadata of each call.

    Triton's launcher first allocates scratch memory, for kernels that need some. For others that is only time. A probe
    shows what it calls. If anything is unknown, `run` itself is returned.
    """
    calls: list[tuple[Any, ...]] = []
    try:
        if run.global_scratch_size or run.profile_scratch_size:
            return run, ()
        probe = SimpleNamespace(**{**vars(run), "launch": lambda *arguments: calls.append(arguments)})
        type(run).__call__(probe, 2, 3, 4, "stream", "function", "metadata", "first")
        (call,) = calls
        if call[:5] + call[-2:] == (2, 3, 4, "stream", "function", "metadata", "first"):
            return run.launch, call[5:-2]
    except Exception:
        # As in `bind`: a future Triton may launch in any other way.
        pass
    return run, ()


def _takes(compiled: Any, types: tuple[str, ...], constants: int) -> bool:
    """Whether the kernel was compiled for every value of its integers and for every aligned pointer.

    A value on which Triton specialises, such as 1, would show up as a constant or as an attribute.
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
    """Whether `CompiledKernel[grid]` makes the known call. It launches a probe that records how it is called."""
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
    # Triton's own two hooks come between the known part and the arguments.
    return [(call[:7], len(call[7:9]), call[9:]) for call in calls] == [(known, 2, ("first", "second"))]
