"""The programs under construction: the default programs, the guard that replaces them, and their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dpfuse import DPFuseError
from dpfuse.paddle.checks import instance
from dpfuse.paddle.static.input_spec import InputSpec, dtype_of
from dpfuse.paddle.static.program import Program
from dpfuse.paddle.static.variable import Variable, modules_recorded

__all__ = ["data", "default_main_program", "default_startup_program", "program_guard"]

_main = Program()
_startup = Program()
_startup.initialises.add(_main)


def default_main_program() -> Program:
    """Return the program under construction. Executors run it if they are given none.

    Example:
        >>> from dpfuse.paddle import static
        >>> program = static.Program()
        >>> with static.program_guard(program):
        ...     static.default_main_program() is program
        True
    """
    return _main


def default_startup_program() -> Program:
    """Return the program that initialises the variables of the program under construction.

    Example:
        >>> from dpfuse.paddle import static
        >>> static.Executor("cpu").run(static.default_startup_program())
        []
    """
    return _startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Build `main_program` inside the `with` block.

    The block records all operations on the variables that `data` makes. A module called with a variable is one
    operation of the program. Modules and functions without variables work as usual.

    Args:
        main_program: the program to build. `default_main_program()` returns it inside the block.
        startup_program: the program that initialises the variables when an executor runs it; None means the current
            one. Variables that were not initialised are initialised on first use.

    Raises:
        TypeError: An argument is no Program.

    Example:
        >>> import torch
        >>> from dpfuse.paddle import static
        >>> program = static.Program()
        >>> with static.program_guard(program):
        ...     x = static.data("x", [None, 3], "float32")
        ...     mean = torch.nn.Linear(3, 1)(x).mean()
        >>> mean.name
        'mean'
    """
    global _main, _startup
    before = _main, _startup
    startup = _startup if startup_program is None else instance("startup_program", startup_program, Program)
    _main, _startup = instance("main_program", main_program, Program), startup
    _startup.initialises.add(main_program)
    main_program.recorder.active += 1
    try:
        with modules_recorded():
            yield
    finally:
        main_program.recorder.active -= 1
        _main, _startup = before


def data(name: str, shape: Sequence[int | None], dtype: str | torch.dtype | None = "float32") -> Variable:
    """Add an input to the program under construction.

    Args:
        name: its key in a feed.
        shape: sizes of its dimensions; None or -1 for a size that may differ from run to run.
        dtype: dtype of the fed values: a name such as `"float32"`, or a torch dtype; None is torch's default.

    Returns:
        The variable.

    Raises:
        TypeError, ValueError: An argument is invalid, or the name is taken.
        DPFuseError: The call is outside `program_guard`.

    Example:
        >>> from dpfuse.paddle import static
        >>> with static.program_guard(static.Program()):
        ...     x = static.data(name="X", shape=[None, 1], dtype="float32")
        >>> x.name, x.shape, x.dtype
        ('X', (-1, 1), torch.float32)
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a string, got {name!r}")
    kind = torch.get_default_dtype() if dtype is None else dtype_of(dtype, f"dtype of {name!r}")
    spec = InputSpec(shape, kind, name)
    if not _main.recorder.active:
        raise DPFuseError(
            f"data({name!r}) outside of program_guard; expected inside. Write `with "
            "program_guard(default_main_program()):` to build the default program."
        )
    return _main.add_feed(name, spec)
