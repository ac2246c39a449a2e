"""Lets a module act in every Python process of a program, once torch is imported. Knows no class of dpfuse."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["OPTIONS", "REPLACEMENT", "startup_variables"]

REPLACEMENT = "dpfuse.commands.replacement"  # puts dpfuse's class in the place of torch's, in each process
OPTIONS = "DPFUSE_RUN_OPTIONS"  # the variable with the options of the wrappers that it makes, as JSON

FOLDER = str(Path(__file__).resolve().parent / "at_startup")


def startup_variables(module: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which every Python process calls `start()` of a module when it has imported torch.

    A program that is started with them runs as it always does: `sys.argv`, `sys.path` and `__main__` are its own. The
    processes that it starts inherit the variables.

    Args:
        module: its name; it can be imported.
        environ: the variables that the program would have without these.

    Example:
        >>> from dpfuse.startup import startup_variables
        >>> variables = startup_variables("my.module", {"PYTHONPATH": "/models"})
        >>> variables["DPFUSE_STARTUP"], variables["PYTHONPATH"].endswith("at_startup:/models")
        ('my.module', True)
    """
    value = environ.get("PYTHONPATH", "")
    # To Python, an empty entry is the working folder, and an empty variable is none.
    before = [path for path in value.split(os.pathsep) if path != FOLDER] if value else []
    return {"PYTHONPATH": os.pathsep.join([FOLDER, *before]), "DPFUSE_STARTUP": module}
