"""`dpfuse run`: a program as it is written, with dpfuse where it wraps a model in torch's class."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfuse.errors import DPFuseError
from dpfuse.startup import OPTIONS, REPLACEMENT, startup_variables

__all__ = ["Program", "run"]

# A word of Python's own flags: letters without a value, then perhaps one that has a value, in this word or the next.
FLAGS = re.compile(r"(--[a-z-]+|-[abd-ln-zA-VYZ?]*)(?:([cmWX])(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Program:
    """A program of the user, as on torchrun's command line."""

    target: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"  # or "module", or "command"

    def check(self) -> None:
        """Raise DPFuseError if there is no such program."""
        path = Path(self.target)
        if self.kind == "script" and not (path / "__main__.py" if path.is_dir() else path).exists():
            raise DPFuseError(
                f"there is no script {self.target!r} in {os.getcwd()}; expected the path of a Python file, or of a "
                "folder with __main__.py. Write -m before the name of a module, and --no_python before that of a "
                "command"
            )
        if self.kind == "command" and shutil.which(self.target) is None:
            raise DPFuseError(f"there is no command {self.target!r} on the PATH; expected one that can be run")

    def words(self) -> list[str]:
        """Return the command line that starts it on one rank."""
        if self.kind == "command":
            return [str(shutil.which(self.target)), *self.arguments]
        as_module = ["-m"] if self.kind == "module" else []
        return [sys.executable, *_interpreter_flags(sys.orig_argv), *as_module, self.target, *self.arguments]

    def words_for_launcher(self) -> list[str]:
        """Return the end of a launcher's command line."""
        flag = {"script": [], "module": ["-m"], "command": ["--no-python"]}[self.kind]
        return [*flag, self.target, *self.arguments]


def run(program: Program, ranks: int | None, options: Mapping[str, Any]) -> int:
    """Run a program with dpfuse in the place of torch's DistributedDataParallel.

    Args:
        ranks: to start on this machine. None replaces this process by the program: it is a rank already, or the program
            starts its own ranks.
        options: of each wrapper that is made, as for `dpfuse.patch`.

    Returns:
        The launcher's exit code. Without `ranks` it does not return.

    Raises:
        DPFuseError: there is no such program, or ranks are asked for inside a job, or Python ignores its variables.
    """
    program.check()
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise DPFuseError(
            "Python was started with -E, -I or -S, so the program would not learn that dpfuse runs it; expected Python "
            "without these flags"
        )
    variables = {**startup_variables(REPLACEMENT, os.environ), OPTIONS: json.dumps(options)}
    if ranks is not None:
        return _start_ranks(program, ranks, variables)
    sys.stdout.flush()
    sys.stderr.flush()
    words = program.words()
    os.execve(words[0], words, {**os.environ, **variables})


def _start_ranks(program: Program, ranks: int, variables: Mapping[str, str]) -> int:
    """Start a program on ranks of this machine with torchrun. Return its exit code. Ctrl-C ends it with one line.

    `variables` are added to the environment of the ranks.

    Raises:
        DPFuseError: this process is a rank of a job itself.
    """
    if "WORLD_SIZE" in os.environ:
        raise DPFuseError(
            f"--ranks={ranks} was given inside a job of WORLD_SIZE={os.environ['WORLD_SIZE']}; expected no such flag "
            "there. Give the number to the launcher, or remove WORLD_SIZE from the environment"
        )
    from dpfuse.job.launcher import run_job
    from dpfuse.job.read_environment import environment

    with environment(variables):
        return run_job(["--nproc_per_node", str(ranks), *program.words_for_launcher()], shows_interrupts=False)


def _interpreter_flags(words: Sequence[str]) -> list[str]:
    """Return the flags of Python in the command line of this process, such as -u and -X dev.

    Python takes letters together, as in `-um module` and `-OWerror`.

    Example:
        >>> _interpreter_flags(["python", "-u", "-X", "dev", "-m", "dpfuse", "run", "train.py"])
        ['-u', '-X', 'dev']
        >>> _interpreter_flags(["python", "-O", "bin/dpfuse", "run", "train.py"])
        ['-O']
        >>> _interpreter_flags(["python", "-um", "dpfuse", "run", "train.py"])
        ['-u']
    """
    flags: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        found = FLAGS.fullmatch(word)
        if found is None:
            break
        switches, letter, value = found.groups()
        if letter in ("m", "c"):
            return [*flags, *([switches] if len(switches) > 1 else [])]
        flags.append(word)
        if not value and (letter or word == "--check-hash-based-pycs"):
            flags.append(next(rest, ""))
    return flags
