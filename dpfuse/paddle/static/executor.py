"""Runs programs on one device."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from dpfuse import DPFuseError
from dpfuse.paddle.checks import instance
from dpfuse.paddle.static.device_thread import on_device
from dpfuse.paddle.static.feed import checked_feed
from dpfuse.paddle.static.fetch import fetch_names, unmerged
from dpfuse.paddle.static.guard import default_main_program
from dpfuse.paddle.static.places import place_of
from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.replica import Replica
from dpfuse.paddle.static.scope import Scope, global_scope

__all__ = ["Executor", "program_and_scope"]


class Executor:
    """Runs programs on one device.

    Args:
        place: `CPUPlace()`, `CUDAPlace(0)`, `"cpu"`, `"gpu:0"`; None means the first GPU, or the CPU without GPUs.

    Raises:
        TypeError, ValueError: `place` names no device.

    Example:
        >>> import torch
        >>> from dpfuse.paddle import static
        >>> program = static.Program()
        >>> with static.program_guard(program):
        ...     x = static.data("x", [None, 2])
        ...     doubled = x * 2
        >>> exe = static.Executor("cpu")
        >>> exe.run(program, feed={"x": torch.ones(1, 2)}, fetch_list=[doubled])
        [array([[2., 2.]], dtype=float32)]
    """

    def __init__(self, place: Any = None) -> None:
        self._device = place_of(place)
        self._closed = False
        self._replicas: WeakKeyDictionary[Scope, WeakKeyDictionary[Program, tuple[Any, Replica]]] = WeakKeyDictionary()

    def run(
        self,
        program: Program | None = None,
        feed: dict[str, Any] | None = None,
        fetch_list: list[Any] | None = None,
        scope: Scope | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run the whole program once, also the operations that are not fetched.

        A startup program initialises the variables of its main programs, but only once. A program with `minimize` also
        runs backward and steps its optimizer.

        Args:
            program: None means `default_main_program()`.
            feed: an array, a tensor or numbers for each input, by name.
            fetch_list: names, or variables. Parameters are fetched after the step.
            scope: holds the variables; None means `global_scope()`.
            return_numpy: True returns arrays, False tensors.

        Returns:
            One value for each of `fetch_list`.

        Raises:
            TypeError, ValueError: An argument, a name or a shape is wrong; the nearest names are suggested.
            DPFuseError: The executor is closed, an operation failed, or a variable's name is taken in the scope.
        """
        if self._closed:
            raise DPFuseError("this Executor is closed; expected run() before close(). Make a new one.")
        program, scope = program_and_scope("program", program, scope)
        for main in program.initialises:
            scope.hold(main, self._device)
        replica = self._replica(program, scope)
        scope.move(replica.tensors.values(), self._device)  # a run on another device may have moved them
        objective = program.objective
        names = fetch_names(fetch_list, program, {*replica.nodes, *replica.tensors}, objective is not None)
        fed = checked_feed(feed, program.feeds)
        loss = None if objective is None else objective.loss
        on_device(lambda one: one.run_once(fed, names, loss=loss))(replica)
        lasting = set(replica.tensors)
        values = {name: unmerged(replica.value(name), name, return_numpy) for name in names if name not in lasting}
        replica.update()
        values |= {name: unmerged(replica.value(name), name, return_numpy) for name in names if name in lasting}
        return [values[name] for name in names]

    def close(self) -> None:
        """Release all memory. The executor cannot run any more."""
        self._closed = True
        self._replicas.clear()

    def _replica(self, program: Program, scope: Scope) -> Replica:
        known = self._replicas.setdefault(scope, WeakKeyDictionary())
        stamp = program.stamp
        if program not in known or known[program][0] != stamp:
            known[program] = (stamp, Replica(program, scope, self._device))
        return known[program][1]


def program_and_scope(name: str, program: Any, scope: Any) -> tuple[Program, Scope]:
    """Return the program and the scope to use, with the defaults instead of None. Errors call the program `name`."""
    program = default_main_program() if program is None else program
    scope = global_scope() if scope is None else scope
    return instance(name, program, Program, "build one under program_guard"), instance(
        "scope", scope, Scope, "pass Scope()"
    )
